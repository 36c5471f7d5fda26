"""How stored numbers become values: scale, offset, missing values and times, by the CF conventions.

Rows hold the stored numbers, so these are what workers cache and exchange. Whoever hands values out decodes them.

References
----------
B. Eaton et al., "NetCDF Climate and Forecast (CF) Metadata Conventions", sections 2.5.1, 4.4 and 8.1. Decoded
values are the same as in xarray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DatasetError

NAT = -(2**63)
"""What NumPy stores for NaT, and xarray for a missing time in an array of integers."""

LATEST = 2**63 - 1
EARLIEST = NAT + 1


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the stored numbers of one array become values.

    A number is the stored number times ``scale`` plus ``offset``, in the dtype ``numbers`` (``"?"`` for booleans). The
    stored numbers ``missing`` become NaN or NaT. ``kind`` is ``"u"`` or ``"i"`` if the stored bytes are integers with
    or without a sign, although their dtype says the opposite.

    With ``times``, a dtype of dates or durations, a number times ``factor`` is a count in its units, from the origin
    ``since`` (since 1970; 0 for durations). ``earliest`` is the first date that is allowed, and ``units`` are those in
    the store, for errors.
    """

    numbers: str
    scale: float | None = None
    offset: float | None = None
    missing: tuple[float, ...] = ()
    kind: str = ""
    times: str = ""
    factor: int = 1
    since: int = 0
    earliest: int = EARLIEST
    units: str = ""

    @property
    def dtype(self) -> str:
        """Dtype of the values."""
        return self.times or self.numbers

    def decode(self, stored: NDArray[Any], name: str) -> NDArray[Any]:
        """Return the values of stored numbers of the array ``name``, as a new array of the same shape."""
        if self.kind:
            stored = stored.view(f"{stored.dtype.byteorder}{self.kind}{stored.dtype.itemsize}")
        # As in xarray, numbers are compared with the missing ones before they are scaled, but in the dtype of scaling.
        is_plain = self.scale is None and self.offset is None
        values = stored if self.times and is_plain else stored.astype(self.numbers)
        absent = np.zeros(values.shape, bool)
        for number in self.missing:
            absent |= values == np.asarray(number)  # in full precision, unlike a comparison with a Python float
        if self.scale is not None:
            values *= self.scale
        if self.offset is not None:
            values += self.offset
        if self.times:
            return self._decode_times(values, absent, name)
        if self.missing:
            values[absent] = np.nan
        return values

    def _decode_times(self, numbers: NDArray[Any], absent: NDArray[np.bool_], name: str) -> NDArray[Any]:
        """Dates or durations; NaN, the least int64, and absent numbers become NaT."""
        absent = absent | (numbers == NAT) | (numbers != numbers)  # a packed NaT is a float
        if numbers.dtype.kind == "f":
            counts = np.where(absent, 0, numbers).astype(np.float64)
            with np.errstate(over="ignore"):
                counts *= self.factor
            # xarray truncates nanoseconds. It leaves other resolutions to cftime, which rounds to microseconds.
            (np.trunc if self.times.endswith("[ns]") else np.rint)(counts, out=counts)
            fits = np.abs(counts) < 2.0**64
            counts[~fits] = 0
            high = np.floor(counts / 2.0**32)
            values = (high.astype(np.int64) << 32) + (counts - high * 2.0**32).astype(np.int64) + self.since
            fits &= np.abs(counts + self.since - values) < 2.0**63  # a count may wrap if its sum with the origin fits
        else:
            first, last = -((self.since - self.earliest) // self.factor), (LATEST - self.since) // self.factor
            fits = (numbers >= first) & (numbers <= last)
            values = np.where(fits, numbers, 0).astype(np.int64) * self.factor + self.since
        fits &= values >= self.earliest
        fits |= absent
        if not fits.all():
            begin, end = np.array([self.earliest, LATEST]).view(self.times)
            raise DatasetError(
                f"array {name!r} has the value {numbers[~fits].flat[0]} in {self.units!r}, but values of dtype "
                f"{np.dtype(self.times)} lie between {begin} and {end}. Open the dataset with decode=False to get the "
                "stored numbers, or without this array"
            )
        values[absent] = NAT
        return values.view(self.times)
