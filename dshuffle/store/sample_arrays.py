"""The arrays and groups below a Zarr group: which of them have samples, along which axis, and why others do not."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zarr import Array, Group
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from dshuffle.checks import as_integer
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store.cf import DIMENSIONS

ANNDATA = ("obs", "obsm", "layers")
"""Groups of an AnnData store whose arrays have a row for each observation."""

_MOST_NAMED = 20
_MOST_VISITED = 100


@dataclass(frozen=True, slots=True)
class ArrayChoice:
    """What a user asks for when a group is opened.

    Parameters
    ----------
    arrays
        Names of arrays, or their paths below the group. None for all that have the sample dimension.
    sample_dim
        Name or number of the sample dimension. None for the first dimension of the largest array.
    decode
        Whether scale, offset, missing values and times are applied.
    """

    arrays: str | Sequence[str] | None = None
    sample_dim: str | int | None = None
    decode: bool = True

    def __post_init__(self) -> None:
        if self.arrays is not None:
            names = (self.arrays,) if isinstance(self.arrays, str) else tuple(self.arrays)
            if not names or not all(isinstance(name, str) and name.strip("/") for name in names):
                raise InvalidParameter.of("arrays", self.arrays, "None, or names of arrays")
            object.__setattr__(self, "arrays", tuple(dict.fromkeys(name.strip("/") for name in names)))
        if not isinstance(self.sample_dim, str | None):
            object.__setattr__(self, "sample_dim", as_integer("sample_dim", self.sample_dim, 0))
        if not isinstance(self.decode, bool):
            raise InvalidParameter.of("decode", self.decode, "True or False")


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """The arrays of samples of a group.

    Parameters
    ----------
    axes
        Name -> axis of the samples.
    skipped
        Name -> why the array is not one of them.
    """

    arrays: Mapping[str, Array[Any]]
    axes: Mapping[str, int]
    skipped: Mapping[str, str]

    @property
    def n_samples(self) -> int:
        """Length of the sample dimension."""
        return next(self.arrays[name].shape[axis] for name, axis in self.axes.items())


def find_arrays(group: Group, url: str, choice: ArrayChoice) -> SampleArrays:
    """Find the arrays of samples."""
    candidates = _candidates(group, choice)
    arrays, axes, skipped = candidates.arrays, candidates.axes, candidates.skipped
    if choice.arrays is not None and skipped:
        raise DatasetError(f"these arrays of {url} cannot be opened together: {_listed(skipped)}")
    if candidates.groups and candidates.are_coordinates and (below := _groups_with_samples(candidates.groups, choice)):
        own = f"only coordinates of its own ({', '.join(axes)})" if axes else "no arrays of samples of its own"
        names = ", ".join(below[:_MOST_NAMED]) + (", ..." if len(below) > _MOST_NAMED else "")
        raise DatasetError(
            f"the Zarr group at {url} has {own}, but groups below it have: {names}. Open one of them, by its URL or a "
            "StorePath"
        )
    if not axes:
        reasons = f": {_listed(skipped)}" if skipped else ""
        if isinstance(choice.sample_dim, str) and arrays:
            names_of_dims = sorted({str(name) for array in arrays.values() for name in dimensions(array) or ()})
            raise InvalidParameter.of(
                "sample_dim", choice.sample_dim, f"one of the dimensions of {url}: {names_of_dims}"
            )
        raise DatasetError(f"the Zarr group at {url} has no arrays of samples{reasons}")
    return SampleArrays({name: arrays[name] for name in sorted(axes)}, axes, dict(sorted(skipped.items())))


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Arrays of a group, which of them have samples, and the groups below."""

    arrays: dict[str, Array[Any]]
    axes: dict[str, int]
    skipped: dict[str, str]
    groups: dict[str, Group]

    @property
    def are_coordinates(self) -> bool:
        """Whether all arrays of samples, if there are any, are coordinates of their own dimension."""
        return all(dimensions(self.arrays[name]) == (name,) for name in self.axes)


def _candidates(group: Group, choice: ArrayChoice) -> _Candidates:
    if choice.arrays is not None:
        arrays, skipped = {name: array_named(group, name) for name in choice.arrays}, dict[str, str]()
        groups = dict[str, Group]()
    else:
        arrays, skipped, groups = _all(group)
    for name in list(arrays):
        if reason := unreadable_items(arrays[name]):
            skipped[name] = reason
            del arrays[name]
    axes, reasons = _axes(arrays, choice.sample_dim)
    return _Candidates(arrays, axes, skipped | reasons, groups)


