"""What the papers prove about the number of packets, and a lower bound for every single shuffle.

Rates are in packets an epoch, each as large as one row.
"""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Real

import numba
import numpy as np
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer, as_ranks, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.leftover import as_matrix, leftover_matrix
from dshuffle.planning.grouping import count_holders
from dshuffle.planning.holders import as_holders
from dshuffle.planning.plan import missing_samples
from dshuffle.planning.types import Holders, Ranks

MOST_WORKERS = 20
"""The most workers whose orders :func:`lower_bound` goes through."""


def uncoded_rate(n_samples: int, capacity: int) -> float:
    """Packets without coding, on average over the assignments: ``q - s`` for caches of s samples.

    References
    ----------
    Paper 000, Theorem 1 (equation 1).

    Examples
    --------
    >>> uncoded_rate(1000, 100)
    900.0
    """
    n_samples = as_integer("n_samples", n_samples, 1)
    return float(n_samples - _as_capacity(capacity, n_samples, n_samples))


def coded_rate(n_samples: int, n_workers: int, capacity: int) -> float:
    """Packets of ``coded`` in the limit of many samples, for uniformly random caches.

    It is also a lower bound, on average, for every code and any number of samples: it is the mean of
    :func:`average_lower_bound`.

    References
    ----------
    Paper 000, Theorem 2; the sum in its proof, which has no pole at caches without excess.

    Examples
    --------
    >>> round(coded_rate(100_000, 20, 20_000))
    18494
    """
    n_samples, n_workers = _as_shape(n_samples, n_workers)
    capacity = _as_capacity(capacity, n_samples, n_workers)
    if n_workers == 1:
        return 0.0
    share = n_samples / n_workers
    p = max(0.0, (capacity - share) / (n_samples - share))
    if p == 0:
        return share / n_workers * math.comb(n_workers, 2)
    if p == 1:
        return 0.0
    # In logarithms: with a thousand workers there are more sets than a float can count.
    logs = (
        _log_factorial(Fraction(n_workers))
        - _log_factorial(Fraction(size))
        - _log_factorial(Fraction(n_workers - size))
        + (size - 2) * math.log(p)
        + (n_workers - size + 1) * math.log1p(-p)
        for size in range(2, n_workers + 1)
    )
    return share / n_workers * math.fsum((size - 1) * math.exp(log) for size, log in enumerate(logs, start=2))


def uncoded_seconds(n_samples: int, cache_fraction: float, rows_per_second: float) -> float:
    """Time of a shuffle without coding from one server that sends so many rows a second.

    References
    ----------
    Paper 000, corollary 3.
    """
    n_samples = as_integer("n_samples", n_samples, 1)
    alpha = as_ratio("cache_fraction", cache_fraction, Fraction(1, n_samples))
    return n_samples * float(1 - alpha) / _as_speed(rows_per_second)


def broadcast_seconds(n_samples: int, n_workers: int, cache_fraction: float, rows_per_second: float) -> float:
    """Time of ``coded`` for very many samples, if all workers hear whatever the server sends.

    It is :func:`uncoded_seconds` over ``alpha * n``.

    References
    ----------
    Paper 000, corollary 3.

    Examples
    --------
    >>> broadcast_seconds(100_000, 20, 0.2, 1000), uncoded_seconds(100_000, 0.2, 1000)
    (20.0, 80.0)
    """
    n_samples, n_workers = _as_shape(n_samples, n_workers)
    alpha = as_ratio("cache_fraction", cache_fraction, Fraction(1, n_workers))
    return n_samples * float((1 - alpha) / (alpha * n_workers)) / _as_speed(rows_per_second)


def multicast_seconds(n_samples: int, n_workers: int, cache_fraction: float, rows_per_second: float) -> float:
    """Time of ``coded`` for very many samples over unicast links: every packet is scattered, then sent round a ring.

    It is ``(2 n - 1) / n`` times :func:`broadcast_seconds`.

    References
    ----------
    Paper 000, Theorem 4 (equation 2) and corollary 5.

    Examples
    --------
    >>> multicast_seconds(100_000, 20, 0.2, 1000)
    39.0
    """
    seconds = broadcast_seconds(n_samples, n_workers, cache_fraction, rows_per_second)
    return seconds * (2 * n_workers - 1) / n_workers


