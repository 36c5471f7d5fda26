"""The metadata of a group: which arrays have samples, along which axis, what they mean, and which dataset it is.

xarray decides what numbers mean, by the CF conventions, when a dataset is opened. Workers get the decision
(:mod:`dshuffle.encodings`), and do not need xarray.

Copies of a dataset have the same identity, and one that was written again has another one. dshuffle marks the groups
that it writes with an attribute, so that unfinished ones are recognised. A group from elsewhere may have an attribute
of the same name. So the mark is recognised by all of its fields.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import importlib
import json
import math
import struct
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr import Array, AsyncArray, AsyncGroup, Group
from zarr.abc.store import Store, SuffixByteRequest
from zarr.core.sync import sync

from dshuffle.encodings import EARLIEST, LATEST, Encoding
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store.places import PROTOTYPE, Location, PatientStore

Stored = Array[Any]
Arrays = dict[str, Stored]
Reasons = dict[str, str]
Attributes = dict[str, Any]

DIMENSIONS = "_ARRAY_DIMENSIONS"
"""Attribute with the names of the dimensions of an array in Zarr v2."""

PACKING = ("scale_factor", "add_offset")

DECISIVE = (*PACKING, "_FillValue", "missing_value", "_Unsigned", "units", "calendar", "dtype")
"""Attributes that decide the values of stored numbers."""

LONG = ("days", "hours", "minutes", "seconds", "milliseconds", "microseconds", "nanoseconds")
"""Units that xarray counts itself; it leaves shorter names to cftime."""

REFORM = int(np.datetime64("1582-10-15", "s").astype(np.int64))
"""Before it, in seconds since 1970, the standard calendar has other dates than NumPy."""

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

SAMPLED = 8
"""Stored objects of a group from elsewhere that its digest looks at, spread over each array."""

SAMPLED_NBYTES = 4096
"""Bytes at the end of each of these objects."""

MOST_NAMED = 20


def mark_of(group: Group) -> Attributes:
    """What dshuffle says about a group that it has written; empty if it has not."""
    mark = group.attrs.get("dshuffle")
    if not isinstance(mark, Mapping) or mark.keys() - {"uuid"} != {"version", "complete"}:
        return {}
    return dict(mark) if (type(mark["version"]), type(mark["complete"])) == (int, bool) else {}


def new_mark(*, complete: bool) -> Attributes:
    """The attribute of a dataset that dshuffle writes; one that is complete has a random name."""
    name = {"uuid": uuid.uuid4().hex} if complete else {}
    return {"dshuffle": {"version": 1, "complete": complete, **name}}


@dataclass(frozen=True, slots=True)
class Opening:
    """How a dataset was opened: where it is, and what the user asked for (:func:`~dshuffle.store.open_dataset`)."""

    location: Location
    arrays: tuple[str, ...] | None = None
    sample_dim: str | int | None = None
    decode: bool = True

    @property
    def words(self) -> str:
        """What was asked for as part of an identity, which must never change: checkpoints have it."""
        if self.arrays is None and self.sample_dim is None and self.decode:
            return ""
        return f"Wanted(arrays={self.arrays!r}, sample_dim={self.sample_dim!r}, decode={self.decode!r})"

    def group(self, store: PatientStore) -> Group:
        """The group in a store that was opened."""
        opened = partial(zarr.open_group, store, path=self.location.path, mode="r", zarr_format=store.zarr_format)
        try:
            return opened()
        except ValueError:
            # Consolidated metadata may have an array that zarr does not understand; then find_arrays leaves it out.
            return opened(use_consolidated=False)

    def identity(self, store: PatientStore) -> str:
        """The identity of what is stored now."""
        group = self.group(store)
        return identity_of(store, group, find_arrays(group, self), self)


class SampleArrays(NamedTuple):
    """The arrays of samples of a group, their axes of samples, and why others are left out: each by name."""

    arrays: Arrays
    axes: dict[str, int]
    skipped: Reasons


def find_arrays(group: Group, opening: Opening) -> SampleArrays:
    """Find the arrays of samples among those directly below a group, or among those that were asked for."""
    url, arrays, skipped, groups = opening.location.url, Arrays(), Reasons(), list[str]()
    for name, node in sorted(_nodes(group, opening.arrays).items()):
        if isinstance(node, Array):
            arrays[name] = node
        elif isinstance(node, Exception):
            skipped[name] = f"zarr cannot open it ({type(node).__name__}: {node})"
        else:
            groups.append(name)
    if opening.arrays is not None:
        skipped |= dict.fromkeys(groups, "it is a group")
    skipped |= {name: reason for name, array in arrays.items() if (reason := unreadable_items(array))}
    axes, reasons = _axes({name: arrays[name] for name in arrays if name not in skipped}, opening.sample_dim)
    skipped |= reasons
    said = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    if opening.arrays is not None and skipped:
        raise DatasetError(f"these arrays of {url} cannot be opened together: {said}")
    if not axes and isinstance(opening.sample_dim, str) and arrays:
        names_of_dims = sorted({str(name) for array in arrays.values() for name in dimensions(array) or ()})
        raise InvalidParameter.of("sample_dim", opening.sample_dim, f"one of the dimensions of {url}: {names_of_dims}")
    if not axes or (groups and all(dimensions(arrays[name]) == (name,) for name in axes)):
        own = f"no arrays of samples but coordinates ({', '.join(axes)})" if axes else "no arrays of samples"
        hint = f". It has groups: {', '.join(groups[:MOST_NAMED])}. Open one of them, by its URL or a StorePath"
        raise DatasetError(f"the Zarr group at {url} has {own}{said and f' ({said})'}{hint if groups else ''}")
    return SampleArrays({name: arrays[name] for name in axes}, axes, dict(sorted(skipped.items())))


def _nodes(group: Group, asked: Sequence[str] | None) -> dict[str, Stored | Group | Exception]:
    """The arrays and groups directly below a group, or those that were asked for, or why zarr cannot open them."""
    consolidated = group.metadata.consolidated_metadata
    names = asked or (_listed(group) if consolidated is None else list(consolidated.metadata))

    async def opened() -> list[Any]:
        # A member may have metadata that zarr does not understand.
        return await asyncio.gather(*map(group._async_group.getitem, names), return_exceptions=True)

    nodes: dict[str, Stored | Group | Exception] = {}
    for name, node in zip(names, sync(opened()), strict=True):
        if isinstance(node, KeyError):
            if asked:
                raise InvalidParameter.of("arrays", name, "the name of an array of the group", _names_in(group))
        elif isinstance(node, DatasetError) or not isinstance(node, Exception | AsyncArray | AsyncGroup):
            raise node
        else:
            kind: Any = {AsyncArray: Array, AsyncGroup: Group}.get(type(node), lambda error: error)
            nodes[name] = kind(node)
    return nodes


def _names_in(group: Group) -> str:
    try:
        names = sorted(name for name, node in _nodes(group, None).items() if isinstance(node, Array))
        return f"It has {', '.join(names)}."
    except DatasetError:
        return "Its store cannot be listed, so the names that it has are unknown."


def _listed(group: Group) -> list[str]:
    """Names of what is below a group, which can be listed if its own document is found."""

    async def listed() -> list[str]:
        return [name async for name in group.store.list_dir(group.path)]

    try:
        if names := sync(listed()):
            return [name for name in names if name[0] != "." and name != "zarr.json"]
        reason = f"{group.store_path} cannot be listed, as is usual over HTTP"
    except DatasetError as error:
        reason = str(error)
    raise DatasetError(
        f'{reason}. Name the arrays to open: arrays=["x", "group/y"]. Or ask for consolidated metadata '
        "(zarr.consolidate_metadata), which say what the group has"
    )


def _axes(arrays: Arrays, sample_dim: str | int | None) -> tuple[dict[str, int], Reasons]:
    """The axis of the samples of each array, and why other arrays have none."""
    axes: dict[str, int] = {}
    skipped: Reasons = {}
    asked, dim = (0, sample_dim) if isinstance(sample_dim, str) else (sample_dim or 0, None)
    length: int | None = None
    if dim is None and (wide := [array for array in arrays.values() if array.ndim > asked]):
        main = max(wide, key=lambda array: (array.nbytes, array.ndim, array.path))
        dim, length = (dimensions(main) or {asked: None})[asked], main.shape[asked]
    for name, array in arrays.items():
        names = dimensions(array)
        axis = asked if dim is None or names is None else names.index(dim) if dim in names else -1
        if names is None and isinstance(sample_dim, str):
            skipped[name] = "its dimensions have no names"
        elif not 0 <= axis < array.ndim:
            skipped[name] = f"it has no dimension {asked if dim is None or names is None else dim}"
        elif array.shape[axis] != (length := array.shape[axis] if length is None else length):
            skipped[name] = f"its length is {array.shape[axis]}, not {length}"
        else:
            axes[name] = axis
    return axes, skipped


def dimensions(array: Stored) -> tuple[str | None, ...] | None:
    """Names of the dimensions of an array; None if they have none."""
    names: Any = getattr(array.metadata, "dimension_names", None) or array.attrs.get(DIMENSIONS)
    if not isinstance(names, Sequence) or len(names) != array.ndim or not any(names):
        return None
    return tuple(name if isinstance(name, str) else None for name in names)


def unreadable_items(array: Stored) -> str:
    """Why the items of an array cannot be part of a row; empty if they can."""
    if array.ndim == 0:
        return "it is a scalar"
    dtype, metadata = array.dtype, array.metadata
    if dtype.hasobject or dtype.kind in "OT":
        return f"its items have different lengths ({dtype})"
    grid = {"name": "regular"} if metadata.zarr_format == 2 else metadata.chunk_grid.to_dict()
    return "" if grid["name"] == "regular" else f"its chunks differ in size (chunk grid {grid['name']!r})"


# -- What the numbers mean ---------------------------------------------------------------------------------------------


def encoding_of(array: Stored) -> tuple[Encoding | None, str]:
    """Return the encoding of an array, and why its numbers are not decoded.

    There is no encoding if the stored numbers are the values. The reason is empty if nothing remains undecoded.
    """
    dtype, attributes = array.dtype.newbyteorder("="), dict(array.attrs)
    if dtype.kind not in "iuf":
        return None, ""
    if dtype.kind in "iu" and attributes.get("dtype") == "bool":
        return Encoding("?"), ""
    fill = attributes.get("_FillValue")
    if array.metadata.zarr_format == 2 and DIMENSIONS in attributes:  # where xarray keeps it in Zarr v2
        fill = fill if array.metadata.fill_value is None else array.metadata.fill_value
    packing = {name: _number(array, name, attributes[name]) for name in PACKING if name in attributes}
    fills = [] if fill is None else [_number(array, "_FillValue", fill)]
    fills = [x for x in fills if x == x]  # NaN is NaN anyway
    others = attributes.get("missing_value")
    missing = [x for x in (others if isinstance(others, list) else [others]) if type(x) in (int, float) and x == x]
    units = attributes.get("units")
    is_time = isinstance(units, str) and ("since" in units or units in LONG)
    is_time |= str(attributes.get("dtype")).startswith("timedelta64")
    signed = {name: attributes[name] for name in ("_Unsigned",) if name in attributes}
    if not (packing or fills or missing or is_time or signed):
        return None, ""
    try:
        xarray = importlib.import_module("xarray")
    except ImportError:
        return None, "xarray, which knows what its attributes mean, is not installed (pip install 'dshuffle[xarray]')"
    sample = _decoded(xarray, np.zeros(1, dtype), signed)
    if dtype.kind == "f" or sample.dtype != dtype:  # fills are as they are stored, missing values as they are read
        fills = np.array(fills).astype(dtype).view(sample.dtype).tolist()
    absent = tuple(sorted({*fills, *missing}))
    if absent and "scale_factor" in packing:  # integers have no NaN
        packing["scale_factor"] = float(packing["scale_factor"])
    numbers = _decoded(xarray, sample, packing | ({"missing_value": list(absent)} if absent else {})).dtype
    times, reason = Attributes(), ""
    if is_time:
        times, reason = _times(xarray, attributes, (numbers if packing else dtype).kind == "f")
    kind = sample.dtype.kind if sample.dtype != dtype else ""
    if not (packing or absent or kind or times):
        return None, reason
    scale, offset = (packing.get(name) for name in PACKING)
    return Encoding(str(numbers), scale, offset, absent, kind, **times), reason


def _times(xarray: Any, attributes: Attributes, floats: bool) -> tuple[Attributes, str]:
    """How numbers become dates or durations, by what xarray makes of 0 and 1; or why they do not."""
    chosen = {name: attributes[name] for name in ("units", "calendar", "dtype") if name in attributes}
    units, calendar = chosen.get("units"), str(chosen.get("calendar") or "standard").lower()
    coders = xarray.coders.CFDatetimeCoder(time_unit="us"), xarray.coders.CFTimedeltaCoder(decode_via_units=False)
    try:
        times = _decoded(xarray, np.array([0, 1]), chosen, *coders)
    except Exception as error:
        return {}, f"xarray cannot decode numbers in {units!r} ({str(error.__cause__ or error)[:100]})"
    kind = times.dtype.kind
    if kind == "O":
        return {}, f"dates in {units!r} and the calendar {calendar!r} differ from those of NumPy"
    if kind not in "mM" or not isinstance(units, str) or (kind == "m" and floats):
        hint = f"which are durations only as integers with dtype='timedelta64[...]' and {LONG}"
        return {}, f"its units are {units!r}, {hint}"
    # Units with short names are left to cftime by xarray, which makes nanoseconds of other floats.
    is_long = units.partition(" since ")[0].strip().lower().removesuffix("s") + "s" in LONG
    resolution = np.datetime_data(times.dtype)[0]
    finer = PER_SECOND["ns"] // PER_SECOND[resolution]
    since, then = times.view(np.int64).tolist()
    if floats and is_long and EARLIEST <= since * finer <= LATEST:
        since, then, resolution = since * finer, then * finer, "ns"
    is_old = kind == "M" and calendar != "proleptic_gregorian"
    earliest = max(REFORM * PER_SECOND[resolution], EARLIEST) if is_old else EARLIEST
    dtype = f"{kind}8[{resolution}]"
    return {"times": dtype, "factor": then - since, "since": since, "earliest": earliest, "units": units}, ""


def _decoded(xarray: Any, numbers: Any, attributes: Any, times: Any = False, durations: Any = False) -> NDArray[Any]:
    """What xarray makes of an array with these numbers and attributes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = xarray.Variable(("n",), numbers, attributes)
        values: NDArray[Any] = xarray.conventions.decode_cf_variable(
            "array", array, decode_times=times, decode_timedelta=durations
        ).values
    return values


