"""Cycles of packets with one sample: k such packets are replaced by k - 1.

Let worker w[i] hold sample a[i], which w[i + 1] needs, around a cycle of k workers. The packets a[0] ^ a[1],
a[1] ^ a[2], ... serve all of them. Worker w[i + 1] holds a[i + 1] and decodes a[i] from packet i. Worker w[0] holds
a[0] and decodes one packet after the other until it has a[k - 1]. There are k - 1 packets.

References
----------
Attia and Tandon (2016); see docs/papers.md. Their leftover combining sends the symbols around all cycles through one
worker in this way. A cycle passes a worker once, so taking cycles anywhere saves at least as much.
"""

from __future__ import annotations

import numpy as np

from dshuffle.kernels import kernel
from dshuffle.planning.grouping import group_by, holds, lowest_bit
from dshuffle.planning.types import Holders, Samples


def find_cycles(holders: Holders, workers: Samples, n_workers: int) -> tuple[Samples, Samples]:
    """Find disjoint cycles among needed samples, short ones first.

    Parameters
    ----------
    holders
        ``(S, words)`` masks of the needed samples.
    workers
        ``(S,)`` int64, the destinations of the samples.

    Returns
    -------
    members : (C,) int64
        Indices of samples, cycle after cycle. The destination of a sample holds the next one around the cycle.
    offsets : (n_cycles + 1,) int64
        Cycle c has ``members[offsets[c]:offsets[c + 1]]``.

    Examples
    --------
    >>> members, offsets = find_cycles(np.array([[1], [2], [4], [1]], dtype=np.uint64), np.array([1, 2, 0, 1]), 3)
    >>> members, offsets
    (array([0, 1, 2]), array([0, 3]))
    """
    order, starts = group_by(workers, n_workers)
    lengths = np.array([2, 3, 4, 6, n_workers] if n_workers <= 64 else [2, 3], dtype=np.int64)
    cycles: tuple[Samples, Samples] = _find(holders, workers, order, starts, lengths)
    return cycles


@kernel("(u8[:,::1], i8[::1], i8[::1], i8[::1], i8[::1])")
def _find(holders, workers, order, starts, lengths):  # type: ignore[no-untyped-def]
    n_workers, words = starts.size - 1, holders.shape[1]
    # Arcs from holder to destination: the number of samples left for each, and a bitset of the nonzero ones.
    arcs = np.zeros((n_workers, n_workers), dtype=np.int32)
    ahead = np.zeros((n_workers, words), dtype=np.uint64)
    for sample in range(workers.size):
        _count(sample, 1, holders, workers, arcs, ahead)
    alive = np.ones(workers.size, dtype=np.bool_)
    members = np.empty(workers.size, dtype=np.int64)
    offsets = np.zeros(workers.size // 2 + 1, dtype=np.int64)
    n_cycles, n_members = 0, 0
    parents = np.empty(n_workers, dtype=np.int64)
    queue = np.empty(n_workers, dtype=np.int64)
    cycle = np.empty(n_workers, dtype=np.int64)
    for length in lengths:
        for first in range(workers.size):
            if not alive[first]:
                continue
            end = _way_back(first, holders, workers, ahead, length, parents, queue)
            if end < 0:
                continue
            # Go backwards from the end: find the sample that each worker gets from the worker before it.
            size, at = 0, end
            while at != workers[first]:
                sample = starts[at]
                while not alive[order[sample]] or not holds(holders, order[sample], parents[at]):
                    sample += 1
                cycle[size] = order[sample]
                size += 1
                at = parents[at]
                if holds(holders, cycle[size - 1], end):
                    break
            else:
                cycle[size] = first
                size += 1
            for i in range(size - 1, -1, -1):
                alive[cycle[i]] = False
                _count(cycle[i], -1, holders, workers, arcs, ahead)
                members[n_members] = cycle[i]
                n_members += 1
            n_cycles += 1
            offsets[n_cycles] = n_members
    return members[:n_members], offsets[: n_cycles + 1]


@kernel()
def _count(sample, change, holders, workers, arcs, ahead):  # type: ignore[no-untyped-def]
    """Add or remove the arcs of a sample."""
    d = workers[sample]
    bit = np.uint64(1) << np.uint64(d & 63)
    for word in range(holders.shape[1]):
        rest = holders[sample, word]
        while rest != 0:
            h = word * 64 + lowest_bit(rest)
            rest &= rest - np.uint64(1)
            arcs[h, d] += change
            if arcs[h, d] > 0:
                ahead[h, d >> 6] |= bit
            else:
                ahead[h, d >> 6] &= ~bit


@kernel()
def _way_back(first, holders, workers, ahead, length, parents, queue):  # type: ignore[no-untyped-def]
    """Return the nearest holder of a sample that arcs reach from its destination, or -1 (breadth-first search)."""
    parents[:] = -1
    origin = workers[first]
    parents[origin] = origin
    queue[0] = origin
    begin, end = 0, 1
    for _ in range(length - 1):
        stop = end
        for i in range(begin, stop):
            for word in range(ahead.shape[1]):
                rest = ahead[queue[i], word]
                while rest != 0:
                    worker = word * 64 + lowest_bit(rest)
                    rest &= rest - np.uint64(1)
                    if parents[worker] >= 0:
                        continue
                    parents[worker] = queue[i]
                    if holds(holders, first, worker):
                        return worker
                    queue[end] = worker
                    end += 1
        begin = stop
    return np.int64(-1)
