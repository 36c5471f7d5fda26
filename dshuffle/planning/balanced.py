"""Balanced draws: how many samples each worker gets, and a uniform choice of which."""

from __future__ import annotations

import numpy as np

from dshuffle.planning.randomness import permutation, shuffle
from dshuffle.planning.values import Ranks, Samples


def balanced_sizes(n_samples: int, n_workers: int, *path: int | str) -> Samples:
    """``(n_workers,)`` partition sizes that differ by at most one, the larger ones at random."""
    sizes = np.full(n_workers, n_samples // n_workers)
    # Always giving the first workers the samples left over would make them slower in every epoch.
    sizes[permutation(n_workers, "extra", *path)[: n_samples % n_workers]] += 1
    return sizes


def uniform_ranks(n_samples: int, n_workers: int, *path: int | str) -> Ranks:
    """A uniform balanced draw: the multiset of ranks, shuffled."""
    ranks = np.repeat(np.arange(n_workers, dtype=np.int32), balanced_sizes(n_samples, n_workers, *path))
    shuffle(ranks, *path)
    return ranks
