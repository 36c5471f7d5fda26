"""Bounds from the papers on the number of packets, and a lower bound for a given shuffle.

Rates are in packets per epoch. A packet is as large as one row.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer, as_shape
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.epoch_plan import missing_samples
from dshuffle.planning.randomness import log_choose
from dshuffle.planning.types import as_instance

MOST_WORKERS = 20
"""Maximum number of workers for :func:`lower_bound`."""


def coded_rate(n_samples: int, n_workers: int, capacity: int) -> float:
    """Number of packets of ``coded`` for uniformly random caches, in the limit of many samples."""
    # A needed sample with h holders counts ``1 / (h + 1)``. For such caches no code needs fewer packets on average, for
    # any number of samples. Caches of later epochs may allow fewer.
    # Chung et al. (2017), Theorem 2; see docs/papers.md. We use the sum from its proof, which has no pole for caches
    # without excess.
    n_samples, n_workers = as_shape(n_samples, n_workers)
    capacity = _as_capacity(capacity, n_samples, n_workers)
    if n_workers == 1:
        return 0.0
    share = n_samples / n_workers
    p = max(0.0, (capacity - share) / (n_samples - share))
    if p == 0:
        return share / n_workers * math.comb(n_workers, 2)
    if p == 1:
        return 0.0
    # Use logarithms: with a thousand workers the number of sets overflows a float.
    logs = (
        log_choose(n_workers, size) + (size - 2) * math.log(p) + (n_workers - size + 1) * math.log1p(-p)
        for size in range(2, n_workers + 1)
    )
    return share / n_workers * math.fsum((size - 1) * math.exp(log) for size, log in enumerate(logs, start=2))


def lower_bound(holders: ArrayLike, destinations: ArrayLike, n_workers: int) -> int:
    """Lower bound on the packets of any code, linear or not, for this shuffle."""
    # Take the workers in some order. Count the needed samples that neither their destination nor a worker before it
    # holds. Give every worker the packets and the samples that are not counted. The first worker knows no counted
    # sample, so it decodes its counted samples from the packets. The second worker knows at most the counted samples
    # that the first has decoded, and so on. There are therefore at least as many packets as counted samples. The bound
    # is the maximum of this count over all orders.
    # Attia and Tandon (2016), Theorem 2; see docs/papers.md. We extend it to caches with excess. The maximum over the
    # orders is found by dynamic programming over the sets of workers that come first, after a subset-sum transform of
    # the holder sets.
    # holders: ``(q, 1)`` or ``(q,)`` integer masks of the workers that hold each sample.
    # destinations: ``(q,)`` integers, the worker that trains on each sample.
    masks, ranks = as_instance(holders, destinations, n_workers)
    if n_workers > MOST_WORKERS:
        raise InvalidParameter.of("n_workers", n_workers, f"at most {MOST_WORKERS}")
    return int(_most_over_orders(masks, ranks, missing_samples(masks, ranks), n_workers))


def _as_capacity(capacity: int, n_samples: int, n_workers: int) -> int:
    capacity = as_integer("capacity", capacity, 1)
    if not n_samples <= capacity * n_workers or capacity > n_samples:
        raise InvalidParameter.of("capacity", capacity, f"in [{-(-n_samples // n_workers)}, {n_samples}] samples")
    return capacity


@kernel("(u8[:,::1], i4[::1], i8[::1], i8)")
def _most_over_orders(holders, destinations, needed, n_workers):  # type: ignore[no-untyped-def]
    # counts[T, i]: samples that worker i needs and whose holders are T; after the transform, a subset of T.
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
            # The worker comes last among those in `first`.
            if first >> worker & 1:
                count = most[first ^ 1 << worker] + counts[everyone ^ first, worker]
                most[first] = max(most[first], count)
    return most[everyone]
