"""Checks of argument values, made once where the public API is called."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from fractions import Fraction
from numbers import Real
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import InvalidParameter

Name = TypeVar("Name")
Checked = TypeVar("Checked")


def each(names: Iterable[Name], check: Callable[[Name], Checked]) -> dict[Name, Checked]:
    """Return what ``check`` returns for each name, or raise one :class:`InvalidParameter` for all that are wrong."""
    checked: dict[Name, Checked] = {}
    errors: list[InvalidParameter] = []
    for name in names:
        try:
            checked[name] = check(name)
        except InvalidParameter as error:
            errors.append(error)
    if errors:
        raise InvalidParameter.of_all(errors)
    return checked


def as_integer(name: str, value: object, minimum: int | None = None, hint: str = "") -> int:
    """Return ``value`` as an int, or raise :class:`InvalidParameter` if it is not an integer >= ``minimum``."""
    allowed = "an integer" if minimum is None else f"an integer >= {minimum}"
    try:
        if isinstance(value, bool):  # an integer, but surely meant for another parameter
            raise TypeError
        number = int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidParameter.of(name, value, allowed, hint) from None
    if minimum is not None and number < minimum:
        raise InvalidParameter.of(name, value, allowed, hint)
    return number


def as_shape(n_samples: object, n_workers: object) -> tuple[int, int]:
    """Return the numbers of samples and of workers, or raise :class:`InvalidParameter` if there are fewer samples."""
    workers = as_integer("n_workers", n_workers, 1)
    return as_integer("n_samples", n_samples, workers, "There are fewer samples than workers."), workers


def as_ratio(name: str, value: object, minimum: Fraction, hint: str = "") -> Fraction:
    """Return the simple fraction that a float in [``minimum``, 1] represents.

    Sample counts are products of a fraction and a number of samples, rounded up or down. The float 0.1 is slightly
    larger than 1/10, so rounding ``0.1 * q`` can be off by one sample. The nearest fraction with a denominator of at
    most 1e12 removes the error of the float and keeps every digit that a user types.

    Examples
    --------
    >>> as_ratio("fraction", 0.1 + 0.2, Fraction(0))
    Fraction(3, 10)
    """
    allowed = f"a number in [{minimum}, 1]"
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidParameter.of(name, value, allowed, hint)
    ratio = Fraction(float(value)).limit_denominator(10**12)
    if not minimum <= ratio <= 1:
        raise InvalidParameter.of(name, value, allowed, hint)
    return ratio


def as_ranks(name: str, values: ArrayLike, n_workers: int) -> NDArray[np.int32]:
    """Return a contiguous ``(q,)`` int32 array of ranks in [0, ``n_workers``), or raise :class:`InvalidParameter`."""
    ranks = np.asarray(values)
    if ranks.ndim != 1:
        raise InvalidParameter.of(f"{name}.shape", ranks.shape, "(n_samples,)")
    if not np.issubdtype(ranks.dtype, np.integer):
        raise InvalidParameter.of(f"{name}.dtype", str(ranks.dtype), "an integer dtype")
    if ranks.size and not (ranks.min() >= 0 and ranks.max() < n_workers):
        bad = int(np.flatnonzero((ranks < 0) | (ranks >= n_workers))[0])
        raise InvalidParameter.of(f"{name}[{bad}]", int(ranks[bad]), f"a rank in [0, {n_workers})")
    return np.ascontiguousarray(ranks, dtype=np.int32)