def _groups_with_samples(groups: Mapping[str, Group], choice: ArrayChoice) -> list[str]:
    """Paths of the groups at any depth that can be opened, as far as few requests tell."""
    paths: list[str] = []
    queue = deque(groups.items())
    for _ in range(_MOST_VISITED):
        if not queue:
            break
        path, group = queue.popleft()
        candidates = _candidates(group, choice)
        if candidates.axes and not (candidates.groups and candidates.are_coordinates):
            paths.append(path)
        else:
            queue.extend((f"{path}/{name}", below) for name, below in candidates.groups.items())
    return paths


def dimensions(array: Array[Any]) -> tuple[str | None, ...] | None:
    """Names of the dimensions of an array; None if they have none."""
    names: Any = getattr(array.metadata, "dimension_names", None) or array.attrs.get(DIMENSIONS)
    if not isinstance(names, Sequence) or len(names) != array.ndim or not any(names):
        return None
    return tuple(name if isinstance(name, str) else None for name in names)


def _axes(arrays: Mapping[str, Array[Any]], sample_dim: str | int | None) -> tuple[dict[str, int], dict[str, str]]:
    """The axis of the samples of each array, and why other arrays have none."""
    axes: dict[str, int] = {}
    skipped: dict[str, str] = {}
    if not arrays:
        return axes, skipped
    axis = sample_dim if isinstance(sample_dim, int) else 0
    has_axis = [name for name, array in arrays.items() if array.ndim > axis] or list(arrays)
    main = max(has_axis, key=lambda name: (arrays[name].nbytes, arrays[name].ndim, name))
    dim: str | None = sample_dim if isinstance(sample_dim, str) else None
    length: int | None = None
    if dim is None and arrays[main].ndim > axis:
        names = dimensions(arrays[main])
        dim, length = None if names is None else names[axis], arrays[main].shape[axis]
    for name, array in arrays.items():
        names = dimensions(array)
        if dim is not None and names is not None:
            if dim not in names:
                skipped[name] = f"its dimensions are {', '.join(map(str, names))}, without {dim}"
                continue
            axis = names.index(dim)
        elif isinstance(sample_dim, str):
            skipped[name] = "its dimensions have no names"
            continue
        else:
            axis = sample_dim or 0
            if array.ndim <= axis:
                skipped[name] = f"it has no axis {axis}"
                continue
        if length is None:
            length = array.shape[axis]
        if array.shape[axis] != length:
            skipped[name] = f"its length is {array.shape[axis]}, not {length} as that of {main}"
            continue
        axes[name] = axis
    return axes, skipped


def unreadable_items(array: Array[Any]) -> str:
    """Why the items of an array cannot be part of a row; empty if they can."""
    if array.ndim == 0:
        return "it is a scalar"
    dtype = array.dtype
    if dtype.hasobject or dtype.kind in "OT":
        return f"its items have different lengths ({dtype})"
    metadata: Any = array.metadata
    return "" if metadata.zarr_format == 2 else chunk_grid_refusal({"chunk_grid": metadata.chunk_grid.to_dict()})


def _all(group: Group) -> tuple[dict[str, Array[Any]], dict[str, str], dict[str, Group]]:
    """All arrays directly below a group; of an AnnData store, also those with a row for each observation."""
    below = children(group)
    arrays, skipped, groups = below.arrays, below.skipped, below.groups
    if group.attrs.get("encoding-type") != "anndata":
        return arrays, skipped, groups
    for name, node in groups.items():
        if name not in ANNDATA:
            skipped[name] = kind_of_group(name, node)
            continue
        inner = children(node)
        arrays |= {f"{name}/{key}": array for key, array in inner.arrays.items()}
        skipped |= {f"{name}/{key}": reason for key, reason in inner.skipped.items()}
        skipped |= {f"{name}/{key}": kind_of_group(f"{name}/{key}", deep) for key, deep in inner.groups.items()}
    index = group["obs"].attrs.get("_index") if "obs" in groups else None
    n_observations = next((arrays[name].shape[0] for name in (f"obs/{index}", "X") if name in arrays), None)
    # The largest array does not decide here: X may be longer along its other axis.
    for name, array in list(arrays.items()):
        if n_observations is not None and (array.ndim == 0 or array.shape[0] != n_observations):
            skipped[name] = f"it does not have a row for each of the {n_observations} observations"
            del arrays[name]
    return arrays, skipped, {}


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


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
    """List the arrays and groups directly below a group."""
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
    """Open one array of a group, by its name or its path."""
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
