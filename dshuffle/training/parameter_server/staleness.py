"""Staleness of the parameters that gradients were computed from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Staleness:
    """Number of updates by other workers between a worker's pull and its push.

    Parameters
    ----------
    counts
        ``(n_workers, most + 1)`` int64, pushes of each rank by their staleness. If parameters are split over several
        servers, the staleness of a push is its largest staleness at any of them.

    Examples
    --------
    >>> staleness = Staleness(np.array([[2, 0, 2], [0, 4, 0]]))
    >>> staleness.pushes, staleness.most, staleness.mean
    (8, 2, 1.0)
    >>> staleness.mean_by_rank
    (1.0, 1.0)
    """

    counts: NDArray[np.int64]

    @property
    def histogram(self) -> tuple[int, ...]:
        """Number of pushes of all ranks by staleness, from 0."""
        return tuple(self.counts.sum(axis=0).tolist())

    @property
    def pushes(self) -> int:
        """Total number of pushes."""
        return int(self.counts.sum())

    @property
    def pushes_by_rank(self) -> tuple[int, ...]:
        """Number of pushes of each rank."""
        return tuple(self.counts.sum(axis=1).tolist())

    @property
    def most(self) -> int:
        """Largest staleness."""
        return int(np.flatnonzero(self.counts.any(axis=0)).max(initial=0))

    @property
    def mean(self) -> float:
        """Mean staleness over all pushes."""
        return float(self.counts.sum(axis=0) @ np.arange(self.counts.shape[1]) / max(1, self.pushes))

    @property
    def mean_by_rank(self) -> tuple[float, ...]:
        """Mean staleness over the pushes of each rank. Slow workers make the stalest pushes."""
        sums = self.counts @ np.arange(self.counts.shape[1])
        return tuple((sums / np.maximum(1, self.counts.sum(axis=1))).tolist())

    @classmethod
    def of(cls, pushes: list[list[int]]) -> Staleness:
        """Count the pushes of each rank by staleness, from the staleness of every push."""
        most = max((value for own in pushes for value in own), default=0)
        return cls(np.stack([np.bincount(np.asarray(own, np.int64), minlength=most + 1) for own in pushes]))
