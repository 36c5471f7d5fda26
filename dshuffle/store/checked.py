"""Checks of the arguments of reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.rows import ByteMatrix


def checked_slots(rows: ByteMatrix, slots: ArrayLike, n_samples: int, row_nbytes: int) -> NDArray[np.int64]:
    """Check a matrix that rows are read into, and return the slots as int64.

    Raises
    ------
    InvalidParameter
        If the matrix cannot hold such rows, or the slots are not ``n_samples`` distinct rows of it.
    """
    if not (
        isinstance(rows, np.ndarray)
        and rows.dtype == np.uint8
        and rows.ndim == 2
        and rows.shape[1] == row_nbytes
        and rows.flags.c_contiguous
        and rows.flags.writeable
    ):
        description = f"{type(rows).__name__} {getattr(rows, 'dtype', '')} {getattr(rows, 'shape', '')}".strip()
        raise InvalidParameter.because(
            "rows",
            f"it is not a writeable, C-contiguous (capacity, {row_nbytes}) uint8 matrix (found {description})",
            "Allocate it with the layout's empty().",
        )
    places = checked_indices("slots", slots, len(rows), "slots of rows")
    if places.size != n_samples:
        raise InvalidParameter.of("len(slots)", places.size, f"the number of ids ({n_samples})")
    used = np.zeros(len(rows), dtype=np.bool_)
    used[places] = True
    if np.count_nonzero(used) != places.size:
        raise InvalidParameter.because("slots", "some slots are repeated", "Give distinct slots.")
    return places


def check_memory_budget(nbytes: int) -> None:
    """Check a number of bytes."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise InvalidParameter.of("memory_budget", nbytes, "an integer >= 1 (bytes)")


def checked_indices(name: str, values: ArrayLike, stop: int, what: str) -> NDArray[np.int64]:
    """Check one-dimensional indices in [0, ``stop``), and return them as int64."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidParameter.of(f"{name}.shape", array.shape, "one-dimensional")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype == np.bool_:
        raise InvalidParameter.because(name, "it is a boolean mask, not integers", "Use numpy.flatnonzero(mask).")
    if array.dtype.kind not in "iu":
        raise InvalidParameter.of(f"{name}.dtype", str(array.dtype), "a dtype of integers")
    if array.min() < 0 or array.max() >= stop:
        first = int(np.flatnonzero((array < 0) | (array >= stop))[0])
        raise InvalidParameter.of(
            f"{name}[{first}]",
            int(array[first]),
            f"in [0, {stop}), the range of the {what}",
            "Negative indices are not supported.",
        )
    return array.astype(np.int64, copy=False)
