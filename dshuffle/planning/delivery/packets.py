"""Deliveries of packets from a server that holds all rows: ``coded`` and ``ubershuffle``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dshuffle.checks import as_integer
from dshuffle.kernels import kernel
from dshuffle.planning.delivery.definition import Delivery, PlanInput
from dshuffle.planning.epoch_plan import SERVER, Packets, missing_samples
from dshuffle.planning.types import Holders, Ranks, Samples, Words, count_each, group_by, lowest_bit, popcount

MOST_WORKERS = 64
"""A set of workers is one machine word. Sets of more workers hardly ever repeat, so tables would not help."""

_DIGIT = 11


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
        masks = holders[needed, 0] | (np.uint64(1) << workers.astype(np.uint64))
        order = group_by(workers, n_workers)[0]
        for shift in range(0, n_workers, _DIGIT):
            digits = (masks[order] >> np.uint64(shift)) & np.uint64((1 << _DIGIT) - 1)
            order = order[group_by(digits.astype(np.int64), 1 << _DIGIT)[0]]
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
        return Packets(offsets, samples, destinations[samples], np.full(n_packets, SERVER, dtype=np.int32))


def _differs(values: Words | Ranks) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each value differs from the one before it; True for the first."""
    differs = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs


def plan_coded(plan_input: PlanInput) -> Packets:
    """Plan as many packets from the server for every encoding table as its longest column has samples."""
    # The rate is that of Theorem 2 if the columns of a table are equally long, as they are for very many samples.
    # Otherwise the packets at the end of each table serve fewer and fewer workers.
    tables = Tables.of(plan_input.holders, plan_input.destinations, plan_input.n_workers)
    packet_of = np.empty(len(tables.samples), dtype=np.int64)
    n_packets = _encode(tables.columns, tables.starts, packet_of)
    return tables.plan(packet_of, n_packets, plan_input.destinations)


@kernel("(i8[::1], i8[::1], i8[::1])")
def _encode(columns, starts, packet_of):  # type: ignore[no-untyped-def]
    """Assign every sample to a packet and return the number of packets (Algorithm 2)."""
    n_packets = 0
    for table in range(columns.size - 1):
        longest = 0
        for column in range(columns[table], columns[table + 1]):
            for i in range(starts[column], starts[column + 1]):
                packet_of[i] = n_packets + i - starts[column]
            longest = max(longest, starts[column + 1] - starts[column])
        n_packets += longest
    return n_packets


def plan_ubershuffle(plan_input: PlanInput, depth: int = 2) -> Packets:
    """Plan the packets of ``coded`` after moving samples to tables of subsets with shorter columns."""
    depth = as_integer("depth", depth, 1, "Use the delivery 'coded' to move no samples.")
    n_workers = plan_input.n_workers
    tables = Tables.of(plan_input.holders, plan_input.destinations, n_workers)
    by_size, layers = group_by(count_each(tables.masks[:, np.newaxis], np.arange(len(tables.masks))), n_workers + 1)
    packet_of = np.empty(len(tables.samples), dtype=np.int64)
    n_packets = _carpool(
        tables.masks, tables.columns, tables.starts, tables.workers, by_size, layers, min(depth, n_workers), packet_of
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
    destinations = np.zeros(masks.size, dtype=np.uint64)
    for table in range(masks.size):
        for column in range(columns[table], columns[table + 1]):
            destinations[table] |= np.uint64(1) << np.uint64(workers[column])
    lengths = np.zeros(n_workers, dtype=np.int64)
    absent = np.empty(n_workers, dtype=np.uint64)
    chosen = np.empty(n_workers + 1, dtype=np.int64)
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
            bit = np.uint64(1) << np.uint64(worker)
            if mask & bit == 0:
                absent[n_absent] = bit
                n_absent += 1
            elif lengths[worker] < longest:
                short |= bit
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
                gives = destinations[giver] & short
                while gives != 0:
                    worker = lowest_bit(gives)
                    bit = np.uint64(1) << np.uint64(worker)
                    gives ^= bit
                    column = columns[giver] + popcount(destinations[giver] & (bit - np.uint64(1)))
                    count = min(longest - lengths[worker], starts[column + 1] - heads[column])
                    for i in range(count):
                        packet_of[heads[column] + i] = n_packets + lengths[worker] + i
                    heads[column] += count
                    lengths[worker] += count
                    if lengths[worker] == longest:
                        short ^= bit
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
    slots = np.full(size, -1, dtype=np.int32)
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


CODED = Delivery("coded", plan_coded, coded=True, needs_server=True, most_workers=MOST_WORKERS)
UBERSHUFFLE = Delivery("ubershuffle", plan_ubershuffle, coded=True, needs_server=True, most_workers=MOST_WORKERS)