def leftover_rate(shuffle: ArrayLike) -> int:
    """Packets of ``leftover`` for a shuffle matrix in which as many samples leave every worker as come in.

    References
    ----------
    Paper 001, Theorem 1 (equation 20).

    Raises
    ------
    InvalidParameter
        If a worker's share has another size after the shuffle.

    Examples
    --------
    >>> leftover_rate([[2, 1, 2], [2, 1, 2], [1, 3, 1]])
    6
    """
    matrix = as_matrix("shuffle", shuffle)
    before, after = matrix.sum(axis=1), matrix.sum(axis=0)
    if (changed := np.flatnonzero(before != after)).size:
        worker = int(changed[0])
        raise InvalidParameter.of(
            f"shuffle[:, {worker}].sum()",
            int(after[worker]),
            f"{before[worker]}, the sum of its row",
            "The theorem is about workers whose shares keep their sizes.",
        )
    pairs = np.triu(np.maximum(matrix, matrix.T), k=1).sum()
    return int(pairs - leftover_matrix(matrix).sum(axis=1).max())


def leftover_lower_bound(shuffle: ArrayLike) -> int:
    """Packets that every code needs for a shuffle matrix: the most over all orders of at most 20 workers.

    It is :func:`lower_bound` for caches without excess.

    References
    ----------
    Paper 001, Theorem 2 (equation 21).

    Examples
    --------
    >>> leftover_lower_bound([[2, 1, 2], [2, 1, 2], [1, 3, 1]])
    6
    """
    matrix = as_matrix("shuffle", shuffle)
    n = len(matrix)
    arcs = np.repeat(np.arange(n * n), matrix.ravel())
    owners, destinations = np.divmod(arcs, n)
    return lower_bound(np.uint64(1) << owners.astype(np.uint64), destinations, n)


def worst_case_rate(n_samples: int, n_workers: int) -> float:
    """Packets for the worst shuffle without excess: no code needs fewer, and ``leftover`` needs no more for any.

    References
    ----------
    Paper 001, Theorem 3 (equation 22).

    Examples
    --------
    >>> worst_case_rate(100, 4)
    75.0
    """
    n_samples, n_workers = _as_shape(n_samples, n_workers)
    return n_samples * (n_workers - 1) / n_workers


