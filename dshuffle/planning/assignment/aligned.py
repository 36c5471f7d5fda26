"""``aligned``: a random draw made so that coded deliveries pack it perfectly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.assignment.balance import balanced_sizes
from dshuffle.planning.assignment.rules import Assignment, Draw, EpochDraw
from dshuffle.planning.epoch_plan import SERVER, Packets
from dshuffle.planning.exchange_epochs import share_sizes
from dshuffle.planning.randomness import below, next_word, permutation, random_words, shuffle
from dshuffle.planning.types import ONE, Holders, Samples, bit, each_holder, group_by, holds, set_name


def draw_aligned(holders: Holders, room: Samples, *path: int | str) -> EpochDraw:
    """Draw destinations for all samples, so that as few packets as possible deliver them, and perfect packets."""
    # A perfect packet has one sample for every worker of a set, and all other workers of the set hold that sample.
    # There are four steps. In each step, equivalent samples and workers have equal chances.
    # 1. A sample stays with one of its c holders with probability c / n, as in a uniform draw. Of the samples with the
    # same holders, in random order, a fraction c / n stays, which leaves the sets even.
    # 2. Samples in random order look for a destination to which a perfect packet can take them. The destination and the
    # holders of the sample form a set I, and every worker of I can get a sample that exactly the other workers of I
    # hold. At most 64 workers are tried, starting with a random one. Of the first eight with a perfect packet, the one
    # that leaves most samples for further packets is taken.
    # 3. Packets with one gap are drawn next, then with two gaps, and so on up to c / 2. They are not returned, because
    # a packing that considers all sets can fill some of the gaps. With an average of a samples per set there are at
    # most 1.5 a - 1 gaps: otherwise samples that are alone in their set would be combined with the same ones
    # repeatedly.
    # 4. The remaining samples are assigned to the remaining room at random, and not to their own holders if possible.
    # With the caching policy ``even``, nearly all packets are perfect if there are more samples than sets of c + 1
    # workers. With other policies fewer packets are perfect, but the draw remains valid.
    # room: ``(n,)`` int64, the number of samples that each worker gets.
    n_workers = len(room)
    names = random_words(n_workers, "sets")
    states = random_words(3, "aligned", *path)
    room = room.copy()
    destinations = np.full(len(holders), -1, np.int32)
    groups, heads, table = _group(holders, names)
    sets = holders[heads]
    mixed = permutation(len(holders), "aligned", *path)
    turns = groups[mixed]
    order, starts = group_by(turns, len(sets))
    order = mixed[order]
    left = _stay(sets, order, starts, room, destinations, states[0])
    members, offsets = _draw_packets(sets, order, left, starts[1:], turns, table, names, room, destinations, states[1])
    rest = np.flatnonzero(destinations < 0)
    open_places = np.repeat(np.arange(n_workers, dtype=np.int32), room)
    shuffle(open_places, "aligned rest", *path)
    _assign_rest(holders, rest, open_places, destinations, states[2])
    senders = np.full(len(offsets) - 1, SERVER, np.int32)
    return EpochDraw(destinations, Packets(offsets, members, destinations[members], senders))


@kernel("(u8[:,::1], u8[::1])")
def _group(holders, names):  # type: ignore[no-untyped-def]
    """Group the samples by their set of holders."""
    # Returns the group of every sample, the first sample of each group, and a hash table of groups: linear probing from
    # the name of the set, -1 in free slots.
    size = 2
    while size < 2 * holders.shape[0]:
        size *= 2
    slots = np.full(size, -1, np.int32)
    groups = np.empty(holders.shape[0], np.int32)
    heads = np.empty(holders.shape[0], np.int64)
    n_groups = 0
    for sample in range(holders.shape[0]):
        slot = np.int64(set_name(holders, sample, names) >> ONE) & (size - 1)
        while slots[slot] >= 0 and not _like(holders, heads[slots[slot]], sample, 0, 0):
            slot = (slot + 1) & (size - 1)
        if slots[slot] < 0:
            slots[slot] = n_groups
            heads[n_groups] = sample
            n_groups += 1
        groups[sample] = slots[slot]
    return groups, heads[:n_groups], slots


@kernel()
def _like(holders, sample, model, left, joined):  # type: ignore[no-untyped-def]
    """Whether a sample has the holders of ``model`` after worker ``left`` has left and worker ``joined`` has joined."""
    # If ``left`` equals ``joined``, the sets must be equal.
    for word in range(holders.shape[1]):
        expected = holders[model, word]
        if left >> 6 == word:
            expected ^= bit(left)
        if joined >> 6 == word:
            expected ^= bit(joined)
        if holders[sample, word] != expected:
            return False
    return True


@kernel()
def _workers_of(holders, sample, workers):  # type: ignore[no-untyped-def]
    """Write the holders of a sample to ``workers``, ascending, and return their number."""
    count = 0
    for worker in each_holder(holders, sample):
        workers[count] = worker
        count += 1
    return count


@kernel("(u8[:,::1], i8[::1], i8[::1], i8[::1], i4[::1], u8)")
def _stay(sets, order, starts, room, destinations, state):  # type: ignore[no-untyped-def]
    """Let some samples of every group stay with one of their holders."""
    # Returns the offset in ``order`` of the first sample of each group that does not stay.
    n_workers = room.size
    left = starts[:-1].copy()
    workers = np.empty(n_workers, np.int64)
    state, word = next_word(state)
    # Systematic sampling: sum up the expected numbers of the groups; a sample stays at each whole number reached.
    share = below(word, n_workers)
    for group in range(left.size):
        begin, end = starts[group], starts[group + 1]
        size = _workers_of(sets, group, workers)
        share += (end - begin) * size
        state, word = next_word(state)
        turn = below(word, max(size, 1))
        for _ in range(share // n_workers):
            for _ in range(size):
                worker = workers[turn]
                turn = (turn + 1) % size
                if room[worker] > 0:
                    room[worker] -= 1
                    destinations[order[left[group]]] = worker
                    left[group] += 1
                    break
        share %= n_workers
    return left


@kernel("(u8[:,::1], i8[::1], i8[::1], i8[::1], i4[::1], i4[::1], u8[::1], i8[::1], i4[::1], u8)")
def _draw_packets(  # type: ignore[no-untyped-def]
    sets, order, left, ends, turns, slots, names, room, destinations, state
):
    """Assign samples packet by packet, and return the packets that are perfect."""
    # Group g can give the samples ``order[left[g]:ends[g]]``. The groups in ``turns`` start a packet one after the
    # other.
    waiting = turns.copy()
    n_waiting = waiting.size
    members = np.empty(n_waiting, np.int64)
    offsets = np.zeros(n_waiting + 1, np.int64)
    n_perfect, n_members = 0, 0
    workers = np.empty(room.size, np.int64)
    givers = np.empty(room.size, np.int64)
    best_givers = givers.copy()
    # The fewest gaps that a packet from a group can have. It only grows, because groups only shrink.
    fewest = np.zeros(ends.size, np.int64)
    gaps = 0
    while n_waiting > 0 and (gaps == 0 or 2 * (gaps + 1) * ends.size <= 3 * order.size):
        still = 0
        for i in range(n_waiting):
            group = waiting[i]
            if left[group] >= ends[group]:
                continue
            size = _workers_of(sets, group, workers)
            if 2 * gaps > size:
                continue
            waiting[still] = group
            still += 1
            if fewest[group] > gaps:
                continue
            state, word = next_word(state)
            destination, fewest[group] = _choose(
                sets, left, ends, slots, names, room, workers[:size], group, word, givers, best_givers
            )
            if fewest[group] > gaps or size == 0:
                continue
            best_givers[size], workers[size] = group, destination
            for k in range(size + 1):
                giver = best_givers[k]
                if giver >= 0:
                    sample = order[left[giver]]
                    left[giver] += 1
                    destinations[sample] = workers[k]
                    room[workers[k]] -= 1
                    if gaps == 0:
                        members[n_members] = sample
                        n_members += 1
            if gaps == 0:
                n_perfect += 1
                offsets[n_perfect] = n_members
        n_waiting = still
        gaps += 1
    return members[:n_members], offsets[: n_perfect + 1]


@kernel()
def _choose(  # type: ignore[no-untyped-def]
    sets, left, ends, slots, names, room, workers, group, word, givers, best_givers
):
    """Choose the destination that gives a sample of a group the best packet; also return the number of gaps."""
    # ``best_givers[k]`` is the group that gives a sample to ``workers[k]``, one of the group's holders, or -1.
    base = np.uint64(0)
    for worker in workers:
        base ^= names[worker]
    best, fewest, most = np.int64(-1), workers.size + 1, np.int64(0)
    start, n_perfect = below(word, room.size), 0
    for i in range(min(room.size, 64)):
        destination = (start + i) % room.size
        if room[destination] == 0 or holds(sets, group, destination):
            continue
        gaps, depth = 0, ends[group] - left[group]
        for k in range(workers.size):
            givers[k] = -1
            if room[workers[k]] > 0:
                name = base ^ names[workers[k]] ^ names[destination]
                slot = np.int64(name >> ONE) & (slots.size - 1)
                while slots[slot] >= 0 and not _like(sets, slots[slot], group, workers[k], destination):
                    slot = (slot + 1) & (slots.size - 1)
                giver = slots[slot]
                if giver >= 0 and left[giver] < ends[giver]:
                    givers[k] = giver
                    depth = min(depth, ends[giver] - left[giver])
            gaps += givers[k] < 0
            if gaps > fewest:
                break
        if gaps < fewest or (gaps == fewest and depth > most):
            best, fewest, most = destination, gaps, depth
            for k in range(workers.size):
                best_givers[k] = givers[k]
        n_perfect += gaps == 0
        if n_perfect == 8:
            break
    return best, fewest


@kernel("(u8[:,::1], i8[::1], i4[::1], i4[::1], u8)")
def _assign_rest(holders, rest, open_places, destinations, state):  # type: ignore[no-untyped-def]
    for i in range(rest.size):
        tries = 0
        while holds(holders, rest[i], open_places[i]) and tries < 16:
            state, word = next_word(state)
            j = i + below(word, rest.size - i)
            open_places[i], open_places[j] = open_places[j], open_places[i]
            tries += 1
        destinations[rest[i]] = open_places[i]


@dataclass(frozen=True, slots=True)
class Aligned(Assignment):
    """A random draw over all samples, made so that coded deliveries pack perfectly."""

    # It needs fewer packets than ``global``, and far fewer with the caching policy ``even``. Samples with the same
    # worker and the same holders meet again less often than with ``global``, and hardly ever if few samples share their
    # holders.

    name: ClassVar[str] = "aligned"
    forms: ClassVar[str] = "'aligned'"
    needs_holders: ClassVar[bool] = True
    preferred_caching: ClassVar[str] = "even"
    can_weigh: ClassVar[bool] = True

    @property
    def redraws_all(self) -> bool:
        return True

    def draw(self, draw: Draw) -> EpochDraw:
        if draw.holders is None:
            raise InvalidParameter.of("holders", None, "the holder masks, which the assignment 'aligned' needs")
        n_samples, n, path = draw.n_samples, draw.n_workers, (draw.seed, draw.epoch)
        weights = draw.weights
        room = share_sizes(n_samples, weights) if weights else balanced_sizes(n_samples, n, "aligned", *path)
        return draw_aligned(draw.holders, room, *path)
