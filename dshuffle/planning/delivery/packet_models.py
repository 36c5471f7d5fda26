"""Expected number of packets of a coded delivery, without making a plan.

The *set* of a needed sample is its holders together with its destination. If every set has many samples, each packet
serves all members of its set, and the number of packets per sample is the mean of 1 / (set size), which no code can
improve. If there are many sets and few samples, packets serve fewer workers.

References
----------
Chung et al. (2017), Algorithms 1 and 2 (``coded``), and Attia and Tandon (2016), Theorem 1 (``leftover``); see
docs/papers.md. The fits for ``clique``, ``ubershuffle`` and aligned assignments are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dshuffle.planning.combinatorics import log_choose
from dshuffle.planning.delivery.holder_sets import Floats, HolderSets

MANY = 1e6


@dataclass(frozen=True, slots=True)
class PacketModel:
    """How the cost model estimates the packets of a coded delivery.

    Parameters
    ----------
    without_excess
        The formula for caches without excess.
    fit, aligned_fit
        Coefficients of the regression for caches with excess, and for ``aligned`` assignments; None if
        :func:`packets_of_tables` is exact.
    at_least
        The model of a delivery that never needs more packets.
    """

    without_excess: Callable[[HolderSets], float]
    fit: tuple[float, ...] | None = None
    aligned_fit: tuple[float, ...] | None = None
    at_least: PacketModel | None = None

    def packets(self, sets: HolderSets) -> float:
        """Expected number of packets (P in docs/design.md, "Predicting")."""
        if not sets.excess:
            packets, least = self.without_excess(sets), 0.0
        else:
            least = sets.bound if self.at_least is None else self.at_least.packets(sets)
            fit = self.aligned_fit if sets.aligned else self.fit
            packets = packets_of_tables(sets) if fit is None else _fitted(fit, sets)
        return min(max(packets, least), sets.needed)


def _fitted(fit: tuple[float, ...], sets: HolderSets) -> float:
    """A least-squares fit of log(packets / bound), linear in :func:`features`.

    tests/benchmarks/packet_fits.py computes each fit from 384 to 459 real plans with n in [3, 512], alpha in
    [1.2/n, 0.8] and q in [30 n, 1e6]. The median error is 2 % for ``clique`` and 3 % for the others. 95 % of the plans
    are within 8 % (``clique``), 11 % (``clique`` on aligned), 15 % (``ubershuffle``) and 37 % (``coded`` and
    ``ubershuffle`` on aligned).
    """
    return sets.bound * math.exp(max(0.0, float(features(sets) @ np.array(fit))))


def features(sets: HolderSets) -> Floats:
    """Compute the ``(10,)`` features of the linear fits.

    The features are t times products of at most two of three quantities: t (how empty the sets are), a (logarithm of
    the gain at the bound), and b (how far this gain exceeds the gain of the largest likely packets). They vanish if
    every set has many samples, so that packets reach the bound.
    """
    emptiness = float(np.logaddexp(0.0, -(sets.chances * sets.occupancy).sum() / 2))
    t = emptiness / (1 + emptiness)
    gain = sets.needed / sets.bound
    a, b = math.log(gain), math.log1p((gain / sets.largest) ** 2)
    return t * np.array([1, t, a, b, t * t, t * a, t * b, a * a, a * b, b * b])


def packets_of_tables(sets: HolderSets) -> float:
    """Expected packets if each set has one column of samples per member and sends a packet per row of the longest."""
    total = 0.0
    for size, occupancy in zip(sets.sizes.tolist(), sets.occupancy.tolist(), strict=True):
        total += math.exp(log_choose(sets.n_workers, size) + _log_longest(math.exp(occupancy), size))
    return total


def _log_longest(mean: float, count: float) -> float:
    """Logarithm of the expected maximum of ``count`` independent Poisson variables."""
    if mean < 1e-6:
        return math.log(mean * count)  # at most one variable is 1, the others are 0
    if mean > MANY:  # nearly normal: the maximum is a fixed number of standard deviations above the mean
        above = (math.exp(_log_longest(MANY, count)) - MANY) / math.sqrt(MANY)
        return math.log(mean + above * math.sqrt(mean))
    least = max(0, math.floor(mean - 10 * math.sqrt(mean) - 30))
    values = np.arange(least, math.ceil(mean + 10 * math.sqrt(mean) + 30) + 1)
    logs = np.zeros(len(values))
    logs[1:] = np.cumsum(math.log(mean) - np.log(values[1:]))
    logs += -mean + least * math.log(mean) - math.lgamma(least + 1)
    below = np.cumsum(np.exp(logs))
    return math.log(least - float(np.expm1(count * np.log(np.minimum(below, 1.0))).sum()))


def packets_of_leftover(sets: HolderSets) -> float:
    """Expected packets of ``leftover`` for a shuffle matrix of Poisson counts.

    Each pair of workers sends the larger of its two counts. The leftovers of the worker that has the most of them are
    saved. Their number is estimated as the maximum of n normal variables.
    """
    n = sets.n_workers
    mean = sets.needed / (n * (n - 1))
    longer = math.exp(_log_longest(mean, 2))
    left = longer - mean  # half of |X - Y|, on average
    spread = math.sqrt(max(0.0, mean / 2 - left**2)) * math.sqrt((n - 1) * 2 * math.log(n))
    pairs = n * (n - 1) / 2 * longer
    return max(pairs - (n - 1) * left - spread, sets.bound)


def packets_of_cycles(sets: HolderSets) -> float:
    """Expected packets of ``clique`` without excess, within 2 % of real plans from 3 to 30 workers.

    Workers exchange samples in pairs where possible, and most of the rest in cycles of three, which take two packets.
    """
    longer = packets_of_tables(sets)
    shorter = sets.needed - longer
    return shorter + 2 / 3 * (longer - shorter)
