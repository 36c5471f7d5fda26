"""How counts of a unit become dates and durations of NumPy, without any that wraps around."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DatasetError

NAT = -(2**63)
"""What NumPy stores for NaT, and xarray for a missing time in an array of integers."""

LATEST = 2**63 - 1
EARLIEST = NAT + 1
TURN = 2.0**64
"""By how much an integer is wrong after it has wrapped."""
NEAR = 4096
"""More than what floats of this size are off."""


@dataclass(frozen=True, slots=True)
class Times:
    """How the numbers of an array become dates or durations.

    Parameters
    ----------
    dtype
        Dtype of the values, such as ``"M8[us]"`` or ``"m8[ns]"``.
    factors
        A number times all of these is a count in units of ``dtype``. xarray multiplies floats in this order, which
        decides about their last digit.
    since
        Origin of dates since 1970, in units of ``dtype``; 0 for durations.
    units
        The units as they are in the store, for errors.
    numbers
        Dtype in which packed numbers are unpacked: ``"float64"`` or ``"int64"``.
    earliest
        First date that is allowed, in units of ``dtype`` since 1970.

    Examples
    --------
    >>> times = Times("M8[us]", (3_600_000_000,), 0, "hours since 1970-01-01")
    >>> times.decode(np.array([0, 25, NAT]), None, "time")
    array(['1970-01-01T00:00:00.000000', '1970-01-02T01:00:00.000000',
                                  'NaT'], dtype='datetime64[us]')
    >>> times.decode(np.array([10**15]), None, "time")
    Traceback (most recent call last):
    ...
    dshuffle.errors.DatasetError: array 'time' has the value 1000000000000000 in 'hours since 1970-01-01', but ...
    """

    dtype: str
    factors: tuple[int, ...]
    since: int
    units: str
    numbers: str = "float64"
    earliest: int = EARLIEST

    def decode(self, numbers: NDArray[Any], absent: NDArray[np.bool_] | None, name: str) -> NDArray[Any]:
        """Return the dates or durations of numbers, as a new array of the same shape.

        NaN, the number of the least int64, and absent numbers become NaT.

        Parameters
        ----------
        numbers
            Unpacked integers or floats.
        absent
            Which of them are missing; of the same shape. None if no number means that.
        name
            Name of the array, for errors.

        Raises
        ------
        DatasetError
            If the dtype cannot hold a date or duration.
        """
        missing = numbers == NAT  # a packed NaT is a float
        if numbers.dtype.kind == "f":
            missing |= np.isnan(numbers)
        if absent is not None:
            missing |= absent
        values, fits = (
            self._from_floats(numbers, missing) if numbers.dtype.kind == "f" else self._from_integers(numbers)
        )
        fits |= missing
        if not fits.all():
            raise self._outside(numbers[~fits].flat[0], name)
        values[missing] = NAT
        return values.view(self.dtype)

    def _from_integers(self, numbers: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Values as integers, and which of them fit."""
        step = math.prod(self.factors)
        fits = (numbers >= -((self.since - self.earliest) // step)) & (numbers <= (LATEST - self.since) // step)
        return np.where(fits, numbers, 0).astype(np.int64) * step + self.since, fits

    def _from_floats(
        self, numbers: NDArray[Any], missing: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        counts = np.where(missing, 0, numbers).astype(np.float64, copy=False)
        with np.errstate(over="ignore"):
            for factor in self.factors:
                counts *= factor
        # xarray truncates nanoseconds. It leaves other resolutions to cftime, which rounds to microseconds.
        (np.trunc if self.dtype.endswith("[ns]") else np.rint)(counts, out=counts)
        least, most = float(counts.min(initial=0)), float(counts.max(initial=0))
        if (
            max(-least, most) < TURN / 2
            and self.earliest + NEAR < least + self.since <= most + self.since < LATEST - NEAR
        ):
            return counts.astype(np.int64) + self.since, np.ones(counts.shape, bool)
        fits = np.abs(counts) < TURN
        counts[~fits] = 0
        # A count may wrap although its sum with the origin fits, which is then right. A sum that does not fit is found
        # by its distance from the sum of floats.
        wrapped = np.where(counts < TURN / 2, counts, counts - TURN)
        wrapped = np.where(counts >= -TURN / 2, wrapped, counts + TURN)
        values = wrapped.astype(np.int64) + self.since
        fits &= np.abs(counts + self.since - values) < TURN / 2
        return values, fits & (values >= self.earliest)

    def _outside(self, number: Any, name: str) -> DatasetError:
        first, last = np.array([self.earliest, LATEST]).view(self.dtype)
        return DatasetError(
            f"array {name!r} has the value {number} in {self.units!r}, but values of dtype {np.dtype(self.dtype)} lie "
            f"between {first} and {last}. Open the dataset with decode=False to get the stored numbers, or without "
            "this array"
        )
