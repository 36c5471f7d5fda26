"""Deliveries of packets from a server that holds all rows: ``coded``, ``ubershuffle``, ``leftover`` and ``clique``.

Also a bound on the number of packets. A packet is as large as one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dshuffle.kernels import kernel
from dshuffle.planning.delivery.definition import Delivery, PlanInput
from dshuffle.planning.epoch_plan import SERVER, Packets
from dshuffle.planning.randomness import below, next_word, permutation, random_words
from dshuffle.planning.types import (
    ONE,
    Holders,
    Integers,
    Mask,
    Ranks,
    Samples,
    Words,
    bit,
    each_bit,
    each_holder,
    group_by,
    lowest_bit,
    missing_samples,
    popcount,
    starts_of,
)

MOST_WORKERS = 64
"""A set of workers is one machine word. Sets of more workers hardly ever repeat, so tables would not help."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Non-empty tables by ascending mask of their set, with columns by ascending destination."""

    masks: Words  # ``(T,)`` uint64, the mask of each table's set.
    # ``(T + 1,)`` int64; the non-empty columns of table t are ``columns[t]`` to ``columns[t + 1] - 1``.
    columns: Samples
    starts: Samples  # ``(C + 1,)`` int64; column c has the samples ``samples[starts[c]:starts[c + 1]]``, ascending.
    workers: Ranks  # ``(C,)`` int32, the destination of each column.
    samples: Samples  # ``(D,)`` int64, the needed samples.

    @classmethod
    def of(cls, holders: Holders, destinations: Ranks, n_workers: int) -> Tables:
        """Build the tables of the needed samples from checked arrays, for at most 64 workers."""
        needed = missing_samples(holders, destinations)
        workers = destinations[needed]
        masks = holders[needed, 0] | (ONE << workers.astype(np.uint64))
        order = np.lexsort((workers, masks))
        samples, workers, masks = needed[order], workers[order], masks[order]
        new_table = _differs(masks)
        first = np.flatnonzero(new_table | _differs(workers))
        return cls(
            masks=masks[new_table],
            columns=np.append(np.flatnonzero(new_table[first]), len(first)),
            starts=np.append(first, len(samples)),
            workers=workers[first],
            samples=samples,
        )

    def plan(self, packet_of: Samples, n_packets: int, destinations: Ranks) -> Packets:
        """Return the server's plan with ``samples[i]`` in packet ``packet_of[i]``; every packet has a sample."""
        order, offsets = group_by(packet_of, n_packets)
        samples = self.samples[order]
        return Packets(offsets, samples, destinations[samples], np.full(n_packets, SERVER, np.int32))


