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
from dshuffle.times import Times


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the stored numbers of one array become values.

    Parameters
    ----------
    dtype
        Dtype of the values, as a string: floats for scaled numbers, ``"M8[us]"`` or ``"M8[ns]"`` for dates, ``"?"``.
    scale, offset
        A number is the stored number times ``scale`` plus ``offset``.
    missing
        Stored numbers that mean a missing value, which becomes NaN or NaT.
    kind
        ``"u"`` or ``"i"`` if the stored bytes are integers with or without a sign, although their dtype says the
        opposite.
    times
        How the numbers become dates or durations; None if they do not.

    Examples
    --------
    >>> Encoding("<f4", scale=0.5, offset=10, missing=(-1,)).decode(np.array([0, 3, -1], "i2"), "x")
    array([10. , 11.5,  nan], dtype=float32)
    >>> hours = Times("M8[us]", (3_600_000_000,), 0, "hours since 1970-01-01")
    >>> Encoding("M8[us]", missing=(-1,), times=hours).decode(np.array([25, -1]), "time")
    array(['1970-01-02T01:00:00.000000',                        'NaT'],
          dtype='datetime64[us]')
    """

    dtype: str
    scale: float | None = None
    offset: float | None = None
    missing: tuple[float, ...] = ()
    kind: str = ""
    times: Times | None = None

    def decode(self, stored: NDArray[Any], name: str) -> NDArray[Any]:
        """Return the values of stored numbers, as a new array of the same shape.

        Parameters
        ----------
        stored
            The stored numbers.
        name
            Name of the array, for errors.

        Raises
        ------
        DatasetError
            If a date, a duration or a scaled integer is beyond what its dtype can hold.
        """
        if self.kind:
            stored = stored.view(f"{stored.dtype.byteorder}{self.kind}{stored.dtype.itemsize}")
        # As in xarray, numbers are compared with the missing ones before they are scaled, but in the dtype of scaling.
        packed = self.scale is not None or self.offset is not None
        numbers = self.dtype if self.times is None else self.times.numbers
        values = stored.astype(numbers) if self.times is None or packed else stored
        absent = self._absent(values)
        if self.scale is not None:
            _check_product(values, self.scale, name)
            values *= self.scale
        if self.offset is not None:
            values += self.offset
        if self.times is not None:
            return self.times.decode(values, absent, name)
        if absent is not None:
            values[absent] = np.nan
        return values

    def _absent(self, numbers: NDArray[Any]) -> NDArray[np.bool_] | None:
        if not self.missing:
            return None
        absent = np.zeros(numbers.shape, bool)
        for number in self.missing:
            absent |= numbers == np.asarray(number)  # in full precision, unlike a comparison with a Python float
        return absent


def _check_product(integers: NDArray[Any], scale: float, name: str) -> None:
    """Check that integers do not overflow when they are scaled; floats do not."""
    if integers.dtype.kind == "f" or not integers.size:
        return
    limits = np.iinfo(integers.dtype)
    for number in (int(integers.min()), int(integers.max())):
        if not limits.min <= number * scale <= limits.max:
            raise DatasetError(
                f"array {name!r} has the value {number}, and times scale_factor={scale} it is beyond {integers.dtype}. "
                "Open the dataset with decode=False to get the stored numbers, or without this array"
            )
