"""Dates, durations and packed numbers are the values of xarray, over what stores may hold."""

import datetime
import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from dshuffle.errors import DatasetError
from dshuffle.store import open_dataset

xarray = pytest.importorskip("xarray", minversion="2025.9", reason="older releases decode durations in another way")

EXAMPLES = int(os.environ.get("DSHUFFLE_EXAMPLES", 3 * settings.default.max_examples))
SIZE, CHUNK = 7, 3
IDS = np.arange(SIZE)

UNITS = ["days", "hours", "minutes", "seconds", "milliseconds", "microseconds", "nanoseconds"]
ALIASES = ["d", "hr", "h", "min", "sec", "s", "msecs", "microsecs"]
SHORT = [*ALIASES, "day", "Hours"]
STANDARD = [None, "standard", "gregorian", "proleptic_gregorian", "Standard"]
FORMATS = ["%Y", "%Y-%m", "%Y-%m-%d", "%Y-%m-%d %H", "%b %d %Y", "%Y%m%d"]
EXACT = ["%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M:%S.%f"]
ZONES = ["", "Z", " UTC", "+00:00", "-06:00", " +05:30", "+0100", "-03"]


@dataclass(frozen=True)
class Stored:
    """An array in a store."""

    numbers: np.ndarray
    attributes: dict[str, Any]
    zarr_format: Any

    def write(self, path: Path) -> None:
        attributes, options = dict(self.attributes), dict[str, Any](dimension_names=["i"])
        fill = attributes.pop("_FillValue", None)
        if self.zarr_format == 2:
            attributes["_ARRAY_DIMENSIONS"], options = ["i"], {"fill_value": fill}
        elif fill is not None:
            encode = xarray.backends.zarr.FillValueCoder.encode
            attributes["_FillValue"] = encode(self.numbers.dtype.type(fill), self.numbers.dtype)
        group = zarr.create_group(path, zarr_format=self.zarr_format)
        shape, dtype = self.numbers.shape, self.numbers.dtype
        group.create_array("t", shape=shape, chunks=(CHUNK,), dtype=dtype, attributes=attributes, **options)[:] = (
            self.numbers
        )


@st.composite
def origins(draw: st.DrawFn) -> str:
    """A date as people write it."""
    date = draw(st.datetimes(datetime.datetime(1750, 1, 1), datetime.datetime(2150, 12, 31)))
    form = draw(st.sampled_from(FORMATS + 2 * EXACT))
    text = date.strftime(form)
    if form in EXACT and draw(st.booleans()):
        text = text.replace("-0", "-").replace(" 0", " ").replace(":0", ":")
    return text + (draw(st.sampled_from(ZONES)) if form in EXACT else "")


@st.composite
def numbers(draw: st.DrawFn, dtype: str) -> np.ndarray:
    """Numbers that are times in all units; test_cf.py has those that are too large."""
    if np.dtype(dtype).kind == "f":
        items = st.integers(-8_000, 8_000).map(lambda eighths: eighths / 8) | st.just(math.nan)
        items = items | st.floats(-2e4, 2e4) if dtype.endswith("8") else items
    else:
        info = np.iinfo(dtype)
        items = st.integers(max(info.min, -1_000), min(info.max, 1_000))
    return np.array(draw(st.lists(items, min_size=SIZE, max_size=SIZE)), dtype)