def _number(array: Stored, name: str, value: Any) -> Any:
    number = value[0] if isinstance(value, list) and len(value) == 1 else value  # as netCDF libraries write some
    if name == "_FillValue" and isinstance(number, str):  # as xarray writes floats in Zarr v3
        with contextlib.suppress(ValueError, struct.error):
            [number] = struct.unpack("<d", base64.standard_b64decode(number))
    if isinstance(number, np.generic):
        number = number.item()
    if type(number) not in (int, float):
        raise DatasetError(
            f"attribute {name}={value!r} of array {array.name} is not a number, so its values are not known. "
            "Open the dataset with decode=False to get the stored numbers, or choose other arrays"
        )
    return number


# -- Which dataset it is -----------------------------------------------------------------------------------------------


def identity_of(store: Store, group: Group, chosen: SampleArrays, opening: Opening) -> str:
    """The identity of a dataset (:attr:`~dshuffle.store.Dataset.identity`)."""
    mark, asked, meaning = mark_of(group), opening.words, _meaning(chosen, opening)
    if not mark.get("complete", True):
        return "incomplete"
    if name := mark.get("uuid"):
        return str(name) if not asked and not meaning else digest_of(f"{name}{asked}{meaning}".encode())
    digest = [f"{asked}{meaning}".encode()]
    for name, array in sorted(chosen.arrays.items()):
        metadata = {key: value for key, value in array.metadata.to_dict().items() if key != "attributes"}
        digest += [
            f"{name}={json.dumps(metadata, sort_keys=True, default=str)};".encode(),
            _ends(store, array),
        ]
    return digest_of(b"".join(digest))


