"""The encoding of Zarr arrays by the CF conventions, as xarray writes and reads it."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from zarr import Array
from zarr.core.metadata.v2 import ArrayV2Metadata

from dshuffle.encodings import Encoding
from dshuffle.errors import DatasetError
from dshuffle.store.cf_times import times_of

DIMENSIONS = "_ARRAY_DIMENSIONS"
"""Attribute with the names of the dimensions of an array in Zarr v2."""

SCALES = ("scale_factor", "add_offset")

DECISIVE = (*SCALES, "_FillValue", "missing_value", "_Unsigned", "units", "calendar", "dtype")
"""Attributes that decide the values of stored numbers."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the stored numbers of several arrays become values.

    Parameters
    ----------
    encodings
        Name -> encoding; None if the stored numbers are the values.
    undecoded
        Name -> why its numbers are no dates or durations, although its attributes look as if they should be.
    """

    encodings: dict[str, Encoding | None]
    undecoded: dict[str, str]


def attributes_of(arrays: Mapping[str, Array[Any]]) -> dict[str, dict[str, Any]]:
    """Return the attributes of arrays. Bounds of a time have its units and calendar, if they have none of their own.

    Examples
    --------
    >>> import zarr
    >>> units = {"units": "days since 2000-01-01"}
    >>> time = zarr.create_array({}, shape=4, dtype="i4", attributes={**units, "bounds": "time_bounds"})
    >>> bounds = zarr.create_array({}, shape=(4, 2), dtype="i4")
    >>> attributes_of({"time": time, "time_bounds": bounds})["time_bounds"]
    {'units': 'days since 2000-01-01'}
    """
    attributes = {name: dict(array.attrs) for name, array in arrays.items()}
    for own in attributes.values():
        units, bounds = own.get("units"), own.get("bounds")
        if isinstance(units, str) and "since" in units and isinstance(bounds, str) and bounds in attributes:
            for name in ("units", "calendar"):
                if name in own:
                    attributes[bounds].setdefault(name, own[name])
    return attributes


def encoding_of(array: Array[Any], attributes: Mapping[str, Any]) -> tuple[Encoding | None, str]:
    """Return the encoding of an array, and why its numbers are not decoded as dates or durations.

    Parameters
    ----------
    array
        The array.
    attributes
        Its attributes.

    Returns
    -------
    encoding, undecoded
        No encoding if the stored numbers are the values. The reason is empty if nothing remains undecoded.

    Raises
    ------
    DatasetError
        If an attribute makes no sense, so that the values are not known.

    Examples
    --------
    >>> import zarr
    >>> array = zarr.create_array({}, shape=4, dtype="i2")
    >>> encoding_of(array, {"scale_factor": 0.1, "add_offset": 280.0})
    (Encoding(dtype='float64', scale=0.1, offset=280.0, missing=(), kind='', times=None), '')
    >>> encoding_of(array, {"units": "days since launch"})
    (None, "its units are 'days since launch', and ...")
    """
    dtype = array.dtype
    if dtype.kind not in "iuf":
        return None, ""
    if dtype.kind in "iu" and attributes.get("dtype") == "bool":
        return Encoding("?"), ""
    kind = _other_kind(dtype, attributes)
    missing = _missing(array, attributes, kind)
    scale, offset = _packing(array, attributes)
    packed = None if scale is None and offset is None else _unpacked_dtype(dtype, kind, scale, offset, missing)
    floats = dtype.kind == "f" if packed is None else packed == "float64"
    times, undecoded = times_of(attributes, "float64" if floats else "int64")
    if times is not None:
        return Encoding(times.dtype, scale, offset, missing, kind, times), ""
    if packed is not None:
        return Encoding(packed, scale, offset, missing, kind), undecoded
    if missing:
        return Encoding(_masked_dtype(dtype), missing=missing, kind=kind), undecoded
    return Encoding(f"{dtype.byteorder}{kind}{dtype.itemsize}", kind=kind) if kind else None, undecoded


def _other_kind(dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> str:
    """Kind of integers, if it is not the kind of the dtype; else an empty string."""
    unsigned = str(attributes.get("_Unsigned", "")).lower()
    return {("i", "true"): "u", ("u", "false"): "i"}.get((dtype.kind, unsigned), "")


def _packing(array: Array[Any], attributes: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Scale and offset; None for each that the attributes do not have."""
    scale, offset = (_number(attributes.get(name)) for name in SCALES)
    for name, number in zip(SCALES, (scale, offset), strict=True):
        if number is None and name in attributes:
            raise DatasetError(
                f"attribute {name}={attributes[name]!r} of array {array.name} is not a number, so its values are not "
                "known. Open the dataset with decode=False to get the stored numbers, or choose other arrays"
            )
    return scale, offset


def _unpacked_dtype(
    dtype: np.dtype[Any], kind: str, scale: int | float | None, offset: float | None, missing: tuple[float, ...]
) -> str:
    """Dtype of scaled numbers: floats, or integers as in xarray if the scale is an integer."""
    if isinstance(scale, int) and offset is None and not missing and (kind or dtype.kind) in "iu":
        if (kind or dtype.kind) == "i" or dtype.itemsize < 8:
            return "int64"
        return "uint64" if scale >= 0 else "float64"
    return "float64"


def _masked_dtype(dtype: np.dtype[Any]) -> str:
    """Dtype of numbers of which some are missing."""
    if dtype.kind == "f":
        return f"float{8 * dtype.itemsize}"
    return "float32" if dtype.itemsize <= 2 else "float64"


def _missing(array: Array[Any], attributes: Mapping[str, Any], kind: str) -> tuple[float, ...]:
    fill_value = attributes.get("_FillValue")
    if isinstance(array.metadata, ArrayV2Metadata) and DIMENSIONS in attributes:  # where xarray keeps it in Zarr v2
        fill_value = fill_value if array.metadata.fill_value is None else array.metadata.fill_value
    fills = _numbers(fill_value)
    if fill_value is not None and not fills:
        raise DatasetError(
            f"attribute _FillValue={fill_value!r} of array {array.name} is not a number, so its values are not known. "
            "Open the dataset with decode=False to get the stored numbers, or choose other arrays"
        )
    if array.dtype.kind == "f":  # as they are stored
        fills = [float(array.dtype.type(number)) for number in fills]
    if kind:  # fill values are written in the dtype of the array, but xarray takes missing values as they are
        size = array.dtype.itemsize
        whole = [int(number) % 2 ** (8 * size) for number in fills if math.isfinite(number)]
        fills = np.array(whole, f"u{size}").view(f"{kind}{size}").tolist()
    numbers = {*fills, *_numbers(attributes.get("missing_value"))}
    return tuple(sorted(number for number in numbers if number == number))  # NaN is NaN anyway


def _numbers(value: Any) -> list[float]:
    numbers = (_fill_value(item) for item in (value if isinstance(value, list) else [value]))
    return [number for number in numbers if number is not None]


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
