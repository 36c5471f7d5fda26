"""The metadata of a group: which arrays have samples, along which axis, what they mean, and which dataset it is.

Copies of a dataset have the same identity, and one that was written again has another one. dshuffle marks the groups
that it writes with an attribute, so that unfinished ones are recognised. A group from elsewhere may have an attribute
of the same name. So the mark is recognised by all of its fields.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import zarr
from zarr import Array, Group
from zarr.abc.store import Store, SuffixByteRequest
from zarr.core.sync import sync

from dshuffle.checks import as_integer
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store.cf import DECISIVE, attributes_of, dimensions
from dshuffle.store.places import PROTOTYPE, Location, PatientStore

ATTRIBUTE = "dshuffle"
"""Name of the group attribute."""

ANNDATA = ("obs", "obsm", "layers")
"""Groups of an AnnData store whose arrays have a row for each observation."""

SAMPLED = 8
"""Stored objects of a group from elsewhere that its digest looks at, spread over each array."""

SAMPLED_BY_ALL = 3
"""Stored objects of an array of which every worker compares the end before a session opens, for the largest arrays."""

SAMPLED_NBYTES = 4096
"""Bytes at the end of each of these objects."""

_VERSION = 1
_MOST_NAMED = 20
_ADVICE = (
    'Name the arrays to open: arrays=["x", "group/y"]. Or ask for consolidated metadata '
    "(zarr.consolidate_metadata), which say what the group has"
)


@dataclass(frozen=True, slots=True)
class Mark:
    """What dshuffle says about a group that it writes: whether it is complete, and the random name of a dataset."""

    complete: bool
    uuid: str | None = None

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Self | None:
        """The mark among the attributes of a group; None if dshuffle did not write the group."""
        fields = attributes.get(ATTRIBUTE)
        if not isinstance(fields, Mapping) or fields.keys() - {"uuid"} != {"version", "complete"}:
            return None
        version, complete, name = fields["version"], fields["complete"], fields.get("uuid")
        if type(version) is not int or version < 1 or type(complete) is not bool:
            return None
        if name is not None and not (complete and isinstance(name, str) and re.fullmatch(r"[0-9a-f]{32}", name)):
            return None
        return cls(complete, name)

    @classmethod
    def of_new_dataset(cls) -> Self:
        """The mark of a complete dataset, with a new name."""
        return cls(complete=True, uuid=uuid.uuid4().hex)

    def attributes(self) -> dict[str, Any]:
        """The group attribute."""
        fields: dict[str, Any] = {"version": _VERSION, "complete": self.complete}
        return {ATTRIBUTE: fields if self.uuid is None else {**fields, "uuid": self.uuid}}


@dataclass(frozen=True, slots=True)
class Opening:
    """How a dataset was opened: where it is, and what the user asked for (:func:`~dshuffle.store.open_dataset`)."""

    location: Location
    arrays: tuple[str, ...] | None = None
    sample_dim: str | int | None = None
    decode: bool = True
    absent_chunks: str | None = None

    @classmethod
    def of(
        cls,
        location: Location,
        arrays: str | Sequence[str] | None,
        sample_dim: str | int | None,
        decode: bool,
        absent_chunks: str | None,
    ) -> Self:
        """Check what a user asked for."""
        if arrays is not None:
            names = (arrays,) if isinstance(arrays, str) else tuple(arrays)
            if not names or not all(isinstance(name, str) and name.strip("/") for name in names):
                raise InvalidParameter.of("arrays", arrays, "None, or names of arrays")
            arrays = tuple(dict.fromkeys(name.strip("/") for name in names))
        if not isinstance(sample_dim, str | None):
            sample_dim = as_integer("sample_dim", sample_dim, 0)
        if not isinstance(decode, bool):
            raise InvalidParameter.of("decode", decode, "True or False")
        if absent_chunks not in (None, "fill", "error"):
            raise InvalidParameter.of("absent_chunks", absent_chunks, '"fill", "error" or None')
        return cls(location, arrays, sample_dim, decode, absent_chunks)

    @property
    def words(self) -> str:
        """What was asked for as part of an identity, which must never change: checkpoints have it."""
        if self.arrays is None and self.sample_dim is None and self.decode:
            return ""
        return f"Wanted(arrays={self.arrays!r}, sample_dim={self.sample_dim!r}, decode={self.decode!r})"

    def group(self, store: PatientStore, zarr_format: Literal[2, 3] | None = None) -> Group:
        """The group in a store that was opened."""
        path = self.location.path
        try:
            return zarr.open_group(store=store, path=path, mode="r", zarr_format=zarr_format)
        except ValueError:
            # Consolidated metadata may have an array that zarr does not understand; then find_arrays leaves it out.
            return zarr.open_group(store=store, path=path, mode="r", zarr_format=zarr_format, use_consolidated=False)

    def identity(self, store: PatientStore) -> str:
        """The identity of what is stored now."""
        group = self.group(store)
        return identity_of(store, group, find_arrays(group, self), self)


class SampleArrays(NamedTuple):
    """The arrays of samples of a group, their axes of samples, and why others are left out: each by name."""

    arrays: dict[str, Array[Any]]
    axes: dict[str, int]
    skipped: dict[str, str]


def find_arrays(group: Group, opening: Opening) -> SampleArrays:
    """Find the arrays of samples."""
    url, groups, skipped = opening.location.url, list[str](), dict[str, str]()
    if opening.arrays is not None:
        arrays = {name: _array_named(group, name) for name in opening.arrays}
    else:
        arrays, skipped, groups = _all(group)
    for name in list(arrays):
        if reason := unreadable_items(arrays[name]):
            skipped[name] = reason
            del arrays[name]
    axes, reasons = _axes(arrays, opening.sample_dim)
    skipped |= reasons
    said = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    if opening.arrays is not None and skipped:
        raise DatasetError(f"these arrays of {url} cannot be opened together: {said}")
    if not axes and isinstance(opening.sample_dim, str) and arrays:
        names_of_dims = sorted({str(name) for array in arrays.values() for name in dimensions(array) or ()})
        raise InvalidParameter.of("sample_dim", opening.sample_dim, f"one of the dimensions of {url}: {names_of_dims}")
    if groups and all(dimensions(arrays[name]) == (name,) for name in axes):
        own = f"only coordinates of its own ({', '.join(axes)})" if axes else "no arrays of samples of its own"
        names = ", ".join(groups[:_MOST_NAMED]) + (", ..." if len(groups) > _MOST_NAMED else "")
        raise DatasetError(
            f"the Zarr group at {url} has {own}, but it has groups: {names}. Open one of them, by its URL or a "
            "StorePath, or name arrays"
        )
    if not axes:
        raise DatasetError(f"the Zarr group at {url} has no arrays of samples" + (f": {said}" if said else ""))
    return SampleArrays({name: arrays[name] for name in sorted(axes)}, axes, dict(sorted(skipped.items())))


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
        length = array.shape[axis] if length is None else length
        if array.shape[axis] != length:
            skipped[name] = f"its length is {array.shape[axis]}, not {length} as that of {main}"
        else:
            axes[name] = axis
    return axes, skipped


def unreadable_items(array: Array[Any]) -> str:
    """Why the items of an array cannot be part of a row; empty if they can."""
    if array.ndim == 0:
        return "it is a scalar"
    dtype, metadata = array.dtype, array.metadata
    if dtype.hasobject or dtype.kind in "OT":
        return f"its items have different lengths ({dtype})"
    grid = {"name": "regular"} if metadata.zarr_format == 2 else metadata.chunk_grid.to_dict()
    return "" if grid["name"] == "regular" else f"its chunks differ in size (chunk grid {grid['name']!r})"


def _all(group: Group) -> tuple[dict[str, Array[Any]], dict[str, str], list[str]]:
    """All arrays directly below a group, why others are left out, and the names of the groups below.

    Of an AnnData store, the arrays with a row for each observation are taken, too.
    """
    arrays, groups, skipped = _members(group)
    if group.attrs.get("encoding-type") != "anndata":
        return arrays, skipped, list(groups)
    for name, node in groups.items():
        if name not in ANNDATA:
            skipped[name] = _kind_of_group(name, node)
            continue
        inner, deep, reasons = _members(node)
        reasons |= {key: _kind_of_group(f"{name}/{key}", below) for key, below in deep.items()}
        arrays |= {f"{name}/{key}": array for key, array in inner.items()}
        skipped |= {f"{name}/{key}": reason for key, reason in reasons.items()}
    index = group["obs"].attrs.get("_index") if "obs" in groups else None
    n_observations = next((arrays[name].shape[0] for name in (f"obs/{index}", "X") if name in arrays), None)
    # The largest array does not decide here: X may be longer along its other axis.
    for name, array in list(arrays.items()):
        if n_observations is not None and (array.ndim == 0 or array.shape[0] != n_observations):
            skipped[name] = f"it does not have a row for each of the {n_observations} observations"
            del arrays[name]
    return arrays, skipped, []


def _members(group: Group) -> tuple[dict[str, Array[Any]], dict[str, Group], dict[str, str]]:
    """The arrays and groups directly below a group, and why others cannot be opened: each by name."""
    members: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    try:
        members = dict(group.members())
    except Exception as failure:  # one of them may have metadata that zarr does not understand
        names = _listed(group)  # raises its own error if it is the listing that fails
        if isinstance(failure, DatasetError):
            raise
        for name in names:
            try:
                members[name] = group[name]
            except KeyError:  # not a node
                continue
            except Exception as error:
                skipped[name] = f"zarr cannot open it ({type(error).__name__}: {error})"
    if not members and not skipped and group.metadata.consolidated_metadata is None and not _listed(group):
        # At least the document of the group exists.
        place = f"{group.store}/{group.path}" if group.path else str(group.store)
        raise DatasetError(f"{place} cannot be listed, as is usual over HTTP. {_ADVICE}")
    ordered = sorted(members.items())
    arrays = {name: node for name, node in ordered if isinstance(node, Array)}
    return arrays, {name: node for name, node in ordered if isinstance(node, Group)}, skipped


def _listed(group: Group) -> list[str]:
    """Names of the objects and folders below a group."""

    async def names() -> list[str]:
        return sorted([name async for name in group.store.list_dir(group.path)])

    try:
        return sync(names())
    except DatasetError as error:
        raise DatasetError(f"{error}. {_ADVICE}") from None


def _array_named(group: Group, name: str) -> Array[Any]:
    """Open one array of a group, by its name or its path."""
    try:
        node = group[name]
    except KeyError:
        try:
            hint = f"It has {', '.join(_members(group)[0]) or 'no arrays'}."
        except DatasetError:
            hint = "Its store cannot be listed, so the names that it has are unknown."
        raise InvalidParameter.of("arrays", name, "the name of an array of the group", hint) from None
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(
            f"array {name} cannot be opened: zarr cannot open it ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(node, Array):
        raise DatasetError(f"{name} is not an array: {_kind_of_group(name, node)}")
    return node


def _kind_of_group(name: str, node: Group) -> str:
    """Why a group is not an array of samples."""
    kind = node.attrs.get("encoding-type", "group")
    if kind in ("csr_matrix", "csc_matrix"):
        return f"it is a {kind}, and rows of different lengths cannot be read. Store it as a dense array"
    if kind == "categorical":
        return f'it is categorical. Open its codes by name: arrays=["{name}/codes", ...]'
    return f"it is a {kind}"


def identity_of(store: Store, group: Group, chosen: SampleArrays, opening: Opening) -> str:
    """The identity of a dataset (:attr:`~dshuffle.store.Dataset.identity`)."""
    mark, asked, meaning = Mark.of(group.attrs), opening.words, _meaning(chosen, opening)
    if mark is not None and not mark.complete:
        return "incomplete"
    if mark is not None and mark.uuid is not None:
        if not asked and not meaning:
            return mark.uuid
        return hashlib.sha256(f"{mark.uuid}{asked}{meaning}".encode()).hexdigest()[:32]
    digest = hashlib.sha256(f"{asked}{meaning}".encode())
    for name, array in sorted(chosen.arrays.items()):
        metadata = {key: value for key, value in array.metadata.to_dict().items() if key != "attributes"}
        digest.update(f"{name}={json.dumps(metadata, sort_keys=True, default=str)};".encode())
        digest.update(_ends(store, array, SAMPLED))
    return digest.hexdigest()[:32]


def _meaning(chosen: SampleArrays, opening: Opening) -> str:
    """What decides the values of stored numbers beside the metadata; empty if they are the values, row by row."""
    meaning = {}
    attributes = attributes_of(chosen.arrays) if opening.decode else {}
    for name in sorted(chosen.arrays):
        decisive = {key: value for key, value in attributes.get(name, {}).items() if key in DECISIVE}
        if decisive or chosen.axes[name]:
            meaning[name] = [chosen.axes[name], decisive]
    return json.dumps(meaning, sort_keys=True, default=str) if meaning else ""


def ends_of(store: Store, arrays: Iterable[Array[Any]]) -> str:
    """Digest of the last bytes of a few chunks: those of a copy that is damaged or out of date may differ.

    A dataset from :func:`~dshuffle.store.create_dataset` has the checksums of chunks there. Whole chunks are not read,
    since every worker looks at them.
    """
    largest = sorted(arrays, key=lambda array: (-array.nbytes, array.path))[:SAMPLED]
    return hashlib.sha256(b"".join(_ends(store, array, SAMPLED_BY_ALL) for array in largest)).hexdigest()[:32]


def _ends(store: Store, array: Array[Any], n_sampled: int) -> bytes:
    """The ends of stored objects spread over an array, which is where chunks have their checksums."""
    stored = array.shards or array.chunks
    grid = [math.ceil(size / each) for size, each in zip(array.shape, stored, strict=True)]
    total = math.prod(grid)
    if not total:
        return b""
    numbers = sorted({i * (total - 1) // max(1, n_sampled - 1) for i in range(min(n_sampled, total))} | {total - 1})
    steps = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]

    async def end(number: int) -> bytes:
        index = tuple(number // step % size for step, size in zip(steps, grid, strict=True))
        key = f"{array.path}/{array.metadata.encode_chunk_key(index)}"
        buffer = await store.get(key, PROTOTYPE, SuffixByteRequest(SAMPLED_NBYTES))
        return b"absent;" if buffer is None else buffer.to_bytes()

    async def all_ends() -> list[bytes]:
        return await asyncio.gather(*map(end, numbers))

    return b"".join(sync(all_ends()))
