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
    """
    allowed = f"a number in [{minimum}, 1]"
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidParameter.of(name, value, allowed, hint)
    ratio = Fraction(float(value)).limit_denominator(10**12)
    if not minimum <= ratio <= 1:
        raise InvalidParameter.of(name, value, allowed, hint)
    return ratio


def as_indices(name: str, values: ArrayLike, stop: int, what: str) -> NDArray[np.int64]:
    """Return one-dimensional indices in [0, ``stop``) as int64, or raise :class:`InvalidParameter`."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidParameter.of(f"{name}.shape", array.shape, "one-dimensional")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        hint = "For a boolean mask, take numpy.flatnonzero(mask)." if array.dtype == np.bool_ else ""
        raise InvalidParameter.of(f"{name}.dtype", str(array.dtype), "a dtype of integers", hint)
    if array.min() < 0 or array.max() >= stop:
        first = int(np.flatnonzero((array < 0) | (array >= stop))[0])
        raise InvalidParameter.of(f"{name}[{first}]", int(array[first]), f"in [0, {stop}), the range of the {what}")
    return array.astype(np.int64, copy=False)


def as_ranks(name: str, values: ArrayLike, n_workers: int) -> NDArray[np.int32]:
    """Return a contiguous ``(q,)`` int32 array of ranks in [0, ``n_workers``), or raise :class:`InvalidParameter`."""
    return np.ascontiguousarray(as_indices(name, values, n_workers, "ranks"), dtype=np.int32)
