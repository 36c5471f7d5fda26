"""Formatting of numbers for people, and parsing of rates and counts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from dshuffle.errors import InvalidParameter

UNKNOWN = "-"
_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
_RATE = re.compile(rf"\s*{_NUMBER}\s*((?:[kmgtKMGT]i?)?)(B|b|(?i:bytes?|bits?|bps))?(?:/s)?\s*")


def human_bytes(value: float | None) -> str:
    """Format bytes in decimal units: a whole number of bytes, or at least three significant digits."""
    if value is None:
        return UNKNOWN
    value, unit = _in_unit(value, "B kB MB GB TB")
    return f"{value:.0f} B" if unit == "B" else f"{_three_figures(value)} {unit}"


def human_seconds(value: float | None) -> str:
    """Format a time in seconds, milliseconds or microseconds."""
    if not value:
        return UNKNOWN if value is None else "0 s"
    if value < 0.0009995:
        return f"{_three_figures(value * 1e6)} µs"
    return f"{_three_figures(value * 1000)} ms" if value < 0.9995 else f"{_three_figures(value)} s"


def human_count(value: float | None) -> str:
    """Format a count with thousands separators."""
    return UNKNOWN if value is None else f"{value:,.0f}"


ERROR_DIGITS, METRIC_DIGITS = 3, 4
"""Significant digits of errors and of other metrics."""

LARGEST_RATIO = 1000.0
"""Numbers of a column whose ratio is larger get significant digits, not decimals."""


def human_numbers(values: Sequence[float | None], digits: int) -> list[str]:
    """Format the numbers of a column, or of a comparison, with equally many decimals.

    The largest number has ``digits`` significant digits at least, and the smallest has two. If the numbers differ by
    more than a factor of :data:`LARGEST_RATIO`, or are very small or large, each has ``digits`` significant digits at
    least, and very small or large ones have an exponent.
    """
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    largest, smallest = max(sizes, default=1.0), min(sizes, default=1.0)
    if largest > LARGEST_RATIO * smallest or not _has_plain_decimals(largest):
        return [UNKNOWN if value is None else _significant(value, digits) for value in values]
    decimals = max(decimals_of(largest, digits), decimals_of(smallest, min(digits, 2)))
    return [UNKNOWN if value is None else f"{value:z.{decimals}f}" for value in values]


def decimals_of(value: float, digits: int) -> int:
    """Return the number of decimals of a number with this many significant digits; 0 for large numbers and those
    that are not finite.
    """
    if not math.isfinite(value):
        return 0
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # of the rounded number
    return max(0, digits - 1 - exponent)


def _has_plain_decimals(value: float) -> bool:
    """Whether a number is easier to read without an exponent."""
    return 1e-3 <= abs(value) < 1e6 or value == 0


def _significant(value: float, digits: int) -> str:
    if _has_plain_decimals(value):
        return f"{value:z.{decimals_of(value, digits)}f}"
    return f"{value:#.{digits}g}".rstrip(".")


NO_BREAK = "\u00a0"
"""A space at which no line ends."""

_BEFORE_UNIT = re.compile(r"(?<=[\d\])]) (?=(?:%|[µm]?s|[kMGT]?B|[kMG]?bit/s|pairs?)(?!\w))")
_INTERVAL_OR_RATIO_OF_NORMS = re.compile(r"\[[^\s,\]]+, [^\s,\]]+\]|‖[^‖]*‖ / ‖[^‖]*‖")


def kept_together(text: str) -> str:
    r"""Return the text with no line break between a number and its unit, or within an interval or a ratio of norms."""
    text = _INTERVAL_OR_RATIO_OF_NORMS.sub(lambda match: match[0].replace(" ", NO_BREAK), text)
    return _BEFORE_UNIT.sub(NO_BREAK, text)


def human_ratio(value: float) -> str:
    """Format a ratio with two significant digits."""
    return f"{value:.1f}" if value < 9.95 else f"{float(f'{value:.1e}'):,.0f}"


def human_rate(value: float | None) -> str:
    """Format a rate in bytes/s, like :func:`human_bytes`."""
    return UNKNOWN if value is None else f"{human_bytes(value)}/s"


def human_bit_rate(value: float) -> str:
    """Format a rate in bytes/s as bits per second, with three significant digits."""
    bits, unit = _in_unit(8 * value, "bit/s kbit/s Mbit/s Gbit/s")
    return f"{bits:.3g} {unit}"


def parse_rate(name: str, text: str) -> float:
    """Parse a rate into bytes/s: a number, an optional prefix, and a unit of bits or bytes.

    Bits are ``bit``, ``bps`` or ``b``; bytes are ``byte`` or ``B``. Case matters only for ``b`` and ``B``. A ``/s`` may
    follow.
    """
    match = _RATE.fullmatch(text)
    number, prefix, unit = match.groups() if match else ("0", "", "")
    amount: float = float(number) * (1024 if "i" in prefix else 1000) ** " kmgt".find(prefix[:1].lower() or " ")
    if not 0 < amount < math.inf:
        raise InvalidParameter.of(name, text, "a rate > 0 such as '100mbit', '1.25GB/s' or '25 Gbit/s'")
    if not unit:
        digits = number + prefix  # '100' could mean megabits or bytes
        hint = f"Give the unit: '{digits}bit' or '{digits}B', with a prefix if needed ('100mbit', '1.25GB/s')."
        raise InvalidParameter.of(name, text, "a rate in bits or bytes per second", hint)
    return amount / (8 if unit == "b" or "bi" in unit.lower() or unit.lower() == "bps" else 1)


def _three_figures(value: float) -> str:
    return f"{value:.{decimals_of(value, 3)}f}"


def _in_unit(value: float, units: str) -> tuple[float, str]:
    """A number in the first unit in which it is below 1,000, or else in the last one."""
    unit, *larger = units.split()
    for name in larger:
        if value < 999.5:
            break
        value, unit = value / 1000, name
    return value, unit
