"""The sets of workers between which samples move: the holders of a needed sample, together with its destination."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.combinatorics import log_choose

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class HolderSets:
    """Distribution of the sets of the needed samples. All sets of one size are equally likely.

    Parameters
    ----------
    n_workers
        Number of workers.
    needed
        Number of samples to deliver.
    sizes, chances
        ``(s,)`` set sizes that occur, at least 2, and the fraction of needed samples with each.
    aligned
        Whether the assignment was drawn so that packets serve their whole sets.
    """

    n_workers: int
    needed: float
    sizes: Floats
    chances: Floats
    aligned: bool

    @classmethod
    def of(cls, n_workers: int, needed: float, *, held: float, excess: float, even: bool, aligned: bool) -> HolderSets:
        """Compute the distribution for caches.

        With ``uniform`` caching, the holders of a needed sample are its owner and each of the n - 2 workers other than
        owner and destination, with the probability of the excess. ``recent`` is treated in the same way, which
        predicts 4 to 7 % too many packets for a million samples. With ``even``, all samples have the same number of
        holders, or one of two consecutive numbers.

        Parameters
        ----------
        n_workers, needed, aligned
            As in the class.
        held
            Mean number of workers that hold a sample.
        excess
            Probability that a worker holds a sample outside its share.
        even
            Whether the caching policy is ``even``.

        Examples
        --------
        >>> HolderSets.of(4, 75.0, held=2.0, excess=1 / 3, even=True, aligned=False).sizes
        array([3.])
        """
        if even:
            held = max(1.0, held)
            sizes = math.floor(held) + np.array([1.0, 2.0])
            chances = np.array([1 - held % 1, held % 1])
        else:
            sizes = np.arange(2.0, n_workers + 1)
            chances = _binomial(n_workers - 2, excess)
        likely = (chances > 1e-12) & (sizes <= n_workers)
        return cls(n_workers, needed, sizes[likely], chances[likely] / chances[likely].sum(), aligned)

    @property
    def excess(self) -> bool:
        """Whether samples have holders other than their owner."""
        return bool(self.sizes[-1] > 2)

    @property
    def bound(self) -> float:
        """Expected lower bound on packets for any code; see :func:`~dshuffle.planning.bounds.average_lower_bound`."""
        return float(self.needed * (self.chances / self.sizes).sum())

    @property
    def occupancy(self) -> Floats:
        """``(s,)`` logarithm of the expected number of samples per set and destination, for each set size."""
        ways = np.array([log_choose(self.n_workers, size) for size in self.sizes.tolist()])
        logs: Floats = math.log(self.needed) + np.log(self.chances) - ways - np.log(self.sizes)
        return logs

    @property
    def largest(self) -> float:
        """Largest number k such that each of k workers can expect one needed sample that the k - 1 others hold.

        A worker needs ``needed / n`` samples. A sample with h holders covers ``choose(h, k - 1)`` of the
        ``choose(n - 1, k - 1)`` sets of k - 1 other workers.
        """
        low, high = 1.0, float(self.sizes[-1])
        if self._common(high) > 0:
            return high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self._common(middle) > 0 else (low, middle)
        return low

    def _common(self, size: float) -> float:
        holders = self.sizes - 1
        fits = holders >= size - 1
        subsets = np.array([log_choose(h, size - 1) for h in holders[fits].tolist()])
        most = float(subsets.max())
        expected = most + math.log(float((self.chances[fits] * np.exp(subsets - most)).sum()))
        return math.log(self.needed / self.n_workers) + expected - log_choose(self.n_workers - 1, size - 1)


def _binomial(count: int, chance: float) -> Floats:
    """Return the ``(count + 1,)`` binomial probabilities of 0 to ``count`` successes."""
    if chance in (0.0, 1.0):
        certain = np.zeros(count + 1)
        certain[0 if chance == 0.0 else -1] = 1.0
        return certain
    k = np.arange(count + 1)
    ways = np.array([log_choose(count, i) for i in k.tolist()])
    probabilities: Floats = np.exp(ways + k * math.log(chance) + (count - k) * math.log1p(-chance))
    return probabilities
