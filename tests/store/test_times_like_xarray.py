"""Dates, durations and packed numbers are the values of xarray, over what stores may hold."""

import datetime
import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from fractions import Fraction
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

NANOSECONDS = {"days": 86_400 * 10**9, "hours": 3_600 * 10**9, "minutes": 60 * 10**9, "seconds": 10**9}
NANOSECONDS |= {"milliseconds": 10**6, "microseconds": 10**3, "nanoseconds": 1}
ALIASES = {"d": "days", "hr": "hours", "h": "hours", "min": "minutes", "sec": "seconds", "s": "seconds"}
ALIASES |= {"msecs": "milliseconds", "microsecs": "microseconds"}
SHORT = ALIASES | {"day": "days", "Hours": "hours"}
STANDARD = [None, "standard", "gregorian", "proleptic_gregorian", "Standard"]
FORMATS = ["%Y", "%Y-%m", "%Y-%m-%d", "%Y-%m-%d %H", "%b %d %Y", "%Y%m%d"]
EXACT = ["%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M:%S.%f"]
ZONES = {"": 0, "Z": 0, " UTC": 0, "+00:00": 0, "-06:00": -360, " +05:30": 330, "+0100": 60, "-03": -180}
REFORM = -12_219_292_800 * 10**9
"""1582-10-15 in nanoseconds since 1970."""


@dataclass(frozen=True)
class Stored:
    """An array in a store, and the length of its unit and its origin since 1970 in nanoseconds, where it has any."""

    numbers: np.ndarray
    attributes: dict[str, Any]
    zarr_format: Any
    unit: int = 0
    origin: int = 0

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
def origins(draw: st.DrawFn, first: int = 1583, last: int = 2262) -> tuple[str, int]:
    """A date as people write it, and the nanoseconds from 1970 to it."""
    date = draw(st.datetimes(datetime.datetime(first, 1, 1), datetime.datetime(last, 12, 31)))
    form = draw(st.sampled_from(FORMATS + 2 * EXACT))
    zone = draw(st.sampled_from(sorted(ZONES))) if form in EXACT else ""
    text = date.strftime(form)
    since = datetime.datetime.strptime(text, form) - datetime.datetime(1970, 1, 1)
    if form in EXACT and draw(st.booleans()):
        text = text.replace("-0", "-").replace(" 0", " ").replace(":0", ":")
    return text + zone, (since - datetime.timedelta(minutes=ZONES[zone])) // datetime.timedelta(microseconds=1) * 1_000


@st.composite
def numbers(draw: st.DrawFn, dtype: str, far: bool) -> np.ndarray:
    """Small numbers, and some at the edges of what the dtype or a time can be."""
    kind = np.dtype(dtype).kind
    if kind == "f":
        small = st.integers(-8_000, 8_000).map(lambda eighths: eighths / 8)
        if dtype.endswith("8"):
            small |= st.floats(-1e5, 1e5)
        edges = st.sampled_from([math.nan, math.inf, 9.969209968386869e36, 1e19, -1e19, 2.0**63, 1e12])
    else:
        info = np.iinfo(dtype)
        small = st.integers(max(info.min, -1_000), min(info.max, 1_000))
        edges = st.sampled_from([info.min, info.min + 1, info.max]) | st.integers(info.min, info.max)
    items = small | edges if far else small | st.just(math.nan) if kind == "f" else small
    return np.array(draw(st.lists(items, min_size=SIZE, max_size=SIZE)), dtype)


