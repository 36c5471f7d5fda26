"""Times, sizes and switches as users write them: numbers, text with a unit, True or False."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from numbers import Real
from typing import Any

from dask.utils import parse_bytes, parse_timedelta

from dshuffle.errors import InvalidParameter


def as_seconds(name: str, value: object, *, positive: bool = False) -> float:
    """Return the seconds of a parameter or setting, which is a number or text such as ``"5m"``.

    Parameters
    ----------
    name
        The parameter or setting, for the error.
    value
        Its value.
    positive
        Whether it must be above 0, and finite.

    Raises
    ------
    InvalidParameter
        If it is not a time, or is below 0.

    Examples
    --------
    >>> as_seconds("patience", "5m")
    300.0
    """
    seconds = float(_number(value, parse_timedelta))
    if not seconds >= 0 or (positive and not 0 < seconds < math.inf):
        allowed = "a positive time" if positive else "a time of at least 0"
        raise InvalidParameter.of(name, value, f'{allowed}: seconds, or text such as "5m"')
    return seconds


def as_nbytes(name: str, value: object) -> int:
    """Return the bytes of a parameter or setting, which is an integer or text such as ``"2 GiB"``.

    Raises
    ------
    InvalidParameter
        If it is no positive number of bytes.

    Examples
    --------
    >>> as_nbytes("memory_limit", "2 KiB")
    2048
    """
    nbytes = _number(value, parse_bytes if isinstance(value, str) else float)
    if not (1 <= nbytes < math.inf and nbytes == int(nbytes)):
        raise InvalidParameter.of(name, value, 'a positive number of bytes, such as "2 GiB" or 2**31')
    return int(nbytes)


def as_fraction(name: str, value: object) -> float:
    """Return a number within (0, 1], which may be text.

    Raises
    ------
    InvalidParameter
        If it is not such a number.

    Examples
    --------
    >>> as_fraction("dshuffle.memory-fraction", "0.5")
    0.5
    """
    number: float = _number(value, float)
    if not 0 < number <= 1:
        raise InvalidParameter.of(name, value, "a number within (0, 1]")
    return number


def as_switch(name: str, value: object) -> bool:
    """Return a parameter or setting that is either on or off.

    Raises
    ------
    InvalidParameter
        If it is not a bool. Other values that Python takes for true are more likely a mistake.

    Examples
    --------
    >>> as_switch("elastic", True)
    True
    """
    if not isinstance(value, bool):
        raise InvalidParameter.of(name, value, "True or False")
    return value


def _number(value: object, parse: Callable[[Any], Any]) -> Any:
    """What ``parse`` makes of a number, or of text with a digit; NaN if that fails."""
    # Dask takes "" for one byte, and "ms" for a millisecond.
    if re.search(r"\d", value) if isinstance(value, str) else isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(KeyError, ValueError, OverflowError):
            return parse(value)
    return math.nan
