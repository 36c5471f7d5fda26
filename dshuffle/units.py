"""Formatting of numbers for people, and parsing of rates and counts."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable

from dshuffle.errors import InvalidParameter

UNKNOWN = "-"
_PREFIXES: dict[str, int] = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{letter}i": 1 << 10 * power for power, letter in enumerate("kmgt", start=1)
}


def human_bytes(value: float | None) -> str:
    """Format bytes in decimal units, with three significant digits.

    Examples
    --------
    >>> human_bytes(0), human_bytes(999), human_bytes(12_345_678), human_bytes(None)
    ('0 B', '999 B', '12.3 MB', '-')
    """
    if value is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{_three_figures(value)} {unit}"


def human_seconds(value: float | None) -> str:
    """Format a time in seconds, milliseconds or microseconds.

    Examples
    --------
    >>> human_seconds(0.0), human_seconds(2.5e-6), human_seconds(0.01234), human_seconds(125)
    ('0 s', '2.50 µs', '12.3 ms', '125 s')
    """
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0 s"
    if value < 0.0009995:
        return f"{_three_figures(value * 1e6)} µs"
    return f"{_three_figures(value * 1000)} ms" if value < 0.9995 else f"{_three_figures(value)} s"


def human_count(value: float | None) -> str:
    """Format a count with thousands separators.

    Examples
    --------
    >>> human_count(75012.0), human_count(None)
    ('75,012', '-')
    """
    return UNKNOWN if value is None else f"{value:,.0f}"


def human_error(value: float | None) -> str:
    """Format a relative error with two significant digits.

    Examples
    --------
    >>> human_error(0.2345), human_error(3.21e-7), human_error(0.0)
    ('0.23', '3.2e-07', '0')
    """
    return UNKNOWN if value is None else f"{value:.2g}"


def human_ratio(value: float) -> str:
    """Format a ratio with two significant digits.

    Examples
    --------
    >>> human_ratio(1.234), human_ratio(41.7), human_ratio(1234.0)
    ('1.2', '42', '1,200')
    """
    if value < 9.95:
        return f"{value:.1f}"
    return f"{round(value, 1 - math.floor(math.log10(value))):,.0f}"


def human_rate(value: float | None) -> str:
    """Format a rate in bytes/s with three significant digits.

    Examples
    --------
    >>> human_rate(12.5e6), human_rate(None)
    ('12.5 MB/s', '-')
    """
    return UNKNOWN if value is None else f"{human_bytes(value)}/s"


def human_bit_rate(value: float) -> str:
    """Format a rate in bytes/s as bits per second, with three significant digits.

    Examples
    --------
    >>> human_bit_rate(12.5e6), human_bit_rate(125e6), human_bit_rate(1.25e3)
    ('100 Mbit/s', '1 Gbit/s', '10 kbit/s')
    """
    bits, unit = 8 * value, "bit/s"
    for larger in ("kbit/s", "Mbit/s", "Gbit/s"):
        if bits < 999.5:
            break
        bits, unit = bits / 1000, larger
    return f"{bits:.3g} {unit}"


def parse_rate(name: str, text: str) -> float:
    """Parse a rate into bytes/s: a number, an optional prefix, and a unit of bits or bytes.

    Bits are ``bit``, ``bps`` or ``b``; bytes are ``byte`` or ``B``. Case matters only for ``b`` and ``B``. A ``/s`` may
    follow.

    Raises
    ------
    InvalidParameter
        If the text is not a rate > 0.

    Examples
    --------
    >>> parse_rate("bandwidth", "100mbit"), parse_rate("bandwidth", "1.25 GB/s"), parse_rate("bandwidth", "64KiB/s")
    (12500000.0, 1250000000.0, 65536.0)
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([kmgtKMGT]i?)?(\w*)(?:/s)?\s*", text)
    units = {"B": 1.0, "byte": 1.0, "bytes": 1.0, "b": 1 / 8, "bit": 1 / 8, "bits": 1 / 8, "bps": 1 / 8}
    if match is not None:
        number, prefix, unit = match.groups()
        unit = unit if unit == "B" else unit.lower()
        try:
            amount = float(number) * _PREFIXES[(prefix or "").lower()]
        except ValueError:
            amount = 0.0
        if 0 < amount < math.inf:
            if unit in units:
                return amount * units[unit]
            if not unit:  # '100' could mean megabits or bytes
                digits = number + (prefix or "")
                hint = f"Give the unit: '{digits}bit' or '{digits}B', with a prefix if needed ('100mbit', '1.25GB/s')."
                raise InvalidParameter.of(name, text, "a rate in bits or bytes per second", hint)
    raise InvalidParameter.of(name, text, "a rate > 0 such as '100mbit', '1.25GB/s' or '25 Gbit/s'")


def _three_figures(value: float) -> str:
    value = float(f"{value:.3g}")
    if value < 1:
        return f"{value:.2g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def at_least(least: int) -> Callable[[str], int]:
    """Return the ``type`` of an option of ``argparse`` that is an integer >= ``least``.

    Examples
    --------
    >>> at_least(1)("3")
    3
    >>> at_least(1)("0")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 0 is not allowed; it must be an integer >= 1
    """

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text.strip()) or int(text) < least:
            raise ArgumentTypeError(f"{text} is not allowed; it must be an integer >= {least}")
        return int(text)

    return parse
