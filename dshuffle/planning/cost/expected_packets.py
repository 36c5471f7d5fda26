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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.combinatorics import log_choose
from dshuffle.planning.cost.job import Work
from dshuffle.planning.delivery import PacketModel, check_delivery, get_delivery

Floats = NDArray[np.float64]
MANY = 1e6


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
    def of(cls, work: Work, n_workers: int, needed: float) -> HolderSets:
        """Compute the distribution for a job.

        With ``uniform`` caching, the holders of a needed sample are its owner and each of the n - 2 workers other than
        owner and destination, with the probability of the excess. ``recent`` is treated in the same way, which
        predicts 4 to 7 % too many packets for a million samples. With ``even``, all samples have the same number of
        holders, or one of two consecutive numbers.
        """
        if work.choices.caching == "even":
            held = max(1.0, work.alpha(n_workers) * n_workers)
            sizes = math.floor(held) + np.array([1.0, 2.0])
            chances = np.array([1 - held % 1, held % 1])
        else:
            sizes = np.arange(2.0, n_workers + 1)
            chances = _binomial(n_workers - 2, work.excess(n_workers))
        some = (chances > 1e-12) & (sizes <= n_workers)
        assignment = work.choices.assignment
        aligned = assignment.needs_holders and work.choices.caching == assignment.preferred_caching
        return cls(n_workers, needed, sizes[some], chances[some] / chances[some].sum(), aligned)

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


def expected_packets(delivery: str, sets: HolderSets) -> float:
    """Expected number of packets of a delivery (P in docs/design.md, "Predicting").

    ``coded``, ``leftover`` and all deliveries for caches without excess are computed. For caches with excess, no
    formula is known for ``clique``, for ``ubershuffle``, or for any delivery of an ``aligned`` assignment. These are
    fitted to real plans; see :class:`~dshuffle.planning.delivery.PacketModel`.

    References
    ----------
    Chung et al. (2017), Algorithms 1 and 2 (``coded``: the packets of a set are the longest column of its table);
    Attia and Tandon (2016), Theorem 1 (``leftover``).

    Examples
    --------
    >>> from dshuffle.planning import Choices
    >>> work = Work(100_000, 1024, Choices(cache_fraction=0.2))
    >>> round(expected_packets("coded", HolderSets.of(work, 20, 80_000)), -2)  # a real plan: 54,386
    54400.0
    """
    found = get_delivery(delivery)
    if sets.needed <= 0 or sets.n_workers == 1 or found.packet_model is None:
        return max(0.0, sets.needed)
    check_delivery(delivery, sets.n_workers, excess=sets.excess)
    return _of_model(found.packet_model, sets)


def _of_model(model: PacketModel, sets: HolderSets) -> float:
    if not sets.excess:
        packets, least = _WITHOUT_EXCESS[model.without_excess](sets), 0.0
    else:
        least = sets.bound if model.at_least is None else _of_model(model.at_least, sets)
        fit = model.aligned_fit if sets.aligned else model.fit
        packets = _tables(sets) if fit is None else _fitted(fit, sets)
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


def _tables(sets: HolderSets) -> float:
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


def _leftover(sets: HolderSets) -> float:
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


def _cycles(sets: HolderSets) -> float:
    """Expected packets of ``clique`` without excess, within 2 % of real plans from 3 to 30 workers.

    Workers exchange samples in pairs where possible, and most of the rest in cycles of three, which take two packets.
    """
    longer = _tables(sets)
    shorter = sets.needed - longer
    return shorter + 2 / 3 * (longer - shorter)


_WITHOUT_EXCESS = {"tables": _tables, "cycles": _cycles, "leftover": _leftover}


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
