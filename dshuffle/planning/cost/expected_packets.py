"""How many packets a coded delivery needs on average, without making them.

What counts is how many samples share a *set*: a needed sample's holders together with its destination. Where every set
has many samples, all of its members get one out of each packet, and no code does better than the mean of one over the
set's size. Where sets are many and samples few, packets stay incomplete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning.cost.job import Work

Floats = NDArray[np.float64]
MANY = 1e6


@dataclass(frozen=True, slots=True, eq=False)
class HolderSets:
    """How the sets of the needed samples are distributed, all sets of one size being equally likely.

    Parameters
    ----------
    n_workers
        Workers.
    needed
        Samples that have to be delivered.
    sizes, chances
        ``(s,)`` sizes of sets that occur, from 2 on, and the part of the needed samples in each.
    aligned
        Whether the assignment was drawn so that packets come out perfect.
    """

    n_workers: int
    needed: float
    sizes: Floats
    chances: Floats
    aligned: bool

    @classmethod
    def of(cls, work: Work, n_workers: int, needed: float) -> HolderSets:
        """The sets of a work's samples.

        With ``uniform`` caching a needed sample has its owner, and each of the n - 2 others but the destination
        with the probability of the excess. ``recent`` is taken to be alike, which is 4 to 7 % too many packets at
        a million samples. With ``even`` all samples have as many holders, or two numbers that follow each other.
        """
        if work.caching == "even":
            held = max(1.0, work.alpha(n_workers) * n_workers)
            sizes = math.floor(held) + np.array([1.0, 2.0])
            chances = np.array([1 - held % 1, held % 1])
        else:
            sizes = np.arange(2.0, n_workers + 1)
            chances = _binomial(n_workers - 2, work.excess(n_workers))
        some = (chances > 1e-12) & (sizes <= n_workers)
        aligned = work.kind == "aligned" and work.caching == "even"
        return cls(n_workers, needed, sizes[some], chances[some] / chances[some].sum(), aligned)

    @property
    def excess(self) -> bool:
        """Whether samples have holders beside their owner."""
        return bool(self.sizes[-1] > 2)

    @property
    def bound(self) -> float:
        """The fewest packets of any code, on average: see :func:`~dshuffle.planning.bounds.average_lower_bound`."""
        return float(self.needed * (self.chances / self.sizes).sum())

    @property
    def occupancy(self) -> Floats:
        """``(s,)`` logarithm of the samples of one set and destination, size by size."""
        ways = np.array([_log_choose(self.n_workers, size) for size in self.sizes.tolist()])
        logs: Floats = math.log(self.needed) + np.log(self.chances) - ways - np.log(self.sizes)
        return logs

    @property
    def largest(self) -> float:
        """Largest number of workers k of which each can expect one sample that the k - 1 others all hold.

        A worker's samples are ``needed / n``; h holders have ``choose(h, k - 1)`` sets of k - 1 among them, of the
        ``choose(n - 1, k - 1)`` that there are.
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
        subsets = np.array([_log_choose(h, size - 1) for h in holders[fits].tolist()])
        most = float(subsets.max())
        expected = most + math.log(float((self.chances[fits] * np.exp(subsets - most)).sum()))
        return math.log(self.needed / self.n_workers) + expected - _log_choose(self.n_workers - 1, size - 1)


def expected_packets(delivery: str, sets: HolderSets) -> float:
    """Packets of a delivery (P of DESIGN's table), on average.

    ``coded`` and ``leftover`` are computed, and all deliveries for caches without excess; with it ``clique`` and
    ``ubershuffle``, and all on an ``aligned`` assignment, are fitted to real plans, for no formula is known: see
    :data:`FITS`.

    References
    ----------
    Paper 000, Algorithms 1 and 2 (``coded``: the packets of a set are the longest column of its table); paper 001,
    Theorem 1 (``leftover``).

    Examples
    --------
    >>> work = Work(100_000, 1024, cache_fraction=0.2)
    >>> round(expected_packets("coded", HolderSets.of(work, 20, 80_000)), -2)  # a real plan: 54,386
    54400.0
    """
    if sets.needed <= 0 or sets.n_workers == 1:
        return max(0.0, sets.needed)
    if not sets.excess:
        packets = {"clique": _cycles, "leftover": _leftover}.get(delivery, _tables)(sets)
    elif delivery == "coded" and not sets.aligned:
        packets = _tables(sets)
    elif (fit := FITS.get((delivery, sets.aligned))) is not None:
        packets = sets.bound * math.exp(max(0.0, float(features(sets) @ np.array(fit))))
    else:
        hint = "With a cache fraction above 1/n use 'clique' or 'ubershuffle'."
        raise InvalidParameter.of("delivery", delivery, "one of 'clique', 'coded', 'ubershuffle'", hint)
    least = sets.bound if sets.excess else 0.0
    if delivery == "ubershuffle" and sets.excess:
        least = expected_packets("clique", sets)  # which never needs more
    return min(max(packets, least), sets.needed)


