"""The encoding of a Zarr array by the CF conventions, as xarray writes and reads it."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from zarr import Array
from zarr.core.metadata.v2 import ArrayV2Metadata

from dshuffle.encodings import Encoding
from dshuffle.errors import DatasetError

DIMENSIONS = "_ARRAY_DIMENSIONS"
"""Attribute with the names of the dimensions of an array in Zarr v2."""

MICROSECONDS = {
    "days": 86_400_000_000,
    "hours": 3_600_000_000,
    "minutes": 60_000_000,
    "seconds": 1_000_000,
    "milliseconds": 1_000,
    "microseconds": 1,
}
"""Lengths of units of time. (Nanoseconds are handled apart.)"""

ALIASES = {"day": "days", "d": "days", "hour": "hours", "hr": "hours", "hrs": "hours", "h": "hours"} | {
    "minute": "minutes", "min": "minutes", "mins": "minutes", "second": "seconds", "sec": "seconds", "secs": "seconds",
    "s": "seconds", "millisecond": "milliseconds", "ms": "milliseconds", "msec": "milliseconds",
    "microsecond": "microseconds", "us": "microseconds", "nanosecond": "nanoseconds", "ns": "nanoseconds",
}  # fmt: skip

SCALES = ("scale_factor", "add_offset")

DECISIVE = (*SCALES, "_FillValue", "missing_value", "_Unsigned", "units", "calendar", "dtype")
"""Attributes that decide the values of stored numbers."""

DATE = re.compile(r"(\d{1,4})-(\d{1,2})-(\d{1,2})(?:[T ]+(\d{1,2})(?::(\d{1,2}))?(?::(\d{1,2})(\.\d*)?)?)?Z?")

CALENDARS = {"standard", "gregorian", "proleptic_gregorian"}
"""Calendars whose dates are those of NumPy, from 1582 on."""


def encoding_of(array: Array[Any]) -> Encoding | None:
    """Return the encoding of an array; None if its stored numbers are its values, or are times that NumPy cannot hold.

    Examples
    --------
    >>> import zarr
    >>> array = zarr.create_array({}, shape=4, dtype="i2", attributes={"scale_factor": 0.1, "add_offset": 280.0})
    >>> encoding_of(array)
    Encoding(dtype='float64', scale=0.1, offset=280.0, missing=(), unsigned=False, unit=0, since=0)
    """
    dtype, attributes = array.dtype, dict(array.attrs)
    if dtype.kind not in "iuf":
        return None
    if dtype.kind in "iu" and attributes.get("dtype") == "bool":
        return Encoding("?")
    missing = _missing(array, attributes)
    unsigned = dtype.kind == "i" and str(attributes.get("_Unsigned", "")).lower() == "true"
    if unsigned:
        missing = tuple(value % 2 ** (8 * dtype.itemsize) for value in missing)
    units = attributes.get("units")
    if isinstance(units, str) and " since " in units:
        found = _time(units, str(attributes.get("calendar", "standard")))
        return None if found is None else Encoding(**found, missing=missing)
    scale, offset = (_number(attributes.get(name)) for name in SCALES)
    for name, number in zip(SCALES, (scale, offset), strict=True):
        if number is None and name in attributes:
            raise DatasetError(
                f"attribute {name}={attributes[name]!r} of array {array.name} is not a number, so its values are not "
                "known. Open the dataset with decode=False to get the stored numbers, or choose other arrays"
            )
    if scale is None and offset is None and not missing:
        return Encoding(f"{dtype.byteorder}u{dtype.itemsize}", unsigned=True) if unsigned else None
    if scale is None and offset is None:
        small = dtype.itemsize <= (4 if dtype.kind == "f" else 2)
        return Encoding("float32" if small else "float64", missing=missing, unsigned=unsigned)
    return Encoding("float64", scale, offset, missing, unsigned)


def _missing(array: Array[Any], attributes: Mapping[str, Any]) -> tuple[float, ...]:
    found = [attributes.get("missing_value"), attributes.get("_FillValue")]
    if isinstance(array.metadata, ArrayV2Metadata) and DIMENSIONS in attributes:
        found.append(array.metadata.fill_value)  # where xarray keeps it in Zarr v2
    values = (_fill_value(each) for value in found for each in (value if isinstance(value, list) else [value]))
    known = {value for value in values if value is not None and value == value}  # NaN is NaN anyway
    return tuple(sorted(known))


def _fill_value(value: Any) -> float | None:
    if isinstance(value, str):  # as xarray writes floats in Zarr v3
        try:
            (number,) = struct.unpack("<d", base64.standard_b64decode(value))
        except (ValueError, struct.error):
            return None
        return float(number)
    return _number(value)


def _number(value: Any) -> float | None:
    if isinstance(value, list) and len(value) == 1:  # as netCDF libraries write some scalars
        [value] = value
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    return value.item() if isinstance(value, np.generic) else value


def _time(units: str, calendar: str) -> dict[str, Any] | None:
    """Dtype, unit and origin of times; None for other calendars and origins that NumPy does not know."""
    name, _, origin = units.partition(" since ")
    name = name.strip().lower()
    name = ALIASES.get(name, name)
    date = DATE.fullmatch(origin.strip())
    if calendar.lower() not in CALENDARS or date is None or not (name in MICROSECONDS or name == "nanoseconds"):
        return None
    year, month, day, hour, minute, second = (int(part or 0) for part in date.groups()[:6])
    if year < 1583:  # before it the calendars differ
        return None
    text = f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{(date[7] or '').rstrip('.')}"
    fine = name == "nanoseconds"
    dtype = "M8[ns]" if fine else "M8[us]"
    try:
        since = np.datetime64(text).astype(dtype).astype(np.int64)
    except ValueError:
        return None
    return {"dtype": dtype, "unit": 1 if fine else MICROSECONDS[name], "since": int(since)}
