"""``clique``: packets grown greedily around the samples with the fewest holders (our own scheme)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.delivery.clique_packing import pack_cliques
from dshuffle.planning.delivery.definition import PlanInput
from dshuffle.planning.delivery.packets_from_server import PacketsFromServer, Tables
from dshuffle.planning.delivery.ubershuffle import plan_ubershuffle
from dshuffle.planning.epoch_plan import SERVER, Packets
from dshuffle.planning.grouping import count_holders, group_by, holds, lowest_bit, popcount
from dshuffle.planning.randomness import permutation
from dshuffle.planning.types import Holders, Ranks, Samples


def find_cycles(holders: Holders, workers: Samples, n_workers: int) -> tuple[Samples, Samples]:
    """Find disjoint cycles among needed samples, short ones first.

    Parameters
    ----------
    holders
        ``(S, words)`` masks of the needed samples.
    workers
        ``(S,)`` int64, the destinations of the samples.
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


_FEW_SAMPLES = 20_000
_FEW_TABLES = 4096


def plan_clique(plan_input: PlanInput) -> Packets:
    """Plan few packets from the server, for any caches and any number of workers.

    If there are few samples or few sets of holders, this and ``ubershuffle`` both come close to the optimum. For such
    instances both are tried and the better plan is taken, so it never needs more packets than ``ubershuffle``. For
    larger ones this was observed, but is not guaranteed.

    Samples that remain alone in a packet are sent in cycles where possible, as in ``leftover``.

    Packets to start from, such as those that an ``aligned`` assignment was drawn with, are kept unchanged. Only the
    samples that they do not deliver are packed.

    References
    ----------
    Chung et al. (2017); see docs/papers.md. The paper builds packets within the table of one set, and Algorithm 4
    fills gaps from tables of larger sets. We allow any clique as a packet: samples with different destinations, where
    every destination holds all samples but its own.
    """
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


class Clique(PacketsFromServer):
    """Packets grown around the samples with the fewest holders."""

    name = "clique"
    plan = staticmethod(plan_clique)


CLIQUE = Clique()
