"""How stored numbers become values: scale, offset, missing values and times, by the CF conventions.

Rows hold the stored numbers, so these are what workers cache and exchange. Whoever hands values out decodes them.

References
----------
B. Eaton et al., "NetCDF Climate and Forecast (CF) Metadata Conventions", sections 2.5.1, 4.4 and 8.1. Decoded
values are the same as in xarray.
"""

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

ADVICE = ". Open the dataset with decode=False to get the stored numbers, or without this array"


@dataclass(frozen=True, slots=True)
class Times:
    """How the numbers of an array become dates or durations.

    A number times all ``factors`` is a count in units of ``dtype``, from the origin ``since`` in these units (since
    1970; 0 for durations). xarray multiplies floats in this order, which decides about their last digit. ``units`` are
    those in the store, for errors, and ``earliest`` is the first date that is allowed.
    """

    dtype: str
    factors: tuple[int, ...]
    since: int
    units: str
    earliest: int = EARLIEST

    def decode(self, numbers: NDArray[Any], absent: NDArray[np.bool_], name: str) -> NDArray[Any]:
        """Return the dates or durations of numbers; NaN, the least int64, and absent numbers become NaT."""
        missing = absent | (numbers == NAT)  # a packed NaT is a float
        if numbers.dtype.kind == "f":
            missing |= np.isnan(numbers)
            counts = np.where(missing, 0, numbers).astype(np.float64)
            with np.errstate(over="ignore"):
                for factor in self.factors:
                    counts *= factor
            # xarray truncates nanoseconds. It leaves other resolutions to cftime, which rounds to microseconds.
            (np.trunc if self.dtype.endswith("[ns]") else np.rint)(counts, out=counts)
            fits = np.abs(counts) < 2.0**64
            counts[~fits] = 0
            high = np.floor(counts / 2.0**32)
            values = (high.astype(np.int64) << 32) + (counts - high * 2.0**32).astype(np.int64) + self.since
            fits &= np.abs(counts + self.since - values) < 2.0**63  # a count may wrap if its sum with the origin fits
        else:
            step = math.prod(self.factors)
            fits = (numbers >= -((self.since - self.earliest) // step)) & (numbers <= (LATEST - self.since) // step)
            values = np.where(fits, numbers, 0).astype(np.int64) * step + self.since
        fits &= values >= self.earliest
        fits |= missing
        if not fits.all():
            first, last = np.array([self.earliest, LATEST]).view(self.dtype)
            raise DatasetError(
                f"array {name!r} has the value {numbers[~fits].flat[0]} in {self.units!r}, but values of dtype "
                f"{np.dtype(self.dtype)} lie between {first} and {last}{ADVICE}"
            )
        values[missing] = NAT
        return values.view(self.dtype)


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the stored numbers of one array become values.

    A number is the stored number times ``scale`` plus ``offset``, in the dtype ``numbers`` (``"?"`` for booleans). The
    stored numbers ``missing`` become NaN or NaT. ``kind`` is ``"u"`` or ``"i"`` if the stored bytes are integers with
    or without a sign, although their dtype says the opposite. ``times`` says how numbers become dates or durations.
    """

    numbers: str
    scale: float | None = None
    offset: float | None = None
    missing: tuple[float, ...] = ()
    kind: str = ""
    times: Times | None = None

    @property
    def dtype(self) -> str:
        """Dtype of the values."""
        return self.numbers if self.times is None else self.times.dtype

    def decode(self, stored: NDArray[Any], name: str) -> NDArray[Any]:
        """Return the values of stored numbers of the array ``name``, as a new array of the same shape."""
        if self.kind:
            stored = stored.view(f"{stored.dtype.byteorder}{self.kind}{stored.dtype.itemsize}")
        # As in xarray, numbers are compared with the missing ones before they are scaled, but in the dtype of scaling.
        packed = self.scale is not None or self.offset is not None
        values = stored.astype(self.numbers) if self.times is None or packed else stored
        absent = np.zeros(values.shape, bool)
        for number in self.missing:
            absent |= values == np.asarray(number)  # in full precision, unlike a comparison with a Python float
        if self.scale is not None:
            if values.dtype.kind in "iu":
                beyond = np.abs(values * float(self.scale)) >= np.iinfo(values.dtype).max
                if beyond.any():
                    said = f"array {name!r} has the value {values[beyond].flat[0]}, and times scale_factor={self.scale}"
                    raise DatasetError(f"{said} it is beyond {values.dtype}{ADVICE}")
            values *= self.scale
        if self.offset is not None:
            values += self.offset
        if self.times is not None:
            return self.times.decode(values, absent, name)
        if self.missing:
            values[absent] = np.nan
        return values
