"""The arrays and groups below a Zarr group, and why some of them cannot be opened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zarr import Array, Group
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from dshuffle.errors import DatasetError, InvalidParameter

_ADVICE = (
    'Name the arrays to open: arrays=["x", "group/y"]. Or ask for consolidated metadata '
    "(zarr.consolidate_metadata), which say what the group has"
)


@dataclass(frozen=True, slots=True)
class Children:
    """What is directly below a group.

    Parameters
    ----------
    arrays, groups
        Name -> array or group.
    skipped
        Name -> why it cannot be opened.
    """

    arrays: dict[str, Array[Any]]
    groups: dict[str, Group]
    skipped: dict[str, str]


def children(group: Group) -> Children:
    """List the arrays and groups directly below a group.

    Raises
    ------
    DatasetError
        If the store cannot be reached, or does not list what it has.
    """
    skipped: dict[str, str] = {}
    try:
        members = dict(group.members())
    except DatasetError:
        _listed_names(group)  # raises its own error if it is the listing that fails
        raise
    except Exception:  # one of them has metadata that zarr does not understand
        members = {}
        for name in _listed_names(group):
            try:
                members[name] = group[name]
            except KeyError:  # not a node
                continue
            except Exception as error:
                skipped[name] = _why_not(group, name, error)
    if not members and not skipped and group.metadata.consolidated_metadata is None and not _listed_names(group):
        # At least the document of the group exists.
        raise DatasetError(f"{_place(group)} cannot be listed, as is usual over HTTP. {_ADVICE}")
    arrays = {name: node for name, node in sorted(members.items()) if isinstance(node, Array)}
    groups = {name: node for name, node in sorted(members.items()) if isinstance(node, Group)}
    return Children(arrays, groups, skipped)


def array_named(group: Group, name: str) -> Array[Any]:
    """Open one array of a group, by its name or its path.

    Raises
    ------
    InvalidParameter
        If there is none of this name.
    DatasetError
        If it cannot be opened.
    """
    try:
        node = group[name]
    except KeyError:
        try:
            hint = f"It has {', '.join(sorted(children(group).arrays)) or 'no arrays'}."
        except DatasetError:
            hint = "Its store cannot be listed, so the names that it has are unknown."
        raise InvalidParameter.of("arrays", name, "the name of an array of the group", hint) from None
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(f"array {name} cannot be opened: {_why_not(group, name, error)}") from error
    if not isinstance(node, Array):
        raise DatasetError(f"{name} is not an array: {kind_of_group(name, node)}")
    return node


def kind_of_group(name: str, node: Group) -> str:
    """Why a group is not an array of samples."""
    kind = node.attrs.get("encoding-type", "group")
    if kind in ("csr_matrix", "csc_matrix"):
        return f"it is a {kind}, and rows of different lengths cannot be read. Store it as a dense array"
    if kind == "categorical":
        return f'it is categorical. Open its codes by name: arrays=["{name}/codes", ...]'
    return f"it is a {kind}"


def chunk_grid_refusal(metadata: Mapping[str, Any]) -> str:
    """Why arrays with this metadata document cannot be read because of their chunks; empty if they can."""
    grid = metadata.get("chunk_grid")
    name = grid.get("name") if isinstance(grid, Mapping) else grid
    return "" if name in (None, "regular") else f"its chunks differ in size (chunk grid {name!r})"


def _listed_names(group: Group) -> list[str]:
    """Names of the objects and folders below a group."""
    try:
        return sync(_names(group))
    except DatasetError as error:
        raise DatasetError(f"{error}. {_ADVICE}") from None


async def _names(group: Group) -> list[str]:
    return sorted([name async for name in group.store.list_dir(group.path)])


def _why_not(group: Group, name: str, error: Exception) -> str:
    """Why zarr cannot open a node."""
    key = "/".join(filter(None, (group.path, name, "zarr.json")))
    document = sync(group.store.get(key, default_buffer_prototype()))
    try:
        metadata = {} if document is None else json.loads(document.to_bytes())
    except ValueError:
        metadata = {}
    refusal = chunk_grid_refusal(metadata) if isinstance(metadata, Mapping) else ""
    return refusal or f"zarr cannot open it ({type(error).__name__}: {error})"


def _place(group: Group) -> str:
    return f"{group.store}/{group.path}" if group.path else str(group.store)
