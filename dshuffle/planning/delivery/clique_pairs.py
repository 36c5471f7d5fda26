"""Greedy packing of needed samples into small cliques with lists, for any number of workers.

With many workers, samples rarely have the same holders, and most packets are pairs. Bitsets over all workers would be
nearly empty, so candidates come from lists by (destination, holder).
"""

from __future__ import annotations

import numpy as np

from dshuffle.kernels import kernel
from dshuffle.planning.grouping import count_holders, group_by, holds, lowest_bit, popcount
from dshuffle.planning.randomness import permutation
from dshuffle.planning.types import Holders, Samples

_CANDIDATES = 512
"""Maximum number of candidates for one packet."""
_LISTED = 16
"""Maximum number of holders under which a sample is listed, to limit memory if samples have many holders."""


def pack_small_cliques(holders: Holders, workers: Samples, n_workers: int, *, seed: int) -> tuple[Samples, Samples]:
    """Assign every needed sample to a packet.

    Parameters
    ----------
    holders
        ``(D, words)`` masks of the needed samples.
    workers
        ``(D,)`` int64, the destinations of the samples.

    Returns
    -------
    members : (D,) int64
        Indices of samples, packet after packet.
    offsets : (P + 1,) int64
        Packet p has ``members[offsets[p]:offsets[p + 1]]``.

    Notes
    -----
    As in :mod:`~dshuffle.planning.delivery.clique_packing`, a packet grows from a seed sample; samples with few holders
    are seeds first. In each step it takes the sample that leaves the most other destinations possible. All candidates
    for a packet, at most some hundreds, are collected at its start. They are samples for a holder of the seed that
    the destination of the seed holds.
    """
    sizes = _sizes(holders)
    seeds = permutation(len(workers), "clique", seed)
    seeds = seeds[group_by(sizes[seeds], n_workers + 1)[0]]
    packets: tuple[Samples, Samples] = _pack(holders, workers, sizes, seeds, n_workers)
    return packets


@kernel()
def _sizes(holders):  # type: ignore[no-untyped-def]
    sizes = np.empty(holders.shape[0], dtype=np.int64)
    for sample in range(holders.shape[0]):
        sizes[sample] = count_holders(holders, sample)
    return sizes


@kernel()
def _pack(holders, workers, sizes, seeds, n_workers):  # type: ignore[no-untyped-def]
    starts, ends, lists = _lists(holders, workers, sizes, seeds, n_workers)
    members = np.empty(workers.size, dtype=np.int64)
    offsets = np.zeros(workers.size + 1, dtype=np.int64)
    n_packets, n_members = 0, 0
    alive = np.ones(workers.size, dtype=np.bool_)
    candidates = np.empty(_CANDIDATES, dtype=np.int64)
    # Workers that hold all samples of the packet and get none from it yet, as a row of holders.
    empty = np.empty((1, holders.shape[1]), dtype=np.uint64)
    for seed in seeds:
        if not alive[seed]:
            continue
        empty[0] = holders[seed]
        left = _collect(seed, holders, workers, sizes, starts, ends, lists, alive, n_workers, candidates)
        chosen = seed
        while chosen >= 0:
            alive[chosen] = False
            members[n_members] = chosen
            n_members += 1
            empty[0] &= holders[chosen]
            newest = workers[chosen]
            chosen, best_score, kept = np.int64(-1), np.int64(0), 0
            for i in range(left):
                sample = candidates[i]
                if not holds(empty, 0, workers[sample]) or not holds(holders, sample, newest):
                    continue
                candidates[kept] = sample
                kept += 1
                score = -3 * sizes[sample]
                for word in range(holders.shape[1]):
                    score += 5 * popcount(holders[sample, word] & empty[0, word])
                if chosen < 0 or score > best_score:
                    chosen, best_score = sample, score
            left = kept
        n_packets += 1
        offsets[n_packets] = n_members
    return members, offsets[: n_packets + 1]


@kernel()
def _lists(holders, workers, sizes, seeds, n_workers):  # type: ignore[no-untyped-def]
    """List the samples for worker d that h holds, in seed order, as list ``d * n_workers + h``."""
    counts = np.zeros(n_workers * n_workers + 1, dtype=np.int32)
    for fill in range(2):
        if fill:
            starts = counts.copy()
            for place in range(1, starts.size):
                starts[place] += starts[place - 1]
            ends = starts[:-1].copy()
            lists = np.empty(starts[-1], dtype=np.int32)
        for sample in seeds:
            nth = 0
            for word in range(holders.shape[1]):
                rest = holders[sample, word]
                while rest != 0:
                    holder = word * 64 + lowest_bit(rest)
                    rest &= rest - np.uint64(1)
                    # Vary the listed holders by sample, so that no worker's lists stay empty.
                    if (nth + sample) % sizes[sample] < _LISTED:
                        key = workers[sample] * n_workers + holder
                        if fill:
                            lists[ends[key]] = sample
                            ends[key] += 1
                        else:
                            counts[key + 1] += 1
                    nth += 1
    return starts, ends, lists


@kernel()
def _collect(  # type: ignore[no-untyped-def]
    seed, holders, workers, sizes, starts, ends, lists, alive, n_workers, candidates
):
    """Write samples that may join the seed to ``candidates``, and return their number."""
    count = 0
    share = max(_CANDIDATES // max(sizes[seed], 1), 1)
    for word in range(holders.shape[1]):
        rest = holders[seed, word]
        while rest != 0:
            d = word * 64 + lowest_bit(rest)
            rest &= rest - np.uint64(1)
            key = d * n_workers + workers[seed]
            i = starts[key]
            stop = min(count + share, _CANDIDATES)
            while i < ends[key] and count < stop:
                if alive[lists[i]]:
                    candidates[count] = lists[i]
                    count += 1
                    i += 1
                else:
                    ends[key] -= 1
                    lists[i] = lists[ends[key]]
    return count