FITS: dict[tuple[str, bool], tuple[float, ...]] = {
    ("clique", False): (-0.1817, 0.06143, 0.09739, 1.208, -0.5482, 0.3255, -0.5612, -0.03038, -0.07387, 0.0003775),
    ("ubershuffle", False): (0.1296, -4.56, -0.6339, 5.266, 4.591, 2.657, -6.415, -0.08262, -0.09047, 0.166),
    ("clique", True): (-1.227, 0.3048, 0.3119, 1.755, 0.6113, -0.006008, -1.225, -0.03952, -0.01757, -0.01444),
    ("coded", True): (-4.875, 3.398, 1.629, 4.61, 1.627, 1.291, -6.965, -0.2196, -0.1657, 0.4642),
    ("ubershuffle", True): (-4.5, 1.342, 0.9443, 6.206, 2.944, 2.558, -9.004, -0.3057, -0.138, 0.5034),
}
"""Least-squares fits of log(packets / bound): (delivery, aligned) -> coefficients, linear in :func:`features`.

Made by tests/benchmarks/packet_fits.py from 384 to 459 real plans each, of n in [3, 512], alpha in [1.2/n, 0.8] and q
in [30 n, 1e6]. Half of the plans are within 2 % (``clique``) and 3 % (the others) of their fit; 95 in 100 are within
8 % (``clique``), 11 % (``clique`` on aligned), 15 % (``ubershuffle``), 37 % (``coded``, ``ubershuffle`` on aligned).
"""


def features(sets: HolderSets) -> Floats:
    """``(10,)`` what the fits are linear in.

    All vanish where every set has many samples, and with them the logarithm; beside that they are products of at
    most two of t (how empty sets are), the logarithm of the bound's gain, and how far that is beyond what the
    largest likely packets gain.
    """
    emptiness = float(np.logaddexp(0.0, -(sets.chances * sets.occupancy).sum() / 2))
    t = emptiness / (1 + emptiness)
    gain = sets.needed / sets.bound
    a, b = math.log(gain), math.log1p((gain / sets.largest) ** 2)
    return t * np.array([1, t, a, b, t * t, t * a, t * b, a * a, a * b, b * b])


def _tables(sets: HolderSets) -> float:
    """Every set has one column of samples for each member, and as many packets as the longest has samples."""
    total = 0.0
    for size, occupancy in zip(sets.sizes.tolist(), sets.occupancy.tolist(), strict=True):
        total += math.exp(_log_choose(sets.n_workers, size) + _log_longest(math.exp(occupancy), size))
    return total


def _log_longest(mean: float, count: float) -> float:
    """Logarithm of the expected maximum of so many independent Poisson variables."""
    if mean < 1e-6:
        return math.log(mean * count)  # at most one of them is 1
    if mean > MANY:  # normal variables: the maximum is some standard deviations above the mean
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
    """Theorem 1 of paper 001 for a shuffle matrix of Poisson counts.

    Of each pair of workers the larger count is sent, less the leftovers of the worker that has the most of them, which
    is about as many standard deviations above the mean as the largest of n normal variables.
    """
    n = sets.n_workers
    mean = sets.needed / (n * (n - 1))
    longer = math.exp(_log_longest(mean, 2))
    left = longer - mean  # half of |X - Y|, on average
    spread = math.sqrt(max(0.0, mean / 2 - left**2)) * math.sqrt((n - 1) * 2 * math.log(n))
    pairs = n * (n - 1) / 2 * longer
    return max(pairs - (n - 1) * left - spread, sets.bound)


def _cycles(sets: HolderSets) -> float:
    """Pairs of workers exchange what they can in pairs, and most of what is left in cycles of three: two packets each.

    It is within 2 % of the plans of ``clique`` from 3 to 30 workers.
    """
    longer = _tables(sets)
    shorter = sets.needed - longer
    return shorter + 2 / 3 * (longer - shorter)


def _binomial(count: int, chance: float) -> Floats:
    """``(count + 1,)`` probabilities of 0 to ``count`` successes."""
    if chance in (0.0, 1.0):
        certain = np.zeros(count + 1)
        certain[0 if chance == 0.0 else -1] = 1.0
        return certain
    k = np.arange(count + 1)
    ways = np.array([_log_choose(count, i) for i in k.tolist()])
    probabilities: Floats = np.exp(ways + k * math.log(chance) + (count - k) * math.log1p(-chance))
    return probabilities


def _log_choose(n: float, k: float) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
