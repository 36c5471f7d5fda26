"""``partial``: every worker exchanges some of its samples with the others (paper 004, Algorithm 1)."""

from __future__ import annotations

import numba
import numpy as np

from dshuffle.planning.bits import group_by
from dshuffle.planning.randomness import below, choose, next_word, random_words
from dshuffle.planning.values import Ranks


def exchange_samples(previous: Ranks, n_workers: int, count: int, seed: int, epoch: int) -> Ranks:
    """Every worker sends ``count`` of its samples, drawn at random, and receives as many."""
    ranks = previous.copy()
    if count == 0:
        return ranks
    order, offsets = group_by(previous, n_workers)
    sent = np.empty((count, n_workers), dtype=np.int64)
    for rank in range(n_workers):
        own = order[offsets[rank] : offsets[rank + 1]]
        sent[:, rank] = choose(own, count, "partial", seed, epoch, rank)
    derange(sent, random_words(count, "partial", seed, epoch), ranks)
    return ranks


@numba.njit(nogil=True, cache=True)
def derange(sent, words, ranks):  # type: ignore[no-untyped-def]
    """Reassign each row of ``sent`` by a uniform permutation of the ranks without fixed points."""
    n_workers = sent.shape[1]
    destination = np.arange(n_workers)
    for row in range(sent.shape[0]):
        state = words[row]
        rank = 0
        # Fisher-Yates, given up and begun again at the first fixed point: what passes is uniform among the
        # derangements, whatever order the last round left behind.
        while rank < n_workers:
            state, word = next_word(state)
            other = rank + below(word, n_workers - rank)
            destination[rank], destination[other] = destination[other], destination[rank]
            rank = 0 if destination[rank] == rank else rank + 1
        for rank in range(n_workers):
            ranks[sent[row, rank]] = destination[rank]
