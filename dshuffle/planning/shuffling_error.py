"""How far one partial exchange is from a uniformly random partition, as a total variation distance.

The partition says which worker has which samples. Workers mix their own samples, so the distance between the orders of
all samples is the distance between the partitions.

Count the samples that go from each worker to each other one. Samples are chosen at random, so partitions with the same
counts are equally probable, and the distance between the counts is the distance between the partitions.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import scipy

from dshuffle.checks import as_ratio, as_shape
from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment.rules import Partial


def log_factorial(n: float | Fraction) -> float:
    """Natural logarithm of n!, which may be that of a real number."""
    return math.lgamma(float(n) + 1)


MOST_SUMS = 100_000
"""Maximum number of sums of counts for one more round of an exchange; they take about a second."""

Counts = tuple[int, ...]
"""n * n numbers of samples, from each worker (rows) to each worker (columns)."""


class Distance(NamedTuple):
    """A total variation distance in [0, 1], or a lower bound on it."""

    value: float
    exact: bool  # Whether ``value`` is the distance.


def shuffling_error(n_samples: int, n_workers: int, fraction: float) -> Distance:
    """Total variation distance between the partition after one partial exchange and a uniformly random one.

    0 means that the exchange is as random as a new draw, and 1 that they have nothing in common. Before the exchange,
    every worker has a fixed share. In each of ``ceil(Q q / n)`` rounds, every worker sends one of its samples, drawn at
    random without replacement. A random permutation of the workers, drawn for each round, says where the samples go.

    It is exact for one or two workers, for Q = 0, and for few workers that exchange few samples (three workers and 18
    samples each, four and 4, eight and 1). Otherwise it is a lower bound.

    Notes
    -----
    The lower bound is the larger one of two. One is the distance between the numbers of samples that the first worker
    keeps. The other one uses the mean and the variance of the number of samples that all workers keep: for means that
    differ by d and variances v and w, the distance is at least ``d**2 / (d**2 + 2 * (v + w))``.

    The rounds are those of the paper. The exchanges of :class:`dshuffle.planning.Partial` have another distance,
    because it draws other permutations.

    References
    ----------
    Nguyen et al. (2022), Algorithm 1 and equation 7; see docs/papers.md. The second bound: Levin and Peres, Markov
    Chains and Mixing Times (2017), section 7.3.
    """
    n_samples, n_workers = as_shape(n_samples, n_workers)
    rounds = Partial(fraction).n_exchanged(n_samples, n_workers)
    shares = [(n_samples + n_workers - 1 - rank) // n_workers for rank in range(n_workers)]
    if rounds == 0:
        # Only one partition can result. A uniform draw could give any.
        logarithm = math.fsum(map(log_factorial, shares)) - log_factorial(n_samples)
        return Distance(max(0.0, -math.expm1(logarithm)), exact=True)
    first = _distance_of_first(shares, rounds)
    if n_workers == 2:
        # What one of two workers keeps says how many samples take each way.
        return Distance(first, exact=True)
    if (ways := _ways(n_workers, rounds)) is None:
        return Distance(max(first, _bound_by_moments(shares, rounds)), exact=False)
    total = ways.total()
    # Counts that cannot occur add nothing to a sum over the probabilities above those of the uniform draw.
    excess = math.fsum(max(0.0, n / total - _uniform_probability(shares, moved, rounds)) for moved, n in ways.items())
    return Distance(min(1.0, excess), exact=True)


def nguyen_equation_11(n_samples: int, n_workers: int, fraction: float) -> float:
    """Equation 11 of Nguyen et al., ``1 - sigma / q!``; for the distance itself see :func:`shuffling_error`.

    Sigma is a product of the choices of one worker that exchanges ``Q q / n`` samples with all others, whose samples
    may then be in any order (equations 8 and 9). There are three reasons why this is not the distance:

    * It counts an order several times if several choices lead to it. So it may exceed ``q!``, and the result is then
      negative, down to -inf. Equation 10 has an absolute value there, which equation 11 drops.
    * It lets the samples of all other workers move freely, but these workers keep samples, too.
    * It takes all orders that can occur as equally probable.

    References
    ----------
    Nguyen et al. (2022), equations 8 to 11, computed in logarithms; see docs/papers.md.
    """
    n_samples, n_workers = as_shape(n_samples, n_workers)
    share = Fraction(n_samples, n_workers)
    exchanged = as_ratio("fraction", fraction, Fraction(0)) * share
    rest = n_samples - share
    if exchanged > rest:
        raise InvalidParameter.of("fraction", fraction, "0 for a single worker, which cannot exchange samples")
    # Equation 9, factor by factor.
    orders = (
        log_factorial(share)
        + (log_factorial(rest) - log_factorial(rest - exchanged))
        + (log_factorial(share) - log_factorial(share - exchanged))
        + log_factorial(rest)
    )
    try:
        return -math.expm1(orders - log_factorial(n_samples))
    except OverflowError:
        return -math.inf


def _ways(n_workers: int, rounds: int) -> Counter[Counts] | None:
    """How many sequences of permutations lead to each count of moved samples; None if there are too many counts."""
    if math.factorial(min(n_workers, 20)) > MOST_SUMS:
        return None
    unit = np.eye(n_workers, dtype=int)
    permutations = [tuple(unit[list(order)].ravel().tolist()) for order in itertools.permutations(range(n_workers))]
    ways: Counter[Counts] = Counter({(0,) * n_workers**2: 1})
    for _ in range(rounds):
        if len(ways) * len(permutations) > MOST_SUMS:
            return None
        after: Counter[Counts] = Counter()
        for counts, n in ways.items():
            for permutation in permutations:
                after[tuple(map(operator.add, counts, permutation))] += n
        ways = after
    return ways


def _uniform_probability(shares: list[int], moved: Counts, rounds: int) -> float:
    """Probability that a uniform draw gives these counts, if samples that do not take part in a round are added."""
    n = len(shares)
    kept = [share - rounds for share in shares]
    cells = (count + (kept[i // n] if i // n == i % n else 0) for i, count in enumerate(moved))
    logs = 2 * math.fsum(map(log_factorial, shares)) - log_factorial(sum(shares)) - math.fsum(map(log_factorial, cells))
    return math.exp(logs)


def _distance_of_first(shares: list[int], rounds: int) -> float:
    """Distance between the numbers of samples that the first worker keeps."""
    share, q, n = shares[0], sum(shares), len(shares)
    mean, deviation = rounds / n, math.sqrt(rounds / n * (1 - 1 / n))
    # Samples that go out and come back in the same round. By Bernstein's inequality, the probability of others is
    # below 1e-17.
    width = math.ceil(10 * deviation + 50)
    returned = np.arange(max(0, math.floor(mean) - width), min(rounds, math.ceil(mean) + width) + 1)
    kept = share - rounds + returned
    probability = scipy.stats.binom.pmf
    after = probability(returned, rounds, 1 / n)
    # The hypergeometric distribution as binomial ones: scipy's own takes seconds for a billion samples.
    fraction = share / q
    uniform = probability(kept, share, fraction) * probability(share - kept, q - share, fraction)
    uniform /= probability(share, q, fraction)
    return min(1.0, float(np.maximum(after - uniform, 0).sum()))


def _bound_by_moments(shares: list[int], rounds: int) -> float:
    """Bound by the number of samples that all workers keep."""
    q, n = sum(shares), len(shares)
    squares = sum(share**2 for share in shares)
    # The mean number of ordered pairs of samples that are both kept: two of one worker, or of different ones.
    pairs = Fraction(
        sum((share * (share - 1)) ** 2 for share in shares) + squares**2 - sum(share**4 for share in shares),
        q * (q - 1),
    )
    uniform_mean = Fraction(squares, q)
    uniform_variance = pairs + uniform_mean - uniform_mean**2
    # A random permutation of at least two workers has one fixed point on average, with variance 1.
    difference = q - n * rounds + rounds - uniform_mean
    return float(difference**2 / (difference**2 + 2 * (uniform_variance + rounds)))
