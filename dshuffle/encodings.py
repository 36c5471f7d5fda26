"""How stored numbers become values: scale, offset, missing values and times, by the CF conventions.

Rows hold the stored numbers, so these are what workers cache and exchange. Whoever hands values out decodes them.

References
----------
B. Eaton et al., "NetCDF Climate and Forecast (CF) Metadata Conventions", sections 2.5.1, 4.4 and 8.1. Decoded
values have the same dtypes as in xarray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the stored numbers of one array become values.

    Parameters
    ----------
    dtype
        Dtype of the values, as a string: floats for scaled numbers, ``"M8[us]"`` or ``"M8[ns]"`` for times, ``"?"``.
    scale, offset
        A value is the stored number times ``scale`` plus ``offset``.
    missing
        Stored numbers that mean a missing value, which becomes NaN or NaT.
    unsigned
        Whether the stored numbers are unsigned, although their dtype is not.
    unit, since
        For times: the length of the stored unit and the origin since 1970, both in units of ``dtype``.

    Examples
    --------
    >>> Encoding("<f4", scale=0.5, offset=10, missing=(-1,)).decode(np.array([0, 3, -1], "i2"))
    array([10. , 11.5,  nan], dtype=float32)
    >>> Encoding("M8[us]", unit=3_600_000_000, since=0).decode(np.array([0, 25]))
    array(['1970-01-01T00:00:00.000000', '1970-01-02T01:00:00.000000'],
          dtype='datetime64[us]')
    """

    dtype: str
    scale: float | None = None
    offset: float | None = None
    missing: tuple[float, ...] = ()
    unsigned: bool = False
    unit: int = 0
    since: int = 0

    def decode(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return the values of stored numbers, as a new array of the same shape."""
        if self.unsigned:
            stored = stored.view(f"{stored.dtype.byteorder}u{stored.dtype.itemsize}")
        absent = np.isin(stored, self.missing) if self.missing else None
        if self.unit:
            values = self._times(stored)
        else:
            values = stored.astype(self.dtype)
            if self.scale is not None:
                values *= self.scale
            if self.offset is not None:
                values += self.offset
        if absent is not None and absent.any():
            values[absent] = np.nan if values.dtype.kind == "f" else np.datetime64("NaT")
        return values

    def _times(self, stored: NDArray[Any]) -> NDArray[Any]:
        if stored.dtype.kind == "f":
            known = np.isfinite(stored)
            counts = np.round(np.where(known, stored, 0).astype(np.float64) * self.unit).astype(np.int64)
        else:
            known, counts = None, stored.astype(np.int64) * self.unit
        values = (counts + self.since).view(self.dtype)
        if known is not None:
            values[~known] = np.datetime64("NaT")
        return values
