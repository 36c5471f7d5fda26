"""Which arrays hold dates or durations, by their units and calendar, as xarray reads them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from dshuffle.times import EARLIEST, LATEST, Times

NANOSECONDS = {
    "days": 86_400 * 10**9,
    "hours": 3_600 * 10**9,
    "minutes": 60 * 10**9,
    "seconds": 10**9,
    "milliseconds": 10**6,
    "microseconds": 10**3,
    "nanoseconds": 1,
}
"""Lengths of units of time."""

ALIASES = {
    "days": ("d",),
    "hours": ("h", "hr", "hrs"),
    "minutes": ("min", "mins"),
    "seconds": ("s", "sec", "secs"),
    "milliseconds": ("ms", "msec", "msecs", "millisec", "millisecs"),
    "microseconds": ("us", "microsec", "microsecs"),
    "nanoseconds": ("ns",),
}
"""Other names of units in ``UNIT since DATE``: those of cftime, and ``us`` and ``ns``."""

DATE = re.compile(
    r"(?P<year>\d{4})(?:-(?P<month>\d{1,2})(?:-(?P<day>\d{1,2})"
    r"(?:[T ] *(?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<fraction>\d{0,9}))?)?)?"
    r" *(?P<zone>Z|UTC|[+-]\d\d(?::?\d\d)?)?)?)?)?"
)
"""Origins that need no parser of another package. cftime ignores an hour without minutes; pandas does not."""

CALENDARS = {"standard", "gregorian", "proleptic_gregorian"}
"""Calendars whose dates are those of NumPy, from the reform on."""

REFORM = int(np.datetime64("1582-10-15", "s").astype(np.int64)) * 10**9
"""Before it, the standard calendar has other dates than NumPy; in nanoseconds since 1970."""

RESOLUTIONS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
"""Lengths of the units of dates and durations in xarray."""


def times_of(attributes: Mapping[str, Any], numbers: str) -> tuple[Times | None, str]:
    """How numbers become dates or durations; or why they do not, although the attributes look as if they should.

    Parameters
    ----------
    attributes
        Attributes of the array.
    numbers
        Dtype of the numbers after unpacking: ``"int64"`` for integers, ``"float64"`` for floats.

    Returns
    -------
    times, reason
        No times and an empty reason if the array holds neither dates nor durations.

    Examples
    --------
    >>> times_of({"units": "days since 2000-01-01"}, "int64")[0].dtype
    'M8[us]'
    >>> times_of({"units": "days since 2000-01-01", "calendar": "noleap"}, "int64")
    (None, "its calendar is 'noleap', which has other dates than NumPy")
    >>> times_of({"units": "K"}, "int64")
    (None, '')
    """
    units, dtype = attributes.get("units"), attributes.get("dtype")
    if isinstance(units, str) and "since" in units:
        return _dates(units, str(attributes.get("calendar") or "standard"), numbers)
    if isinstance(dtype, str) and dtype.startswith("timedelta64"):
        return _durations(units, dtype, numbers)
    if isinstance(units, str) and units in NANOSECONDS:
        return None, (
            f"its units are {units!r}, but it has no attribute dtype='timedelta64[...]'. Such durations are numbers in "
            "xarray, too, although older releases of it made timedelta64 of them"
        )
    return None, ""


def _dates(units: str, calendar: str, numbers: str) -> tuple[Times | None, str]:
    parts = re.fullmatch(r"(.+) since (.+)", units, re.DOTALL)
    if parts is None:
        return None, f"its units {units!r} are not a unit of time and a date"
    unit, origin = (part.strip() for part in parts.groups())
    unit = unit.lower()
    name = next((name for name, aliases in ALIASES.items() if unit in (name, name[:-1], *aliases)), None)
    if name is None:
        return None, f"its units are {units!r}, and {unit!r} is not a unit of time"
    step = NANOSECONDS[name]
    calendar = calendar.lower()
    if calendar not in CALENDARS:
        return None, f"its calendar is {calendar!r}, which has other dates than NumPy"
    since = _parsed(origin)
    if since is None or (since < REFORM and calendar != "proleptic_gregorian"):
        since, reason = _origin_in_xarray(unit, origin, calendar)
        if since is None:
            return None, f"its units are {units!r}, and {reason}"
    # xarray makes nanoseconds of floats, where their last digits count. It leaves other names of units to cftime, which
    # rounds to microseconds. For integers both are the same, and microseconds reach farther.
    within = EARLIEST <= since <= LATEST
    fine = step == 1 or since % 1_000 != 0
    if fine and not within:
        return None, f"its units are {units!r}, and nanoseconds since then are beyond datetime64[ns]"
    resolution = "ns" if fine or (numbers == "float64" and unit not in ALIASES[name] and within) else "us"
    length = RESOLUTIONS[resolution]
    earliest = EARLIEST if calendar == "proleptic_gregorian" else max(REFORM // length, EARLIEST)
    return Times(f"M8[{resolution}]", (step // length,), since // length, units, numbers, earliest), ""


def _durations(units: object, dtype: str, numbers: str) -> tuple[Times | None, str]:
    if not isinstance(units, str) or units not in NANOSECONDS:
        return None, f"its attributes are dtype={dtype!r} and units={units!r}, which is not one of {list(NANOSECONDS)}"
    step = NANOSECONDS[units]
    try:
        resolution = _resolution(np.dtype(dtype))
    except TypeError:
        return None, f"its attribute dtype={dtype!r} is not a duration with a resolution"
    if numbers == "int64":
        length = min(RESOLUTIONS[resolution], step)
        resolution = next(name for name, each in RESOLUTIONS.items() if each <= length)
        return Times(f"m8[{resolution}]", (step // RESOLUTIONS[resolution],), 0, units, numbers), ""
    # xarray goes from seconds to milliseconds and on, as far as fractions remain.
    whole = max(step // 10**9, 1)
    thousands = (1_000,) * next(n for n in range(4) if 1_000**n >= min(step, 10**9))
    return Times("m8[ns]", (whole, *thousands), 0, units, numbers), ""


def _resolution(dtype: np.dtype[Any]) -> str:
    """The resolution of durations with this dtype in xarray: seconds to nanoseconds."""
    name = np.datetime_data(dtype)[0]
    if name in RESOLUTIONS:
        return name
    if name in ("generic", "M", "Y"):
        raise TypeError(f"{dtype} has no length")
    return "s" if name in ("m", "h", "D", "W") else "ns"


def _parsed(origin: str) -> int | None:
    """Nanoseconds from 1970 to an origin; None if it is not written as :data:`DATE`."""
    if not (date := DATE.fullmatch(origin)):
        return None
    year, month, day, hour, minute, second = (
        int(date[name] or least)
        for name, least in (("year", 0), ("month", 1), ("day", 1), ("hour", 0), ("minute", 0), ("second", 0))
    )
    try:
        moment = np.datetime64(f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}", "s")
    except ValueError:
        return None
    seconds = int(moment.astype(np.int64))
    zone = (date["zone"] or "Z").replace(":", "")
    if zone not in ("Z", "UTC"):
        ahead = int(zone[1:3]) * 3_600 + int(zone[3:] or 0) * 60
        seconds += ahead if zone[0] == "-" else -ahead
    return seconds * 10**9 + int((date["fraction"] or "").ljust(9, "0"))


@functools.lru_cache
def _origin_in_xarray(unit: str, origin: str, calendar: str) -> tuple[int | None, str]:
    """Nanoseconds from 1970 to an origin as xarray reads it; or what is missing for that."""
    try:
        xarray = importlib.import_module("xarray")
    except ImportError:
        return (
            None,
            f"only xarray and cftime can read {origin!r} in the {calendar} calendar (pip install xarray cftime)",
        )
    attributes = {"units": f"{unit} since {origin}", "calendar": calendar}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            [date] = xarray.decode_cf(xarray.Dataset({"t": ("i", np.array([0]), attributes)}))["t"].values
        except ValueError as error:
            if importlib.util.find_spec("cftime") is None:
                return (
                    None,
                    f"xarray cannot read {origin!r} in the {calendar} calendar without cftime (pip install cftime)",
                )
            return None, f"xarray cannot read {origin!r} in the {calendar} calendar ({error.__cause__ or error})"
    if isinstance(date, np.datetime64):
        return int(date.astype("M8[ns]").astype(np.int64)), ""
    since = importlib.import_module("cftime").date2num(date, "microseconds since 1970-01-01", calendar=calendar)
    return int(since) * 1_000, ""
