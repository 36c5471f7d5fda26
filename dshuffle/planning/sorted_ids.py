"""Positions of ids in sorted arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.types import Samples


def sorted_positions(sorted_ids: NDArray[np.int64], ids: NDArray[np.int64]) -> Samples:
    """``(k,)`` int64, the position of each of the ``(k,)`` ids in sorted ids without duplicates, or -1."""
    if not len(sorted_ids):
        return np.full(len(ids), -1, np.int64)
    positions = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return np.where(sorted_ids[positions] == ids, positions, -1)
