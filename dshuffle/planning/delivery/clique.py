"""``clique``: packets grown greedily around the samples with the fewest holders (our own scheme)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.delivery.definition import Delivery, PlanInput
from dshuffle.planning.delivery.packets import Tables, plan_ubershuffle
from dshuffle.planning.epoch_plan import SERVER, Packets
from dshuffle.planning.randomness import below, next_word, permutation, random_words
from dshuffle.planning.types import Holders, Ranks, Samples, count_each, group_by, holds, lowest_bit, popcount

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
    """Build bitsets for blocks of 512 samples of one destination, in ``order``."""
    # Bit i of ``held[block, worker]`` is set if the worker is in the set of sample i of the block. Bit i of
    # ``alive[block]`` is set until the sample is in a packet. ``layers[d, s]`` is the first block of destination d that
    # has a set of size s or more, and ``layers[d, -1]`` is the first block of the next destination.
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


def find_cycles(holders: Holders, workers: Samples, n_workers: int) -> tuple[Samples, Samples]:
    """Find disjoint cycles among needed samples, short ones first."""
    # holders: ``(S, words)`` masks of the needed samples.
    # workers: ``(S,)`` int64, the destinations of the samples.
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


_CANDIDATES = 512
"""Maximum number of candidates for one packet."""
_LISTED = 16
"""Maximum number of holders under which a sample is listed, to limit memory if samples have many holders."""


def pack_small_cliques(holders: Holders, workers: Samples, n_workers: int, *, seed: int) -> tuple[Samples, Samples]:
    """Assign every needed sample to a packet."""
    # As in :func:`pack_cliques`, a packet grows from a seed sample; samples with few holders are
    # seeds first. In each step it takes the sample that leaves the most other destinations possible. All candidates for
    # a packet, at most some hundreds, are collected at its start. They are samples for a holder of the seed that the
    # destination of the seed holds.
    # holders: ``(D, words)`` masks of the needed samples.
    # workers: ``(D,)`` int64, the destinations of the samples.
    sizes = count_each(holders, np.arange(len(holders)))
    seeds = permutation(len(workers), "clique", seed)
    seeds = seeds[group_by(sizes[seeds], n_workers + 1)[0]]
    packets: tuple[Samples, Samples] = _pack_listed(holders, workers, sizes, seeds, n_workers)
    return packets


@kernel()
def _pack_listed(holders, workers, sizes, seeds, n_workers):  # type: ignore[no-untyped-def]
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


_FEW_SAMPLES = 20_000
_FEW_TABLES = 4096


def plan_clique(plan_input: PlanInput) -> Packets:
    """Plan few packets from the server, for any caches and any number of workers."""
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
    seed, start = plan_input.seed, plan_input.start
    rest = plan_input.missing_samples()
    if start is not None:
        rest = rest[_not_delivered(start, rest, destinations)]
    alternatives: list[tuple[Samples, Samples]] = []
    if n_workers <= 64:
        tables = Tables.of(holders[rest], destinations[rest], n_workers)
        members, offsets = pack_cliques(tables, n_workers, seed=seed)
        alternatives.append((rest[tables.samples[members]], offsets))
        if start is None and (len(rest) <= _FEW_SAMPLES or len(tables.masks) <= _FEW_TABLES):
            other = plan_ubershuffle(plan_input)
            alternatives.append((other.samples, other.offsets))
    else:
        members, offsets = pack_small_cliques(holders[rest], destinations[rest].astype(np.int64), n_workers, seed=seed)
        alternatives.append((rest[members], offsets))
    plans = [_with_cycles(*packets, holders, destinations, n_workers) for packets in alternatives]
    plan = min(plans, key=lambda each: each.n_packets)
    if start is None:
        return plan
    return _plan(
        np.concatenate([np.diff(start.offsets), np.diff(plan.offsets)]),
        np.concatenate([start.samples, plan.samples]),
        np.concatenate([start.destinations, plan.destinations]),
    )


def _not_delivered(start: Packets, needed: Samples, destinations: Ranks) -> NDArray[np.bool_]:
    times = np.bincount(start.samples, minlength=len(destinations))
    ours = times[needed]
    if len(times) > len(destinations) or ours.sum() != start.n_components or ours.max(initial=0) > 1:
        raise InvalidParameter.because(
            "start",
            f"its {start.n_packets} packets deliver a sample twice or one that is not needed",
            "Give packets that deliver needed samples only, each once.",
        )
    missing: NDArray[np.bool_] = ours == 0
    return missing


def _with_cycles(samples: Samples, offsets: Samples, holders: Holders, destinations: Ranks, n_workers: int) -> Packets:
    """Return the plan of these packets, with packets of one sample combined in cycles where possible."""
    sizes = np.diff(offsets)
    alone = samples[offsets[:-1][sizes == 1]]
    members, cycles = find_cycles(holders[alone], destinations[alone].astype(np.int64), n_workers)
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
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Packets(offsets, samples, destinations, np.full(len(sizes), SERVER, dtype=np.int32))


CLIQUE = Delivery("clique", plan_clique, coded=True, needs_server=True)
