"""Features read slab by slab: flat, as floats, and checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter

Floats = NDArray[np.float32] | NDArray[np.float64]
Progress = Callable[[int, int, str], None]

SLAB_NBYTES = 16 << 20
"""Features are read in slabs of about so many bytes."""


class Sliceable(Protocol):
    """A NumPy or Dask array, or whatever gives rows ``[start:stop]`` as an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(q, ...)``."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numbers."""

    def __getitem__(self, rows: slice, /) -> Any:
        """Consecutive rows."""


class Features:
    """The rows of an array as vectors.

    Parameters
    ----------
    source
        ``(q, ...)`` numbers. Rows are flattened; what is not float64 becomes float32.

    Raises
    ------
    InvalidParameter
        If it has no rows, or items that are no real numbers.
    """

    def __init__(self, source: Sliceable) -> None:
        shape, dtype = source.shape, np.dtype(source.dtype)
        if not shape or any(math.isnan(size) for size in shape) or math.prod(shape) == 0:
            raise InvalidParameter.of("features.shape", shape, "(n_samples, ...), none of them 0")
        if dtype.kind not in "fiub":
            raise InvalidParameter.of("features.dtype", str(dtype), "a dtype of real numbers")
        self._source = source
        self.n_samples = shape[0]
        self.width = math.prod(shape[1:])
        self.dtype = np.dtype(np.float64 if dtype == np.float64 else np.float32)

    def slabs(self, least: int, text: str, progress: Progress | None) -> Iterator[tuple[int, Floats]]:
        """``(first sample, (rows, width) floats)``, of at least ``least`` rows if there are so many.

        Raises
        ------
        InvalidParameter
            Naming the first sample that has a feature which is not finite.
        """
        rows = max(least, SLAB_NBYTES // (self.width * self.dtype.itemsize), 1)
        count = max(1, self.n_samples // rows)
        bounds = [self.n_samples * slab // count for slab in range(count + 1)]
        for start, stop in itertools.pairwise(bounds):
            slab = np.asarray(self._source[start:stop]).reshape(stop - start, -1).astype(self.dtype, copy=False)
            bad = ~np.isfinite(slab).all(axis=1)
            if bad.any():
                raise InvalidParameter.of(
                    f"features[{start + int(bad.argmax())}]",
                    "a sample with features that are not finite",
                    "finite",
                    f"There are {np.count_nonzero(bad)} such samples among {start} to {stop - 1}; drop or fill them.",
                )
            yield start, slab
            if progress is not None:
                progress(stop, self.n_samples, text)
