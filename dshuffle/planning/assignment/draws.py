"""Random draws: the sizes of shares, which samples they get, and exchanges between all workers."""

from __future__ import annotations

import numpy as np

from dshuffle.kernels import kernel
from dshuffle.planning.assignment.blocks import Blocks
from dshuffle.planning.randomness import below, next_word, permutation
from dshuffle.planning.types import Ranks, Samples


def balanced_sizes(n_samples: int, n_workers: int, *path: int | str) -> Samples:
    """Draw ``(n_workers,)`` share sizes that differ by at most one; random workers get the larger ones."""
    sizes = np.full(n_workers, n_samples // n_workers)
    # If the first workers always got the extra samples, they would be slower in every epoch.
    sizes[permutation(n_workers, "extra", *path)[: n_samples % n_workers]] += 1
    return sizes


def uniform_ranks(n_samples: int, n_workers: int, *path: int | str) -> Ranks:
    """Draw ``(n_samples,)`` uniform ranks; shares differ by at most one sample."""
    return Blocks.drawn(n_samples, n_workers, 1, *path).all_ranks()


@kernel("(i8[:,::1], u8[::1], i4[::1])")
def derange(sent, words, ranks):  # type: ignore[no-untyped-def]
    """Reassign each row of ``sent`` by a uniform permutation of the ranks without fixed points."""
    n_workers = sent.shape[1]
    destination = np.arange(n_workers)
    for row in range(sent.shape[0]):
        state = words[row]
        rank = 0
        # Fisher-Yates, restarted at the first fixed point. The result is uniform among the derangements, whatever
        # order the previous row left behind.
        while rank < n_workers:
            state, word = next_word(state)
            other = rank + below(word, n_workers - rank)
            destination[rank], destination[other] = destination[other], destination[rank]
            rank = 0 if destination[rank] == rank else rank + 1
        for rank in range(n_workers):
            ranks[sent[row, rank]] = destination[rank]