def digest_of(data: bytes) -> str:
    """An identity."""
    return hashlib.sha256(data).hexdigest()[:32]


def _meaning(chosen: SampleArrays, opening: Opening) -> str:
    """What decides the values of stored numbers beside the metadata; empty if they are the values, row by row."""
    meaning = {}
    for name, array in sorted(chosen.arrays.items()):
        decisive = {key: value for key, value in array.attrs.items() if key in DECISIVE and opening.decode}
        if decisive or chosen.axes[name]:
            meaning[name] = [chosen.axes[name], decisive]
    return json.dumps(meaning, sort_keys=True, default=str) if meaning else ""


def _ends(store: Store, array: Stored) -> bytes:
    """The ends of stored objects spread over an array, which is where chunks have their checksums."""
    stored = array.shards or array.chunks
    grid = [math.ceil(size / each) for size, each in zip(array.shape, stored, strict=True)]
    total = math.prod(grid)
    numbers = {i * (total - 1) // (SAMPLED - 1) for i in range(SAMPLED)}

    async def end(index: Any) -> bytes:
        key = f"{array.path}/{array.metadata.encode_chunk_key(tuple(index))}"
        buffer = await store.get(key, PROTOTYPE, SuffixByteRequest(SAMPLED_NBYTES))
        return b"absent;" if buffer is None else buffer.to_bytes()

    async def all_ends() -> list[bytes]:
        indices = np.transpose(np.unravel_index(sorted(numbers), tuple(grid))).tolist()
        return await asyncio.gather(*map(end, indices))

    return b"".join(sync(all_ends())) if total else b""