def _differs(values: Words | Ranks) -> Mask:
    """Return whether each value differs from the one before it; True for the first."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def plan_coded(plan_input: PlanInput) -> Packets:
    """Plan as many packets from the server for every encoding table as its longest column has samples (Algorithm 2)."""
    # The rate is that of Theorem 2 if the columns of a table are equally long, as they are for very many samples.
    # Otherwise the packets at the end of each table serve fewer and fewer workers.
    return plan_ubershuffle(plan_input, depth=0)


def plan_ubershuffle(plan_input: PlanInput, depth: int = 2) -> Packets:
    """Plan the packets of ``coded`` after moving samples to tables of subsets with shorter columns."""
    n_workers = plan_input.n_workers
    tables = Tables.of(plan_input.holders, plan_input.destinations, n_workers)
    by_size, layers = group_by(np.bitwise_count(tables.masks).astype(np.int64), n_workers + 1)
    order = by_size if depth else np.arange(len(by_size))
    packet_of = np.empty(len(tables.samples), np.int64)
    n_packets = _carpool(
        tables.masks, tables.columns, tables.starts, tables.workers, order, layers, min(depth, n_workers), packet_of
    )
    return tables.plan(packet_of, n_packets, plan_input.destinations)


@kernel("(u8[::1], i8[::1], i8[::1], i4[::1], i8[::1], i8[::1], i8, i8[::1])")
def _carpool(  # type: ignore[no-untyped-def]
    masks, columns, starts, workers, by_size, layers, depth, packet_of
):
    """Assign every sample to a packet and return the number of packets."""
    n_workers = layers.size - 2
    slots = _slots(masks)
    # The remaining samples of a column begin at its head.
    heads = starts[:-1].copy()
    # Workers that have a column in each table, even if no samples of it remain.
    destinations = np.zeros(masks.size, np.uint64)
    for table in range(masks.size):
        for column in range(columns[table], columns[table + 1]):
            destinations[table] |= bit(workers[column])
    lengths = np.zeros(n_workers, np.int64)
    absent = np.empty(n_workers, np.uint64)
    chosen = np.empty(n_workers + 1, np.int64)
    n_packets = 0
    for table in by_size:
        mask = masks[table]
        longest = 0
        lengths[:] = 0
        for column in range(columns[table], columns[table + 1]):
            for i in range(heads[column], starts[column + 1]):
                packet_of[i] = n_packets + i - heads[column]
            lengths[workers[column]] = starts[column + 1] - heads[column]
            longest = max(longest, lengths[workers[column]])
        short = np.uint64(0)
        n_absent = 0
        for worker in range(n_workers):
            if mask & bit(worker) == 0:
                absent[n_absent] = bit(worker)
                n_absent += 1
            elif lengths[worker] < longest:
                short |= bit(worker)
        size = n_workers - n_absent
        n_supersets = 1.0
        for extra in range(1, min(depth, n_absent) + 1):
            n_supersets *= (n_absent + 1 - extra) / extra
            place, end = layers[size + extra], layers[size + extra + 1]
            # A lookup costs about as much as skipping eight tables.
            by_scan = end - place < 8 * n_supersets
            for k in range(extra):
                chosen[k] = k
            chosen[extra] = n_absent
            while short != 0 and place < end:
                if by_scan:
                    giver = by_size[place]
                    place += 1
                    if masks[giver] & mask != mask:
                        continue
                else:
                    superset = mask
                    for i in range(extra):
                        superset |= absent[chosen[i]]
                    giver = _find(slots, masks, superset)
                    if not _advance(chosen, extra):
                        place = end
                    if giver < 0:
                        continue
                for worker in each_bit(destinations[giver] & short):
                    column = columns[giver] + popcount(destinations[giver] & (bit(worker) - ONE))
                    count = min(longest - lengths[worker], starts[column + 1] - heads[column])
                    for i in range(count):
                        packet_of[heads[column] + i] = n_packets + lengths[worker] + i
                    heads[column] += count
                    lengths[worker] += count
                    if lengths[worker] == longest:
                        short ^= bit(worker)
        n_packets += longest
    return n_packets


@kernel()
def _advance(chosen, count):  # type: ignore[no-untyped-def]
    """Advance to the next choice of ``count`` ascending numbers below ``chosen[count]``; return whether one exists."""
    # The masks of the choices ascend as well.
    place = 0
    while place < count and chosen[place] + 1 == chosen[place + 1]:
        chosen[place] = place
        place += 1
    if place < count:
        chosen[place] += 1
    return place < count


@kernel()
def _slots(masks):  # type: ignore[no-untyped-def]
    """Build a hash table from mask to table: linear probing, at most half full, -1 in empty slots."""
    size = 2
    while size < 2 * masks.size:
        size *= 2
    slots = np.full(size, -1, np.int32)
    for table in range(masks.size):
        slot = _hash(masks[table]) & (size - 1)
        while slots[slot] >= 0:
            slot = (slot + 1) & (size - 1)
        slots[slot] = table
    return slots


@kernel()
def _find(slots, masks, mask):  # type: ignore[no-untyped-def]
    """Return the table of a set, or -1."""
    slot = _hash(mask) & (slots.size - 1)
    while slots[slot] >= 0 and masks[slots[slot]] != mask:
        slot = (slot + 1) & (slots.size - 1)
    return slots[slot]


@kernel()
def _hash(mask):  # type: ignore[no-untyped-def]
    return np.int64((mask * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32))


def plan_leftover(plan_input: PlanInput) -> Packets:
    """Plan packets of at most two samples from the server."""
    # The seed chooses among the workers that are equally good to ignore.
    # Attia and Tandon (2016), section V and Theorem 1 for the number of packets; see docs/papers.md. The paper requires
    # that the ignored worker decode everything in two steps (definition 4). Not every shuffle allows this, because
    # single arcs may not connect the worker's arcs. We take the shortest trails, so there are more steps only where
    # necessary. The theorem covers shuffles in which as many samples leave each worker as arrive. In other shuffles,
    # samples that are not on a closed trail are sent uncoded.
    needed = plan_input.missing_samples()
    # Samples without a holder start at an extra node, to which no arc leads.
    nodes = plan_input.n_workers + 1
    owners = np.full(len(needed), nodes - 1)
    _find_owners(plan_input.holders, needed, owners)
    order, offsets = group_by(owners * nodes + plan_input.destinations[needed], nodes**2)
    shuffle = np.diff(offsets).reshape(nodes, nodes)
    # Without the samples that are sent in pairs: Attia and Tandon (2016), definition 3.
    leftovers = shuffle - np.minimum(shuffle, shuffle.T)
    ignored, trails = _best_ignored(leftovers, plan_input.seed)
    packets = np.zeros(len(needed) + 1, np.int64)
    samples = np.empty(2 * len(needed), np.int64)
    workers = np.empty(2 * len(needed), np.int32)
    n_packets = _emit(needed[order], offsets, trails, ignored, packets, samples, workers)
    packets = packets[: n_packets + 1]
    return Packets(packets, samples[: packets[-1]], workers[: packets[-1]], np.full(n_packets, SERVER, np.int32))


@kernel("(u8[:,::1], i8[::1], i8[::1])")
def _find_owners(holders, samples, owners):  # type: ignore[no-untyped-def]
    """Write the holder of each sample that has one."""
    for i in range(samples.size):
        for worker in each_holder(holders, samples[i]):
            owners[i] = worker


def _best_ignored(leftovers: Integers, seed: int) -> tuple[int, Integers]:
    """Return the worker with the most closed trails through it, and the number of trails over each arc."""
    bounds = np.minimum(leftovers.sum(axis=0), leftovers.sum(axis=1))
    mixed = permutation(len(bounds), "leftover", seed)
    best, most, trails = 0, -1, leftovers
    for worker in mixed[np.argsort(-bounds[mixed], kind="stable")].tolist():
        # If as many samples leave every worker as arrive, the first worker reaches its bound.
        if bounds[worker] <= most:
            break
        count, flow = _closed_trails(leftovers, worker)
        if count > most:
            best, most, trails = worker, count, flow
    return best, trails


@kernel("(i8[:,::1], i8)")
def _closed_trails(arcs, hub):  # type: ignore[no-untyped-def]
    """Return the number of arc-disjoint closed trails through ``hub``, and the number over each arc."""
    # Trails are found one by one, the shortest first. If as many arcs leave every node as enter it, this still holds
    # after a trail is removed. Trails then never block each other, and all arcs of the hub are used.
    n = arcs.shape[0]
    left = arcs.copy()
    parent = np.empty(n, np.int64)
    queue = np.empty(n, np.int64)
    count = 0
    while True:
        parent[:] = -1
        queue[0] = hub
        head, tail = 0, 1
        end = -1
        while head < tail and end < 0:
            node = queue[head]
            head += 1
            for other in range(n):
                if left[node, other] > 0 and parent[other] < 0:
                    parent[other] = node
                    if left[other, hub] > 0:
                        end = other
                        break
                    queue[tail] = other
                    tail += 1
        if end < 0:
            return count, arcs - left
        room = left[end, hub]
        node = end
        while node != hub:
            room = min(room, left[parent[node], node])
            node = parent[node]
        left[end, hub] -= room
        node = end
        while node != hub:
            left[parent[node], node] -= room
            node = parent[node]
        count += room


@kernel("(i8[::1], i8[::1], i8[:,::1], i8, i8[::1], i8[::1], i4[::1])")
def _emit(  # type: ignore[no-untyped-def]
    arcs, offsets, trails, ignored, packets, samples, workers
):
    """Write all packets, with their offsets in ``packets``, and return the number of packets."""
    # ``arcs`` are the needed samples; the samples from node i to node j begin at ``offsets[i * n + j]``. ``trails`` is
    # overwritten.
    n = trails.shape[0]
    heads = offsets[:-1].copy()
    p, e = 0, 0
    for i in range(n):
        for j in range(i):
            forward, back = i * n + j, j * n + i
            while heads[forward] < offsets[forward + 1] and heads[back] < offsets[back + 1]:
                samples[e], workers[e] = arcs[heads[forward]], j
                samples[e + 1], workers[e + 1] = arcs[heads[back]], i
                heads[forward] += 1
                heads[back] += 1
                p, e = p + 1, e + 2
                packets[p] = e
    # The trails use no more arcs from a node to the nodes before nearest[node].
    nearest = np.zeros(n, np.int64)
    node, comes_in = ignored, np.int64(-1)
    while True:
        while nearest[node] < n and trails[node, nearest[node]] == 0:
            nearest[node] += 1
        if nearest[node] == n:
            break
        other = nearest[node]
        trails[node, other] -= 1
        arc = node * n + other
        goes_out = arcs[heads[arc]]
        heads[arc] += 1
        if node != ignored:
            samples[e], workers[e] = comes_in, node
            samples[e + 1], workers[e + 1] = goes_out, ignored
            p, e = p + 1, e + 2
            packets[p] = e
        node, comes_in = other, goes_out
    for i in range(n):
        for j in range(n):
            for arc in range(heads[i * n + j], offsets[i * n + j + 1]):
                samples[e], workers[e] = arcs[arc], j
                p, e = p + 1, e + 1
                packets[p] = e
    return p


_UNIT = 1 << 20
_FINE = [_UNIT * percent // 100 for percent in range(98, 30, -2)]
_COARSE = [_UNIT * percent // 100 for percent in (80, 70, 60, 50)]
_SMALL = 16_000_000
"""Largest demand for the fine search: the sum of the squared set sizes times the number of workers."""
_PATIENCE = 16_000
"""Number of seeds that may miss a threshold before it is dropped; every seed that reaches it adds ten."""


def pack_cliques(tables: Tables, n_workers: int, *, seed: int) -> tuple[Samples, Samples]:
    """Assign every sample of the tables to a packet."""
    # Packets grow one at a time from a seed sample; samples with small sets are seeds first. Four rules keep them full:
    # - First, every other destination in the seed's set adds its first sample whose set contains the seed's set.
    # Samples are ordered by the size of their set, then by the length of their row in the encoding table.
    # - Then destinations without a sample get the samples that leave the most other destinations possible. Small
    # demands have time for several noisy tries.
    # - The worth of a packet is the sum of the weights of its samples. Weights of 1 / s would add up to the lower bound
    # of Theorem 2, and to 1 in a packet without waste. Weights of s ** -0.75 need some percent fewer packets, because
    # large sets cost more than 1 / s in practice.
    # - Only packets that reach a threshold are made. A seed whose packet misses it waits for a lower threshold. The
    # threshold falls in small steps, or in four steps for large demands to save time. A threshold that few seeds reach
    # is dropped.
    # Chung et al. (2017), Theorem 2; see docs/papers.md.
    in_table = np.diff(tables.starts[tables.columns])
    sets = np.repeat(tables.masks, in_table)
    workers = np.repeat(tables.workers, np.diff(tables.starts)).astype(np.int64)
    sizes = np.bitwise_count(sets).astype(np.int64)
    # The length of a sample's row in its encoding table: the samples of a row have as many before them in their column.
    rows = np.arange(len(sets)) - np.repeat(tables.starts[:-1], np.diff(tables.starts))
    places = np.repeat(np.arange(len(in_table)), in_table) * (len(sets) + 1) + rows
    _, inverse, counts = np.unique(places, return_inverse=True, return_counts=True)
    company = counts[inverse]
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
        np.array([*levels, 0], np.int64),
        tries,
        random_words(1, "clique", seed)[0],
    )
    return packets


def _weights(sizes: Samples) -> Integers:
    """Return the weight of a sample by the size of its set; a full packet of mean size is worth :data:`_UNIT`."""
    mean = max(int(sizes.sum()) // max(len(sizes), 1), 1)
    # Use fourth roots of integers, because powers of floats differ between machines.
    roots = [math.isqrt(math.isqrt(_UNIT**4 // (size**3 * mean))) for size in range(1, 65)]
    return np.array([0, *roots], np.int64)


@kernel("(u8[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8, u8)")
def _pack(  # type: ignore[no-untyped-def]
    sets, workers, order, ends, seeds, weights, levels, tries, state
):
    index = _index(sets, workers, order, ends)
    place, alive = index[4], index[2]
    n_workers = ends.size - 1
    members = np.empty(sets.size, np.int64)
    offsets = np.zeros(sets.size + 1, np.int64)
    n_packets, n_members = 0, 0
    packet = np.empty(n_workers, np.int64)
    scratch = (packet, np.empty_like(packet), np.empty(8, np.uint64), np.array([state]))
    # Worth of a seed's packet when it was last grown. It rarely increases, because samples are only removed.
    worth = np.full(sets.size, weights[1] * n_workers, np.int64)
    waiting = seeds.copy()
    n_waiting = waiting.size
    for level in levels:
        still, failed, patience = 0, 0, _PATIENCE
        for i in range(n_waiting):
            seed = waiting[i]
            at = place[seed]
            if not alive[at >> 9, (at >> 6) & 7] & bit(at):
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
                alive[at >> 9, (at >> 6) & 7] ^= bit(at)
            n_packets += 1
            offsets[n_packets] = n_members
        n_waiting = still
    return members, offsets[: n_packets + 1]


@kernel()
def _index(sets, workers, order, ends):  # type: ignore[no-untyped-def]
    """Build bitsets for blocks of 512 samples of one destination, in ``order``."""
    # Bit i of ``held[block, worker]`` is set if the worker is in the set of sample i of the block. Bit i of
    # ``alive[block]`` is set until the sample is in a packet. ``layers[d, s]`` is the first block of destination d that
    # has a set of size s or more, and ``layers[d, -1]`` is the first block of the next destination.
    n_workers = ends.size - 1
    layers = np.zeros((n_workers, n_workers + 2), np.int64)
    n_blocks = 0
    for d in range(n_workers):
        layers[d, 0] = n_blocks
        n_blocks += (ends[d + 1] - ends[d] + 511) // 512
        layers[d, n_workers + 1] = n_blocks
    held = np.zeros((n_blocks, n_workers, 8), np.uint64)
    alive = np.zeros((n_blocks, 8), np.uint64)
    sample_at = np.empty(n_blocks * 512, np.int64)
    place = np.empty(order.size, np.int64)
    for d in range(n_workers):
        reached = 0
        for i in range(ends[d + 1] - ends[d]):
            sample = order[ends[d] + i]
            at = layers[d, 0] * 512 + i
            sample_at[at] = sample
            place[sample] = at
            alive[at >> 9, (at >> 6) & 7] |= bit(at)
            for worker in each_bit(sets[sample]):
                held[at >> 9, worker, (at >> 6) & 7] |= bit(at)
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
    taken = bit(workers[seed])
    empty = np.uint64(0)
    for d in each_bit(sets[seed] & ~taken):
        at = _first(layers, held, alive, d, sets[seed], lanes)
        if at < 0:
            empty |= bit(d)
        else:
            packet[size] = sample_at[at]
            worth += weights[popcount(sets[packet[size]])]
            size += 1
            taken |= bit(d)
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
        for d in each_bit(empty):
            candidates = 0
            for block in range(_begin(layers, alive, d, popcount(taken) + 1), layers[d, -1]):
                if candidates >= 8:
                    break
                if not _filter(held, alive, block, taken, lanes):
                    continue
                for lane in range(8):
                    for place in each_bit(lanes[lane]):
                        sample = sample_at[(block * 8 + lane) * 64 + place]
                        candidates += 1
                        # Keep other destinations possible, and save large sets for the packets that need them.
                        score = 20 * popcount(sets[sample] & empty) - 12 * popcount(sets[sample])
                        if noisy:
                            state[0], word = next_word(state[0])
                            score += below(word, 16)
                        if best < 0 or score > best_score:
                            best, best_score = sample, score
            if candidates == 0:
                empty ^= bit(d)
        if best >= 0:
            packet[size] = best
            size += 1
            taken |= bit(workers[best])
            empty &= sets[best] & ~bit(workers[best])
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
        rest &= rest - ONE
        samples = np.uint64(0)
        for lane in range(8):
            lanes[lane] &= row[lane]
            samples |= lanes[lane]
    return samples != 0


@kernel("(u8[::1], i8[::1], i8[::1], i8[::1], i8[::1])")
def find_cycles(sets, workers, order, starts, lengths):  # type: ignore[no-untyped-def]
    """Find disjoint cycles among ``(S,)`` needed samples, short ones first, from their holders and destinations."""
    # ``order`` and ``starts`` group the samples by destination.
    n_workers = starts.size - 1
    # Arcs from holder to destination: the number of samples left for each, and a bitset of the nonzero ones.
    arcs = np.zeros((n_workers, n_workers), np.int32)
    ahead = np.zeros(n_workers, np.uint64)
    for sample in range(workers.size):
        _count(sample, 1, sets, workers, arcs, ahead)
    alive = np.ones(workers.size, np.bool_)
    members = np.empty(workers.size, np.int64)
    offsets = np.zeros(workers.size // 2 + 1, np.int64)
    n_cycles, n_members = 0, 0
    parents = np.empty(n_workers, np.int64)
    queue = np.empty(n_workers, np.int64)
    cycle = np.empty(n_workers, np.int64)
    for length in lengths:
        for first in range(workers.size):
            if not alive[first]:
                continue
            end = _way_back(workers[first], sets[first], ahead, length, parents, queue)
            if end < 0:
                continue
            # Go backwards from the end: find the sample that each worker gets from the worker before it.
            size, at = 0, end
            while at != workers[first]:
                sample = starts[at]
                while not alive[order[sample]] or not sets[order[sample]] & bit(parents[at]):
                    sample += 1
                cycle[size] = order[sample]
                size += 1
                at = parents[at]
                if sets[cycle[size - 1]] & bit(end):
                    break
            else:
                cycle[size] = first
                size += 1
            for i in range(size - 1, -1, -1):
                alive[cycle[i]] = False
                _count(cycle[i], -1, sets, workers, arcs, ahead)
                members[n_members] = cycle[i]
                n_members += 1
            n_cycles += 1
            offsets[n_cycles] = n_members
    return members[:n_members], offsets[: n_cycles + 1]


@kernel()
def _count(sample, change, sets, workers, arcs, ahead):  # type: ignore[no-untyped-def]
    """Add or remove the arcs of a sample."""
    d = workers[sample]
    for h in each_bit(sets[sample]):
        arcs[h, d] += change
        if arcs[h, d] > 0:
            ahead[h] |= bit(d)
        else:
            ahead[h] &= ~bit(d)


@kernel()
def _way_back(origin, targets, ahead, length, parents, queue):  # type: ignore[no-untyped-def]
    """Return the nearest of some workers that arcs reach from a worker, or -1 (breadth-first search)."""
    parents[:] = -1
    parents[origin] = origin
    queue[0] = origin
    begin, end = 0, 1
    for _ in range(length - 1):
        stop = end
        for i in range(begin, stop):
            for worker in each_bit(ahead[queue[i]]):
                if parents[worker] >= 0:
                    continue
                parents[worker] = queue[i]
                if targets & bit(worker):
                    return worker
                queue[end] = worker
                end += 1
        begin = stop
    return np.int64(-1)


_FEW_SAMPLES = 20_000
_FEW_TABLES = 4096


def plan_clique(plan_input: PlanInput) -> Packets:
    """Plan few packets from the server, for any caches of at most 64 workers."""
    # If there are few samples or few sets of holders, this and ``ubershuffle`` both come close to the optimum. For such
    # instances both are tried and the better plan is taken, so it never needs more packets than ``ubershuffle``. For
    # larger ones this was observed, but is not guaranteed.
    # Samples that remain alone in a packet are sent in cycles where possible, as in ``leftover``.
    # Packets to start from, such as those that an ``aligned`` assignment was drawn with, are kept unchanged. Only the
    # samples that they do not deliver are packed.
    # Chung et al. (2017); see docs/papers.md. The paper builds packets within the table of one set, and Algorithm 4
    # fills gaps from tables of larger sets. We allow any clique as a packet: samples with different destinations, where
    # every destination holds all samples but its own.
    holders, destinations, n_workers = plan_input.holders, plan_input.destinations, plan_input.n_workers
    start, rest = plan_input.start, plan_input.missing_samples()
    if start is not None:
        rest = rest[np.isin(rest, start.samples, invert=True)]
    tables = Tables.of(holders[rest], destinations[rest], n_workers)
    members, offsets = pack_cliques(tables, n_workers, seed=plan_input.seed)
    alternatives = [(rest[tables.samples[members]], offsets)]
    if start is None and (len(rest) <= _FEW_SAMPLES or len(tables.masks) <= _FEW_TABLES):
        other = plan_ubershuffle(plan_input)
        alternatives.append((other.samples, other.offsets))
    plans = [_with_cycles(*packets, holders[:, 0], destinations, n_workers) for packets in alternatives]
    plan = min(plans, key=lambda each: each.n_packets)
    if start is None:
        return plan
    return _plan(
        np.concatenate([np.diff(start.offsets), np.diff(plan.offsets)]),
        np.concatenate([start.samples, plan.samples]),
        np.concatenate([start.destinations, plan.destinations]),
    )


def _with_cycles(samples: Samples, offsets: Samples, sets: Words, destinations: Ranks, n_workers: int) -> Packets:
    """Return the plan of these packets, with packets of one sample combined in cycles where possible."""
    sizes = np.diff(offsets)
    alone = samples[offsets[:-1][sizes == 1]]
    workers, lengths = destinations[alone].astype(np.int64), np.array([2, 3, 4, 6, n_workers])
    members, cycles = find_cycles(sets[alone], workers, *group_by(workers, n_workers), lengths)
    members = alone[members]
    kept = (sizes > 1) | ~np.isin(samples[offsets[:-1]], members)
    samples = samples[np.repeat(kept, sizes)]
    # Each packet has a sample and the next one, which goes to the destination of the cycle's last sample.
    links = np.delete(np.arange(len(members)), cycles[1:] - 1)
    ends = np.repeat(destinations[members[cycles[1:] - 1]], np.diff(cycles) - 1)
    chained = np.stack([members[links], members[links + 1]], axis=1).ravel()
    receivers = np.stack([destinations[members[links]], ends], axis=1).ravel()
    return _plan(
        np.concatenate([sizes[kept], np.full(len(links), 2)]),
        np.concatenate([samples, chained]),
        np.concatenate([destinations[samples], receivers]),
    )


def _plan(sizes: Samples, samples: Samples, destinations: Ranks) -> Packets:
    return Packets(starts_of(sizes), samples, destinations, np.full(len(sizes), SERVER, np.int32))


CODED = Delivery("coded", plan_coded, coded=True, needs_server=True, most_workers=MOST_WORKERS)
UBERSHUFFLE = Delivery("ubershuffle", plan_ubershuffle, coded=True, needs_server=True, most_workers=MOST_WORKERS)
LEFTOVER = Delivery("leftover", plan_leftover, coded=True, needs_server=True, refuses_excess=True)
CLIQUE = Delivery("clique", plan_clique, coded=True, needs_server=True, most_workers=MOST_WORKERS)


def coded_rate(n_samples: int, n_workers: int, capacity: int) -> float:
    """Number of packets per epoch of ``coded`` for uniformly random caches, in the limit of many samples."""
    # A needed sample with h holders counts ``1 / (h + 1)``. For such caches no code needs fewer packets on average, for
    # any number of samples. Caches of later epochs may allow fewer.
    # Chung et al. (2017), Theorem 2; see docs/papers.md. For caches without excess, its limit.
    n, share = n_workers, n_samples / n_workers
    p = max(0.0, (capacity - share) / (n_samples - share)) if n > 1 else 1.0
    each = n * (n - 1) / 2 if n * p < 1e-5 else (1 - p) / p**2 * (n * p - 1 + (1 - p) ** n)
    return share / n * each
