"""A lower bound on the packets of any code, and the matrix of a shuffle, from Attia and Tandon (2016)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def shuffle_matrix(owners: ArrayLike, destinations: ArrayLike, n_workers: int) -> NDArray[np.int64]:
    """Count the samples that worker i has and worker j will train on, ``(n, n)`` int64."""
    # Rows add up to the shares before the shuffle, columns to the shares after it. If a worker's share keeps its size,
    # as many samples leave the worker as arrive. Attia and Tandon (2016), definitions 1 and 2; see docs/papers.md.
    arcs = np.asarray(owners, np.int64) * n_workers + np.asarray(destinations, np.int64)
    return np.bincount(arcs, minlength=n_workers**2).reshape(n_workers, n_workers)


def lower_bound(holders: ArrayLike, destinations: ArrayLike, n_workers: int) -> int:
    """Lower bound on the packets of any code, linear or not, for a shuffle of at most 20 workers.

    ``holders`` are ``(q,)`` masks of the workers that hold each sample, and ``destinations`` the workers that train on
    them. Take the workers in some order. Count the needed samples that neither their destination nor a worker before it
    holds. Give every worker the packets and the samples that are not counted. The first worker knows no counted sample,
    so it decodes its counted samples from the packets. The second worker knows at most the counted samples that the
    first has decoded, and so on. There are therefore at least as many packets as counted samples. The bound is the
    maximum of this count over all orders.

    Attia and Tandon (2016), Theorem 2; see docs/papers.md. We extend it to caches with excess. The maximum over the
    orders is found by dynamic programming over the sets of workers that come first, after a subset-sum transform of the
    holder sets.
    """
    if n_workers > 20:
        raise ValueError(f"there are {n_workers} workers, and sets of more than 20 are too many")
    masks, ranks = np.ravel(np.asarray(holders, np.uint64)).astype(np.int64), np.asarray(destinations, np.int64)
    needed = (masks >> ranks) & 1 == 0
    n_sets, workers = 1 << n_workers, range(n_workers)
    # counts[T, i]: samples that worker i needs and whose holders are T; after the transform, a subset of T.
    counts = np.zeros((n_sets, n_workers), np.int32)
    np.add.at(counts, (masks[needed], ranks[needed]), 1)
    for worker in workers:
        halves = counts.reshape(-1, 2, 1 << worker, n_workers)
        halves[:, 1] += halves[:, 0]
    most, sets = np.zeros(n_sets, np.int64), np.arange(n_sets)
    sizes = np.bitwise_count(sets)
    for size in range(1, n_workers + 1):
        first = sets[sizes == size]
        for worker in workers:  # the worker comes last among those of each set
            some = first[first >> worker & 1 == 1]
            most[some] = np.maximum(most[some], most[some ^ 1 << worker] + counts[n_sets - 1 - some, worker])
    return int(most[-1])
