"""The encoding of Zarr arrays by the CF conventions. xarray decides about it when a dataset is opened.

Workers get the decision (:mod:`dshuffle.encodings`), and do not need xarray.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import importlib
import struct
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zarr import Array
from zarr.core.metadata.v2 import ArrayV2Metadata

from dshuffle.encodings import EARLIEST, LATEST, Encoding, Times
from dshuffle.errors import DatasetError

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


def dimensions(array: Array[Any]) -> tuple[str | None, ...] | None:
    """Names of the dimensions of an array; None if they have none."""
    names: Any = getattr(array.metadata, "dimension_names", None) or array.attrs.get(DIMENSIONS)
    if not isinstance(names, Sequence) or len(names) != array.ndim or not any(names):
        return None
    return tuple(name if isinstance(name, str) else None for name in names)


def attributes_of(arrays: Mapping[str, Array[Any]]) -> dict[str, dict[str, Any]]:
    """Return the attributes of arrays. Bounds of a time have its units and calendar, if they have none of their own."""
    attributes = {name: dict(array.attrs) for name, array in arrays.items()}
    for own in attributes.values():
        units, bounds = own.get("units"), own.get("bounds")
        if isinstance(units, str) and "since" in units and isinstance(bounds, str) and bounds in attributes:
            for name in ("units", "calendar"):
                if name in own:
                    attributes[bounds].setdefault(name, own[name])
    return attributes


def encoding_of(array: Array[Any], attributes: Mapping[str, Any]) -> tuple[Encoding | None, str]:
    """Return the encoding of an array with these attributes, and why its numbers are not decoded.

    There is no encoding if the stored numbers are the values. The reason is empty if nothing remains undecoded.
    """
    dtype = array.dtype.newbyteorder("=")
    if dtype.kind not in "iuf":
        return None, ""
    if dtype.kind in "iu" and attributes.get("dtype") == "bool":
        return Encoding("?"), ""
    fill = attributes.get("_FillValue")
    if isinstance(array.metadata, ArrayV2Metadata) and DIMENSIONS in attributes:  # where xarray keeps it in Zarr v2
        fill = fill if array.metadata.fill_value is None else array.metadata.fill_value
    packing = {name: _number(array, name, attributes[name]) for name in PACKING if name in attributes}
    fills = [] if fill is None else [_number(array, "_FillValue", fill)]
    fills = [x for x in fills if x == x]  # NaN is NaN anyway
    others = attributes.get("missing_value")
    missing = [x for x in (others if isinstance(others, list) else [others]) if type(x) in (int, float) and x == x]
    units = attributes.get("units")
    is_time = isinstance(units, str) and ("since" in units or units in LONG)
    is_time |= str(attributes.get("dtype")).startswith("timedelta64")
    if not (packing or fills or missing or is_time or "_Unsigned" in attributes):
        return None, ""
    try:
        xarray = importlib.import_module("xarray")
    except ImportError:
        return None, "xarray, which knows what its attributes mean, is not installed (pip install 'dshuffle[xarray]')"
    signed = {"_Unsigned": attributes["_Unsigned"]} if "_Unsigned" in attributes else {}
    sample = _decoded(xarray, np.zeros(1, dtype), signed)
    if dtype.kind == "f" or sample.dtype != dtype:  # fills are as they are stored, missing values as they are read
        fills = np.array(fills).astype(dtype).view(sample.dtype).tolist()
    absent = tuple(sorted({*fills, *missing}))
    if absent and "scale_factor" in packing:  # integers have no NaN
        packing["scale_factor"] = float(packing["scale_factor"])
    numbers = _decoded(xarray, sample, packing | ({"missing_value": list(absent)} if absent else {})).dtype
    if sample.dtype == np.uint64 and numbers == np.int64:  # xarray wraps the largest
        numbers = np.dtype("u8" if packing["scale_factor"] >= 0 else "f8")
    times, reason = None, ""
    if is_time:
        times, reason = _times(xarray, attributes, (numbers if packing else dtype).kind == "f")
    kind = sample.dtype.kind if sample.dtype != dtype else ""
    if not (packing or absent or kind or times):
        return None, reason
    scale, offset = (packing.get(name) for name in PACKING)
    return Encoding(str(numbers), scale, offset, absent, kind, times), reason


def _times(xarray: Any, attributes: Mapping[str, Any], floats: bool) -> tuple[Times | None, str]:
    """How numbers become dates or durations, by what xarray makes of 0 and 1; or why they do not."""
    chosen = {name: attributes[name] for name in ("units", "calendar", "dtype") if name in attributes}
    units, calendar = chosen.get("units"), str(chosen.get("calendar") or "standard").lower()
    coders = xarray.coders.CFDatetimeCoder(time_unit="us"), xarray.coders.CFTimedeltaCoder(decode_via_units=False)
    try:
        times = _decoded(xarray, np.array([0, 1]), chosen, *coders)
        if times.dtype.kind == "O" and calendar in ("standard", "gregorian", "proleptic_gregorian"):  # an early origin
            first = importlib.import_module("cftime").date2num(times[0], "microseconds since 1970-01-01", calendar)
            step = (times[1] - times[0]) // datetime.timedelta(microseconds=1)
            times = np.array([first, first + step], np.int64).view("M8[us]")
    except Exception as error:
        return None, f"xarray cannot decode numbers in {units!r} ({str(error.__cause__ or error)[:100]})"
    if times.dtype.kind == "O":
        return None, f"its calendar is {calendar!r}, which has other dates than NumPy"
    if times.dtype.kind not in "mM" or not isinstance(units, str):
        return None, f"its units are {units!r}, which are durations only with dtype='timedelta64[...]' and {LONG}"
    # Units with short names are left to cftime by xarray, which makes nanoseconds of other floats.
    is_long = units.partition(" since ")[0].strip().lower().removesuffix("s") + "s" in LONG
    resolution = np.datetime_data(times.dtype)[0]
    finer = PER_SECOND["ns"] // PER_SECOND[resolution]
    since, then = times.view(np.int64).tolist()
    if floats and is_long and EARLIEST <= since * finer <= LATEST:
        since, then, resolution = since * finer, then * finer, "ns"
    step = then - since
    if times.dtype.kind == "m":
        # xarray goes from seconds to milliseconds and on, as far as fractions remain.
        thousands = next(n for n in range(4) if 1_000**n >= min(step, 10**9)) if floats else 0
        return Times(f"m8[{resolution}]", (max(step // 1_000**thousands, 1), *(1_000,) * thousands), 0, units), ""
    reform = EARLIEST if calendar == "proleptic_gregorian" else max(REFORM * PER_SECOND[resolution], EARLIEST)
    return Times(f"M8[{resolution}]", (step,), since, units, reform), ""


def _decoded(xarray: Any, numbers: Any, attributes: Any, times: Any = False, durations: Any = False) -> NDArray[Any]:
    """What xarray makes of an array with these numbers and attributes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = xarray.Variable(("n",), numbers, attributes)
        values: NDArray[Any] = xarray.conventions.decode_cf_variable(
            "array", array, decode_times=times, decode_timedelta=durations
        ).values
    return values


def _number(array: Array[Any], name: str, value: Any) -> Any:
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