def worst_case_shuffle(n_samples: int, n_workers: int) -> tuple[Ranks, Ranks]:
    """``(owners, destinations)`` of the shuffle in which every worker passes its whole share on to the next one.

    Parameters
    ----------
    n_samples
        A multiple of the workers, which have equal shares.

    References
    ----------
    Paper 001, equation 49, with the workers in order of rank. The equation leaves out that the last worker's
    share goes to the first one, which follows because shares keep their sizes.

    Examples
    --------
    >>> worst_case_shuffle(6, 3)
    (array([0, 0, 1, 1, 2, 2], dtype=int32), array([1, 1, 2, 2, 0, 0], dtype=int32))
    """
    n_samples, n_workers = _as_shape(n_samples, n_workers)
    if n_samples % n_workers:
        raise InvalidParameter.of("n_samples", n_samples, f"a multiple of the {n_workers} workers")
    owners = np.repeat(np.arange(n_workers, dtype=np.int32), n_samples // n_workers)
    return owners, (owners + np.int32(1)) % np.int32(n_workers)


def lower_bound(holders: ArrayLike, destinations: ArrayLike, n_workers: int) -> int:
    """Packets that every code needs for this very shuffle, linear or not.

    Take the workers in some order and count the needed samples that neither a worker before their destination nor
    the destination holds. Give everyone the other samples and the packets. The first worker then knows nothing
    that counts, so it finds its counted samples in the packets; the second one knows at most what the first has
    found, and so on. So there are at least as many packets, and this is the most over all orders.

    Parameters
    ----------
    holders
        ``(q, 1)`` or ``(q,)`` integer masks.
    destinations
        ``(q,)`` integers.
    n_workers
        At most 20, for which it takes half a second.

    References
    ----------
    Paper 001, Theorem 2, extended to caches with excess. The maximum over the orders is found by a dynamic
    programme over the sets of workers that stand first, after a subset-sum transform of the holder sets.

    Examples
    --------
    >>> lower_bound([0b010, 0b100, 0b001], [0, 1, 2], 3)
    2
    """
    masks, ranks = _as_instance(holders, destinations, n_workers)
    if n_workers > MOST_WORKERS:
        raise InvalidParameter.of(
            "n_workers", n_workers, f"at most {MOST_WORKERS} for all their orders", "Use average_lower_bound."
        )
    return int(_most_over_orders(masks, ranks, missing_samples(masks, ranks), n_workers))


def average_lower_bound(holders: ArrayLike, destinations: ArrayLike, n_workers: int) -> float:
    """The mean, over all orders of the workers, of what :func:`lower_bound` takes the most of.

    A needed sample with h holders counts if its destination comes first among the h + 1 workers, so it is the sum
    of ``1 / (h + 1)``. For any number of workers.

    Examples
    --------
    >>> average_lower_bound([0b010, 0b100, 0b001], [0, 1, 2], 3)
    1.5
    """
    masks, ranks = _as_instance(holders, destinations, n_workers)
    counts = _count_by_holders(masks, missing_samples(masks, ranks), n_workers)
    return math.fsum((counts / np.arange(1, n_workers + 2)).tolist())


def shuffling_error(n_samples: int, n_workers: int, fraction: float) -> float:
    """How far the orders after one partial exchange are from uniform: 0 for not at all, 1 for entirely.

    It is ``1 - sigma / q!`` for sigma orders that the exchange can lead to, counted as paper 004 does.

    Parameters
    ----------
    fraction
        Q in [0, 1], the part of every worker's share that it exchanges.

    References
    ----------
    Paper 004, equations 8 to 11, in logarithms. Its sigma counts an order several times if different exchanges lead
    to it and comes to more than q! for large Q; the absolute value in equation 10 then makes the error 0, which
    equation 11 no longer says.

    Examples
    --------
    >>> round(shuffling_error(6, 3, 0.5), 9), shuffling_error(1_200_000, 100_000, 0.1)
    (0.466666667, 1.0)
    """
    n_samples, n_workers = _as_shape(n_samples, n_workers)
    exchanged = as_ratio("fraction", fraction, Fraction(0)) * n_samples / n_workers
    share = Fraction(n_samples, n_workers)
    rest = n_samples - share
    if exchanged > rest:
        raise InvalidParameter.of("fraction", fraction, "0 for a single worker, which has nobody to exchange with")
    # Equation 9, factor by factor; lgamma(x + 1) is log(x!).
    orders = (
        _log_factorial(share)
        + (_log_factorial(rest) - _log_factorial(rest - exchanged))
        + (_log_factorial(share) - _log_factorial(share - exchanged))
        + _log_factorial(rest)
    )
    return -math.expm1(min(0.0, orders - _log_factorial(Fraction(n_samples))))


def _log_factorial(number: Fraction) -> float:
    return math.lgamma(float(number) + 1)


def _as_shape(n_samples: int, n_workers: int) -> tuple[int, int]:
    n_workers = as_integer("n_workers", n_workers, 1)
    return as_integer("n_samples", n_samples, n_workers, "There are fewer samples than workers."), n_workers


def _as_capacity(capacity: int, n_samples: int, n_workers: int) -> int:
    capacity = as_integer("capacity", capacity, 1)
    if not n_samples <= capacity * n_workers or capacity > n_samples:
        raise InvalidParameter.of("capacity", capacity, f"in [{-(-n_samples // n_workers)}, {n_samples}] samples")
    return capacity


def _as_speed(rows_per_second: object) -> float:
    if not isinstance(rows_per_second, Real) or not 0 < float(rows_per_second) < math.inf:
        raise InvalidParameter.of("rows_per_second", rows_per_second, "a finite number above 0")
    return float(rows_per_second)


def _as_instance(holders: ArrayLike, destinations: ArrayLike, n_workers: int) -> tuple[Holders, Ranks]:
    n_workers = as_integer("n_workers", n_workers, 1)
    masks = as_holders(holders, n_workers)
    ranks = as_ranks("destinations", destinations, n_workers)
    if len(masks) != len(ranks):
        raise InvalidParameter.of("destinations.shape", ranks.shape, f"({len(masks)},), as holders has")
    return masks, ranks


@numba.njit(nogil=True, cache=True)
def _count_by_holders(holders, needed, n_workers):  # type: ignore[no-untyped-def]
    counts = np.zeros(n_workers + 1, dtype=np.int64)
    for sample in needed:
        counts[count_holders(holders, sample)] += 1
    return counts


@numba.njit(nogil=True, cache=True)
def _most_over_orders(holders, destinations, needed, n_workers):  # type: ignore[no-untyped-def]
    # counts[T, i]: samples that worker i needs and whose holders are T; then, all within T.
    counts = np.zeros((1 << n_workers, n_workers), dtype=np.int32)
    for sample in needed:
        counts[np.int64(holders[sample, 0]), destinations[sample]] += 1
    for bit in range(n_workers):
        for held in range(1 << n_workers):
            if held >> bit & 1:
                for worker in range(n_workers):
                    counts[held, worker] += counts[held ^ 1 << bit, worker]
    everyone = (1 << n_workers) - 1
    most = np.zeros(1 << n_workers, dtype=np.int64)
    for first in range(1, 1 << n_workers):
        for worker in range(n_workers):
            # The last of those that stand first.
            if first >> worker & 1:
                count = most[first ^ 1 << worker] + counts[everyone ^ first, worker]
                most[first] = max(most[first], count)
    return most[everyone]
