"""How old the parameters were that gradients were computed from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Staleness:
    """Updates that others made between a worker's pull and its push.

    Parameters
    ----------
    counts
        ``(n_workers, most + 1)`` int64: pushes of each rank by their staleness. Where parameters are split over
        several servers, a push is as stale as at the server where it is the stalest.

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
        """Pushes of all ranks by staleness, from 0."""
        return tuple(self.counts.sum(axis=0).tolist())

    @property
    def pushes(self) -> int:
        """All of them."""
        return int(self.counts.sum())

    @property
    def pushes_by_rank(self) -> tuple[int, ...]:
        """How many each rank has made."""
        return tuple(self.counts.sum(axis=1).tolist())

    @property
    def most(self) -> int:
        """The largest staleness."""
        return int(np.flatnonzero(self.counts.any(axis=0)).max(initial=0))

    @property
    def mean(self) -> float:
        """Over all pushes."""
        return float(self.counts.sum(axis=0) @ np.arange(self.counts.shape[1]) / max(1, self.pushes))

    @property
    def mean_by_rank(self) -> tuple[float, ...]:
        """Over the pushes of each rank: those of slow workers are the stalest."""
        sums = self.counts @ np.arange(self.counts.shape[1])
        return tuple((sums / np.maximum(1, self.counts.sum(axis=1))).tolist())

    @classmethod
    def of(cls, pushes: list[list[int]]) -> Staleness:
        """From the staleness of every push of each rank."""
        most = max((value for own in pushes for value in own), default=0)
        return cls(np.stack([np.bincount(np.asarray(own, np.int64), minlength=most + 1) for own in pushes]))