@st.composite
def stores(draw: st.DrawFn) -> Stored:
    """Raw arrays, with the attributes of times, durations and packed numbers in any combination."""
    dtype = draw(st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"]))
    zarr_format = draw(st.sampled_from([2, 3]))
    stored = draw(numbers(dtype, far=draw(st.booleans())))
    attributes: dict[str, Any] = {}
    unit = origin = 0
    kind = draw(st.sampled_from(["date", "date", "duration", "number"]))
    if kind == "date":
        name = draw(st.sampled_from(sorted(NANOSECONDS) * 2 + sorted(SHORT)))
        unit = NANOSECONDS[SHORT.get(name, name)]
        text, origin = draw(origins())
        assume(name not in ALIASES or len(text) != len("2000-01-01 01"))  # pandas and cftime differ about the hour
        attributes["units"] = f"{name} since {text}"
        calendar = draw(st.sampled_from(STANDARD * 3 + ["noleap", "360_day", "julian"]))
        attributes |= {} if calendar is None else {"calendar": calendar}
    elif kind == "duration":
        name = draw(st.sampled_from([*sorted(NANOSECONDS), "h"]))
        unit = NANOSECONDS[SHORT.get(name, name)]
        attributes["units"] = name
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
    if dtype == "u8" and {"_FillValue", "missing_value"} & set(attributes):
        stored %= 2**63  # xarray wraps larger ones to negative numbers before it looks for missing ones
        attributes |= {name: stored[0].item() for name in ["_FillValue", "missing_value"] if name in attributes}
    if attributes.get("_Unsigned") == "false" and attributes.get("_FillValue", 0) > np.iinfo(dtype).max // 2:
        del attributes["_FillValue"]  # xarray ends with an OverflowError
    if attributes == {"units": "K"} and dtype[0] in "iu" and dtype[1] != "8":
        attributes |= draw(st.sampled_from([{}, {"scale_factor": 2}, {"dtype": "bool"}]))
    return Stored(stored, attributes, zarr_format, unit, origin)


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


def resolution(times: np.ndarray) -> int:
    return {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[np.datetime_data(times.dtype)[0]]


def in_nanoseconds(times: np.ndarray) -> list[int | None]:
    """Dates since 1970, or durations, as exact numbers; None for NaT."""
    return [None if np.isnat(time) else int(time.astype(np.int64)) * resolution(times) for time in times]


def exact(stored: Stored) -> list[Fraction | None]:
    """The times by the conventions, in rational arithmetic from the unpacked numbers on; None where one is missing."""
    signed, attributes = stored.numbers, stored.attributes
    missing = set[float]()
    if attributes.get("_Unsigned") == {"i": "true", "u": "false"}.get(signed.dtype.kind, ""):
        signed = signed.view({"i": "u", "u": "i"}[signed.dtype.kind] + str(signed.dtype.itemsize))
    if "_FillValue" in attributes:
        missing.add(signed[stored.numbers.tolist().index(attributes["_FillValue"])].item())
    if "missing_value" in attributes:
        missing.add(attributes["missing_value"])
    packed = "scale_factor" in attributes or "add_offset" in attributes
    if packed:
        signed, missing = signed.astype(np.float64), {float(number) for number in missing}
    times: list[Fraction | None] = []
    for number in signed.tolist():
        unpacked = number
        if packed:
            unpacked = float(np.float64(number) * attributes.get("scale_factor", 1.0) + attributes.get("add_offset", 0))
        if number in missing or unpacked != unpacked or unpacked == -(2**63):
            times.append(None)
        else:
            whole = Fraction(10) ** 400 if math.isinf(unpacked) else Fraction(unpacked)
            times.append(whole * stored.unit + stored.origin)
    return times


def span(stored: Stored, floats: bool) -> tuple[int, int]:
    """The first and the last time that can be decoded, by the resolution and the reform of the calendar."""
    units = stored.attributes["units"]
    if " since " not in units:
        named = {"[s]": 10**9, "[D]": 10**9, "[ms]": 10**6, "[us]": 10**3}
        step = min(stored.unit, named.get(stored.attributes["dtype"].removeprefix("timedelta64"), 1))
    else:
        step = 1 if stored.unit == 1 else 1_000
    last = (2**63 - 1) * (1 if floats else step)
    reform = " since " in units and stored.attributes.get("calendar") != "proleptic_gregorian"
    return max(-last, REFORM if reform else -last), last


def not_checked(stored: Stored, floats: bool) -> bool:
    """Whether xarray does not see that counts are out of range, because it looks at a minimum that is NaN or NaT."""
    counts = [time - stored.origin for time in exact(stored) if time is not None]
    return len(counts) < SIZE and any(abs(count) >= 2**63 * (1 if floats else stored.unit) for count in counts)


def check_exact(times: np.ndarray, stored: Stored, floats: bool) -> None:
    for time, right in zip(in_nanoseconds(times), exact(stored), strict=True):
        if right is None:
            assert time is None
        else:
            slack = resolution(times) + abs(right - stored.origin) / 2**51
            assert abs(time - right) <= (slack if floats else 0)


def check_values(stored: Stored) -> None:
    """Values are those of xarray; or an array is undecoded, or a time is out of range, where xarray has none either."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "g"
        stored.write(path)
        theirs, plain = in_xarray(path), in_xarray(path, decode_times=False)
        ours, undecoded = here(path)
    decoded = isinstance(theirs, np.ndarray) and theirs.dtype.kind in "mM"
    packed = {"scale_factor", "add_offset"} & set(stored.attributes)
    floats = bool(packed) or stored.numbers.dtype.kind == "f"
    if undecoded:
        event("undecoded")
        assert not decoded or (floats and " since " not in stored.attributes["units"])
        elsewhere = stored.attributes.get("calendar") not in STANDARD
        assert isinstance(theirs, Exception) or elsewhere or " since " not in stored.attributes["units"]
        np.testing.assert_array_equal(ours, plain, strict=True)
    elif isinstance(ours, DatasetError):
        event("error")
        assert "array 't' has the value" in str(ours)
        first, last = span(stored, floats)
        assert any(time is not None and not first <= time <= last for time in exact(stored))
    elif decoded and not_checked(stored, floats):
        event("decoded, with a count that wraps in xarray")
        check_exact(ours, stored, floats)
    elif decoded:
        event("decoded as in xarray")
        assert ours.dtype.kind == theirs.dtype.kind
        there = np.array([time is not None for time in exact(stored)])
        slack = 0
        if floats and stored.attributes["units"].split()[0] in ALIASES:
            slack = 1_000  # cftime computes microseconds; xarray makes the origin of NaN then
            theirs[~there] = "NaT"
        for time, right in zip(in_nanoseconds(ours), in_nanoseconds(theirs), strict=True):
            assert time == right or abs(time - right) <= slack
    elif ours.dtype.kind in "mM":
        event("decoded, but not in xarray")
        check_exact(ours, stored, floats)
    else:
        event("numbers")
        np.testing.assert_array_equal(ours, theirs, strict=True)


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(stores())
def test_values_are_those_of_xarray(stored: Stored) -> None:
    check_values(stored)