@st.composite
def stores(draw: st.DrawFn) -> Stored:
    """Raw arrays, with the attributes of times, durations and packed numbers in any combination."""
    dtype = draw(st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"]))
    zarr_format = draw(st.sampled_from([2, 3]))
    stored = draw(numbers(dtype))
    attributes: dict[str, Any] = {}
    kind = draw(st.sampled_from(["date", "date", "duration", "number"]))
    if kind == "date":
        name, text = draw(st.sampled_from(2 * UNITS + SHORT)), draw(origins())
        assume(name not in ALIASES or len(text) != len("2000-01-01 01"))  # pandas and cftime differ about the hour
        attributes["units"] = f"{name} since {text}"
        calendar = draw(st.sampled_from(STANDARD * 3 + ["noleap", "360_day", "julian"]))
        attributes |= {} if calendar is None else {"calendar": calendar}
    elif kind == "duration":
        attributes["units"] = draw(st.sampled_from([*UNITS, "h"]))
        resolution = draw(st.sampled_from(["[ns]", "[ns]", "[us]", "[ms]", "[s]", "[D]", "[ps]", "", None]))
        attributes |= {} if resolution is None else {"dtype": f"timedelta64{resolution}"}
    else:
        units = ["K", "mm since start of season", "months since 2000-01-01", "parts_since", "days since yesterday"]
        attributes["units"] = draw(st.sampled_from(units))
    for name, choices in {
        "scale_factor": [0.1, 0.5, -1.0, 1e-3],
        "add_offset": [0.25, 100.0, 3],
        "_FillValue": stored[np.isfinite(stored)].tolist()[:2],
        "missing_value": stored[np.isfinite(stored)].tolist()[2:4],
        "_Unsigned": ["true", "false"] if dtype[0] in "iu" else [],
    }.items():
        if choices and draw(st.integers(0, 3)) == 0:
            attributes[name] = draw(st.sampled_from(choices))
    if attributes.get("_Unsigned") == "false" and attributes.get("_FillValue", 0) > np.iinfo(dtype).max // 2:
        del attributes["_FillValue"]  # xarray ends with an OverflowError
    if attributes == {"units": "K"} and dtype[0] in "iu" and dtype[1] != "8":
        attributes |= draw(st.sampled_from([{}, {"scale_factor": 2}, {"dtype": "bool"}]))
    return Stored(stored, attributes, zarr_format)


# -- What becomes of them ----------------------------------------------------------------------------------------------


def in_xarray(path: Path, **options: Any) -> np.ndarray | Exception:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return xarray.open_zarr(path, chunks=None, consolidated=False, **options)["t"].values
        except Exception as error:
            return error


def here(path: Path) -> tuple[np.ndarray | DatasetError, str]:
    """The values, or the error; and why they are not decoded."""
    try:
        dataset = open_dataset(path)
        return dataset.read_rows(IDS)["t"], dataset.undecoded.get("t", "")
    except DatasetError as error:
        return error, ""


def nanoseconds(times: np.ndarray) -> list[int | None]:
    """Dates since 1970, or durations, as exact numbers; None for NaT."""
    step = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[np.datetime_data(times.dtype)[0]]
    return [None if np.isnat(time) else int(time.astype(np.int64)) * step for time in times]


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(stores())
def test_values_are_those_of_xarray(stored: Stored) -> None:
    """Or an array is undecoded, or a time is out of range, where xarray has none either, or a duration is a float."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "g"
        stored.write(path)
        theirs, plain = in_xarray(path), in_xarray(path, decode_times=False)
        ours, undecoded = here(path)
    decoded = isinstance(theirs, np.ndarray) and theirs.dtype.kind in "mM"
    floats = bool({"scale_factor", "add_offset"} & set(stored.attributes)) or stored.numbers.dtype.kind == "f"
    if undecoded:
        event("undecoded")
        assert not decoded or (floats and " since " not in stored.attributes["units"])
        np.testing.assert_array_equal(ours, plain, strict=True)
    elif isinstance(ours, DatasetError):
        event("out of range")  # which xarray does not see beside a missing number
        assert not decoded or stored.attributes.keys() & {"_FillValue", "missing_value"}
    elif decoded:
        event("decoded")
        slack = 0
        if floats and stored.attributes["units"].split()[0] in ALIASES:
            slack = 1_000  # cftime computes microseconds; xarray makes the origin of NaN then
            theirs[np.isnat(ours)] = "NaT"
        assert ours.dtype.kind == theirs.dtype.kind
        for time, right in zip(nanoseconds(ours), nanoseconds(theirs), strict=True):
            assert time == right or abs(time - right) <= slack
    elif ours.dtype.kind in "mM":
        event("decoded, but not in xarray")
    else:
        event("numbers")
        np.testing.assert_array_equal(ours, theirs, strict=True)
