"""Greedy packing of needed samples into cliques with bitsets, for up to 64 workers.

A packet may contain any samples with different destinations, each of which all other destinations hold. The set
of a sample is its holders and its destination. The set of every sample in a packet contains all destinations of the
packet. A sample whose set has s workers therefore shares its packet with at most s - 1 others. A packet wastes nothing
if it serves the whole set of the sample with the smallest set.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dshuffle.kernels import kernel
from dshuffle.planning.delivery.packets_from_server import Tables
from dshuffle.planning.grouping import group_by, lowest_bit, popcount
from dshuffle.planning.randomness import below, next_word, permutation, random_words
from dshuffle.planning.types import Samples

_UNIT = 1 << 20
_FINE = [_UNIT * percent // 100 for percent in range(98, 30, -2)]
_COARSE = [_UNIT * percent // 100 for percent in (80, 70, 60, 50)]
_SMALL = 16_000_000
"""Largest demand for the fine search: the sum of the squared set sizes times the number of workers."""
_PATIENCE = 16_000
"""Number of seeds that may miss a threshold before it is dropped; every seed that reaches it adds ten."""


def pack_cliques(tables: Tables, n_workers: int, *, seed: int) -> tuple[Samples, Samples]:
    """Assign every sample of the tables to a packet.

    Notes
    -----
    Packets grow one at a time from a seed sample; samples with small sets are seeds first. Four rules keep them full:

    - First, every other destination in the seed's set adds its first sample whose set contains the seed's set.
      Samples are ordered by the size of their set, then by the length of their row in the encoding table.
    - Then destinations without a sample get the samples that leave the most other destinations possible. Small
      demands have time for several noisy tries.
    - The worth of a packet is the sum of the weights of its samples. Weights of 1 / s would add up to the lower bound
      of Theorem 2, and to 1 in a packet without waste. Weights of s ** -0.75 need some percent fewer packets, because
      large sets cost more than 1 / s in practice.
    - Only packets that reach a threshold are made. A seed whose packet misses it waits for a lower threshold. The
      threshold falls in small steps, or in four steps for large demands to save time. A threshold that few seeds
      reach is dropped.

    References
    ----------
    Chung et al. (2017), Theorem 2; see docs/papers.md.
    """
    sets = np.repeat(tables.masks, np.diff(tables.starts[tables.columns]))
    workers = np.repeat(tables.workers, np.diff(tables.starts)).astype(np.int64)
    sizes = np.empty(len(sets), dtype=np.int64)
    company = np.empty(len(sets), dtype=np.int64)
    _describe(tables.masks, tables.columns, tables.starts, sizes, company)
    mixed = permutation(len(sets), "clique", seed)
    seeds = mixed[group_by(sizes[mixed], n_workers + 1)[0]]
    order = mixed[group_by((sizes * (n_workers + 1) + company)[mixed], (n_workers + 1) ** 2)[0]]
    by_worker, ends = group_by(workers[order], n_workers)
    levels, tries = (_FINE, 4) if n_workers * int((sizes**2).sum()) <= _SMALL else (_COARSE, 1)
    packets: tuple[Samples, Samples] = _pack(
        sets,
        workers,
        order[by_worker],
        ends,
        seeds,
        _weights(sizes),
        np.array([*levels, 0], dtype=np.int64),
        tries,
        random_words(1, "clique", seed)[0],
    )
    return packets


def _weights(sizes: Samples) -> NDArray[np.int64]:
    """Return the weight of a sample by the size of its set; a full packet of mean size is worth :data:`_UNIT`."""
    mean = max(int(sizes.sum()) // max(len(sizes), 1), 1)
    # Use fourth roots of integers, because powers of floats differ between machines.
    roots = [math.isqrt(math.isqrt(_UNIT**4 // (size**3 * mean))) for size in range(1, 65)]
    return np.array([0, *roots], dtype=np.int64)


@kernel("(u8[::1], i8[::1], i8[::1], i8[::1], i8[::1])")
def _describe(masks, columns, starts, sizes, company):  # type: ignore[no-untyped-def]
    """Write the set size of every sample, and the length of its row in the encoding table."""
    for table in range(masks.size):
        for column in range(columns[table], columns[table + 1]):
            for row in range(starts[column + 1] - starts[column]):
                length = 0
                for other in range(columns[table], columns[table + 1]):
                    length += starts[other + 1] - starts[other] > row
                sizes[starts[column] + row] = popcount(masks[table])
                company[starts[column] + row] = length


@kernel("(u8[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8, u8)")
def _pack(  # type: ignore[no-untyped-def]
    sets, workers, order, ends, seeds, weights, levels, tries, state
):
    index = _index(sets, workers, order, ends)
    place, alive = index[4], index[2]
    n_workers = ends.size - 1
    members = np.empty(sets.size, dtype=np.int64)
    offsets = np.zeros(sets.size + 1, dtype=np.int64)
    n_packets, n_members = 0, 0
    packet = np.empty(n_workers, dtype=np.int64)
    scratch = (packet, np.empty_like(packet), np.empty(8, dtype=np.uint64), np.array([state]))
    # Worth of a seed's packet when it was last grown. It rarely increases, because samples are only removed.
    worth = np.full(sets.size, weights[1] * n_workers, dtype=np.int64)
    waiting = seeds.copy()
    n_waiting = waiting.size
    for level in levels:
        still, failed, patience = 0, 0, _PATIENCE
        for i in range(n_waiting):
            seed = waiting[i]
            at = place[seed]
            if not (alive[at >> 9, (at >> 6) & 7] >> np.uint64(at & 63)) & np.uint64(1):
                continue
            grown = worth[seed] >= level and failed < patience
            if grown:
                size, worth[seed] = _grow(seed, sets, workers, weights, index, tries, scratch)
                failed += worth[seed] < level
            if not grown or worth[seed] < level:
                waiting[still] = seed
                still += 1
                continue
            patience += 10
            for k in range(size):
                members[n_members] = packet[k]
                n_members += 1
                at = place[packet[k]]
                alive[at >> 9, (at >> 6) & 7] ^= np.uint64(1) << np.uint64(at & 63)
            n_packets += 1
            offsets[n_packets] = n_members
        n_waiting = still
    return members, offsets[: n_packets + 1]


@kernel()
def _index(sets, workers, order, ends):  # type: ignore[no-untyped-def]
    """Build bitsets for blocks of 512 samples of one destination, in ``order``.

    Bit i of ``held[block, worker]`` is set if the worker is in the set of sample i of the block. Bit i of
    ``alive[block]`` is set until the sample is in a packet. ``layers[d, s]`` is the first block of destination d that
    has a set of size s or more, and ``layers[d, -1]`` is the first block of the next destination.
    """
    n_workers = ends.size - 1
    layers = np.zeros((n_workers, n_workers + 2), dtype=np.int64)
    n_blocks = 0
    for d in range(n_workers):
        layers[d, 0] = n_blocks
        n_blocks += (ends[d + 1] - ends[d] + 511) // 512
        layers[d, n_workers + 1] = n_blocks
    held = np.zeros((n_blocks, n_workers, 8), dtype=np.uint64)
    alive = np.zeros((n_blocks, 8), dtype=np.uint64)
    sample_at = np.empty(n_blocks * 512, dtype=np.int64)
    place = np.empty(order.size, dtype=np.int64)
    for d in range(n_workers):
        reached = 0
        for i in range(ends[d + 1] - ends[d]):
            sample = order[ends[d] + i]
            at = layers[d, 0] * 512 + i
            sample_at[at] = sample
            place[sample] = at
            bit = np.uint64(1) << np.uint64(at & 63)
            alive[at >> 9, (at >> 6) & 7] |= bit
            rest = sets[sample]
            while rest != 0:
                held[at >> 9, lowest_bit(rest), (at >> 6) & 7] |= bit
                rest &= rest - np.uint64(1)
            while reached < popcount(sets[sample]):
                reached += 1
                layers[d, reached] = at >> 9
        for size in range(reached + 1, n_workers + 1):
            layers[d, size] = layers[d, n_workers + 1]
    return layers, held, alive, sample_at, place


@kernel()
def _grow(seed, sets, workers, weights, index, tries, scratch):  # type: ignore[no-untyped-def]
    """Return the size and worth of the best packet found for a seed; ``scratch[0]`` has its samples."""
    layers, held, alive, sample_at, _ = index
    packet, attempt, lanes, state = scratch
    packet[0] = seed
    size = 1
    worth = weights[popcount(sets[seed])]
    taken = np.uint64(1) << np.uint64(workers[seed])
    rest = sets[seed] & ~taken
    empty = np.uint64(0)
    while rest != 0:
        d = lowest_bit(rest)
        bit = np.uint64(1) << np.uint64(d)
        rest ^= bit
        at = _first(layers, held, alive, d, sets[seed], lanes)
        if at < 0:
            empty |= bit
        else:
            packet[size] = sample_at[at]
            worth += weights[popcount(sets[packet[size]])]
            size += 1
            taken |= bit
    if empty == 0:
        return size, worth
    kept, kept_worth = size, worth
    for i in range(tries):
        filled = _fill(kept, taken, empty, sets, workers, index, i > 0, attempt, lanes, state)
        attempt_worth = kept_worth
        for k in range(kept, filled):
            attempt_worth += weights[popcount(sets[attempt[k]])]
        if attempt_worth > worth:
            size, worth = filled, attempt_worth
            for k in range(kept, size):
                packet[k] = attempt[k]
    return size, worth


@kernel()
def _fill(size, taken, empty, sets, workers, index, noisy, packet, lanes, state):  # type: ignore[no-untyped-def]
    """Add samples for the ``empty`` destinations, best first, and return the new size of the packet."""
    layers, held, alive, sample_at, _ = index
    while empty != 0:
        best, best_score = np.int64(-1), np.int64(0)
        rest = empty
        while rest != 0:
            d = lowest_bit(rest)
            bit = np.uint64(1) << np.uint64(d)
            rest ^= bit
            candidates = 0
            for block in range(_begin(layers, alive, d, popcount(taken) + 1), layers[d, -1]):
                if candidates >= 8:
                    break
                if not _filter(held, alive, block, taken, lanes):
                    continue
                for lane in range(8):
                    while lanes[lane] != 0:
                        sample = sample_at[(block * 8 + lane) * 64 + lowest_bit(lanes[lane])]
                        lanes[lane] &= lanes[lane] - np.uint64(1)
                        candidates += 1
                        # Keep other destinations possible, and save large sets for the packets that need them.
                        score = 20 * popcount(sets[sample] & empty) - 12 * popcount(sets[sample])
                        if noisy:
                            state[0], word = next_word(state[0])
                            score += below(word, 16)
                        if best < 0 or score > best_score:
                            best, best_score = sample, score
            if candidates == 0:
                empty ^= bit
        if best >= 0:
            packet[size] = best
            size += 1
            bit = np.uint64(1) << np.uint64(workers[best])
            taken |= bit
            empty &= sets[best] & ~bit
    return size


@kernel()
def _first(layers, held, alive, d, target, lanes):  # type: ignore[no-untyped-def]
    """Return the position of the first sample for ``d`` whose set contains the target, or -1."""
    for block in range(_begin(layers, alive, d, popcount(target)), layers[d, -1]):
        if _filter(held, alive, block, target, lanes):
            lane = 0
            while lanes[lane] == 0:
                lane += 1
            return (block * 8 + lane) * 64 + lowest_bit(lanes[lane])
    return -1


@kernel()
def _begin(layers, alive, d, size):  # type: ignore[no-untyped-def]
    """Return the first block for ``d`` that may have a sample with a set of at least ``size`` workers."""
    # Blocks become empty from the front, because small sets go first. Skip empty blocks permanently.
    while layers[d, 0] < layers[d, -1] and not alive[layers[d, 0]].any():
        layers[d, 0] += 1
    return max(layers[d, 0], layers[d, size])


@kernel()
def _filter(held, alive, block, target, lanes):  # type: ignore[no-untyped-def]
    """Set ``lanes`` to the samples of a block that are alive and whose sets contain the target; return if any."""
    samples = np.uint64(0)
    for lane in range(8):
        lanes[lane] = alive[block, lane]
        samples |= lanes[lane]
    rest = target
    while rest != 0 and samples != 0:
        row = held[block, lowest_bit(rest)]
        rest &= rest - np.uint64(1)
        samples = np.uint64(0)
        for lane in range(8):
            lanes[lane] &= row[lane]
            samples |= lanes[lane]
    return samples != 0
