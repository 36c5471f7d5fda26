"""Numbers as a person reads them."""

from __future__ import annotations

import math

UNKNOWN = "-"


def human_bytes(value: float | None) -> str:
    """Bytes in decimal units, three figures.

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
    """Seconds, milli- or microseconds.

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
    """A count with thousands apart.

    Examples
    --------
    >>> human_count(75012.0), human_count(None)
    ('75,012', '-')
    """
    return UNKNOWN if value is None else f"{value:,.0f}"


def human_error(value: float | None) -> str:
    """A relative error, two figures.

    Examples
    --------
    >>> human_error(0.2345), human_error(3.21e-7), human_error(0.0)
    ('0.23', '3.2e-07', '0')
    """
    return UNKNOWN if value is None else f"{value:.2g}"


def human_ratio(value: float) -> str:
    """How many times, two figures.

    Examples
    --------
    >>> human_ratio(1.234), human_ratio(41.7), human_ratio(1234.0)
    ('1.2', '42', '1,200')
    """
    if value < 9.95:
        return f"{value:.1f}"
    return f"{round(value, 1 - math.floor(math.log10(value))):,.0f}"


def _three_figures(value: float) -> str:
    value = float(f"{value:.3g}")
    if value < 1:
        return f"{value:.2g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
