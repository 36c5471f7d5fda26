"""``ubershuffle``: fill gaps in the packets of small sets from the tables of larger sets.

References
----------
Chung et al. (2017), Algorithm 4; see docs/papers.md. The paper does not specify the order in which sets of one size,
and their supersets, are visited. We visit both by ascending mask, because opposite orders need up to 5 % more
packets. Only the visited set receives samples, and only tables of larger sets give them, so the packets of a set are
final after its visit.
"""

from __future__ import annotations

import numpy as np

from dshuffle.checks import as_integer
from dshuffle.kernels import kernel
from dshuffle.planning.delivery.definition import PlanInput
from dshuffle.planning.delivery.packets_from_server import (
    MOST_WORKERS,
    PacketsFromServer,
    Tables,
)
from dshuffle.planning.epoch_plan import Packets
from dshuffle.planning.grouping import group_by, lowest_bit, popcount


def plan_ubershuffle(plan_input: PlanInput, depth: int = 2) -> Packets:
    """Plan the packets of ``coded`` after moving samples to tables of subsets with shorter columns."""
    depth = as_integer("depth", depth, 1, "Use the delivery 'coded' to move no samples.")
    n_workers = plan_input.n_workers
    tables = Tables.of(plan_input.holders, plan_input.destinations, n_workers)
    by_size, layers = group_by(_sizes(tables.masks), n_workers + 1)
    packet_of = np.empty(len(tables.samples), dtype=np.int64)
    n_packets = _carpool(
        tables.masks, tables.columns, tables.starts, tables.workers, by_size, layers, min(depth, n_workers), packet_of
    )
    return tables.plan(packet_of, n_packets, plan_input.destinations)


@kernel("(u8[::1],)")
def _sizes(masks):  # type: ignore[no-untyped-def]
    sizes = np.empty(masks.size, dtype=np.int64)
    for table in range(masks.size):
        sizes[table] = popcount(masks[table])
    return sizes


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
    """Advance to the next choice of ``count`` ascending numbers below ``chosen[count]``; return whether one exists.

    The masks of the choices ascend as well.
    """
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


class UberShuffle(PacketsFromServer):
    """The packets of ``coded``, with gaps filled from the tables of larger sets."""

    name = "ubershuffle"
    plan = staticmethod(plan_ubershuffle)
    most_workers = MOST_WORKERS


UBERSHUFFLE = UberShuffle()
