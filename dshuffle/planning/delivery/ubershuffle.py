"""``ubershuffle``: gaps in the packets of small sets are filled from the tables of larger ones (paper 000,
Algorithm 4).
"""

from __future__ import annotations

import numba
import numpy as np

from dshuffle.checks import as_integer
from dshuffle.planning.delivery.encoding_tables import Tables
from dshuffle.planning.grouping import group_by, lowest_bit, popcount
from dshuffle.planning.plan import Plan
from dshuffle.planning.types import Holders, Ranks


def plan_ubershuffle(holders: Holders, destinations: Ranks, n_workers: int, *, seed: int, depth: int = 2) -> Plan:
    """The packets of ``coded`` after samples have moved to tables of subsets whose columns are shorter.

    Parameters
    ----------
    depth
        How many workers larger a set may be whose table gives samples away, at least 1 (the paper's nu). The time
        grows with the number of such supersets: some tenths of a second for a million samples of 20 workers at
        depth 2, two seconds for a hundred thousand of 64.

    Raises
    ------
    InvalidParameter
        If the depth is below 1.

    References
    ----------
    Paper 000, Algorithm 4. It leaves open in which order sets of one size, and their supersets, are visited; we go
    by ascending mask in both, because opposite orders need up to 5 % more packets. Only tables of larger sets give
    and only those of sets whose turn it is receive, so that the packets of a set are final after its turn.
    """
    depth = as_integer("depth", depth, 1, "For no reallocation at all use the delivery 'coded'.")
    tables = Tables.of(holders, destinations, n_workers)
    by_size, layers = group_by(_sizes(tables.masks), n_workers + 1)
    packet_of = np.empty(len(tables.samples), dtype=np.int64)
    n_packets = _carpool(
        tables.masks, tables.columns, tables.starts, tables.workers, by_size, layers, min(depth, n_workers), packet_of
    )
    return tables.plan(packet_of, n_packets, destinations)


@numba.njit(nogil=True, cache=True)
def _sizes(masks):  # type: ignore[no-untyped-def]
    sizes = np.empty(masks.size, dtype=np.int64)
    for table in range(masks.size):
        sizes[table] = popcount(masks[table])
    return sizes


@numba.njit(nogil=True, cache=True)
def _carpool(  # type: ignore[no-untyped-def]
    masks, columns, starts, workers, by_size, layers, depth, packet_of
):
    """Give every sample its packet and return how many there are."""
    n_workers = layers.size - 2
    slots = _slots(masks)
    # What is left of a column begins at its head.
    heads = starts[:-1].copy()
    # The workers that have a column in each table, if only an empty one.
    wanted = np.zeros(masks.size, dtype=np.uint64)
    for table in range(masks.size):
        for column in range(columns[table], columns[table + 1]):
            wanted[table] |= np.uint64(1) << np.uint64(workers[column])
    lengths = np.zeros(n_workers, dtype=np.int64)
    others = np.empty(n_workers, dtype=np.uint64)
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
        n_others = 0
        for worker in range(n_workers):
            bit = np.uint64(1) << np.uint64(worker)
            if mask & bit == 0:
                others[n_others] = bit
                n_others += 1
            elif lengths[worker] < longest:
                short |= bit
        size = n_workers - n_others
        n_supersets = 1.0
        for extra in range(1, min(depth, n_others) + 1):
            n_supersets *= (n_others + 1 - extra) / extra
            place, end = layers[size + extra], layers[size + extra + 1]
            # A look-up costs about as much as passing eight tables by.
            by_scan = end - place < 8 * n_supersets
            chosen[:extra] = np.arange(extra)
            chosen[extra] = n_others
            while short != 0 and place < end:
                if by_scan:
                    giver = by_size[place]
                    place += 1
                    if masks[giver] & mask != mask:
                        continue
                else:
                    superset = mask
                    for i in range(extra):
                        superset |= others[chosen[i]]
                    giver = _find(slots, masks, superset)
                    if not _advance(chosen, extra):
                        place = end
                    if giver < 0:
                        continue
                gives = wanted[giver] & short
                while gives != 0:
                    worker = lowest_bit(gives)
                    bit = np.uint64(1) << np.uint64(worker)
                    gives ^= bit
                    column = columns[giver] + popcount(wanted[giver] & (bit - np.uint64(1)))
                    count = min(longest - lengths[worker], starts[column + 1] - heads[column])
                    for i in range(count):
                        packet_of[heads[column] + i] = n_packets + lengths[worker] + i
                    heads[column] += count
                    lengths[worker] += count
                    if lengths[worker] == longest:
                        short ^= bit
        n_packets += longest
    return n_packets


@numba.njit(nogil=True, cache=True)
def _advance(chosen, count):  # type: ignore[no-untyped-def]
    """Go to the next of the ascending choices of ``count`` numbers below ``chosen[count]``, if there is one.

    As masks the choices ascend, too.
    """
    place = 0
    while place < count and chosen[place] + 1 == chosen[place + 1]:
        chosen[place] = place
        place += 1
    if place < count:
        chosen[place] += 1
    return place < count


@numba.njit(nogil=True, cache=True)
def _slots(masks):  # type: ignore[no-untyped-def]
    """A hash table from mask to table: linear probing, at most half full, -1 where nothing is."""
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


@numba.njit(nogil=True, cache=True)
def _find(slots, masks, mask):  # type: ignore[no-untyped-def]
    """The table of a set, or -1."""
    slot = _hash(mask) & (slots.size - 1)
    while slots[slot] >= 0 and masks[slots[slot]] != mask:
        slot = (slot + 1) & (slots.size - 1)
    return slots[slot]


@numba.njit(nogil=True, cache=True)
def _hash(mask):  # type: ignore[no-untyped-def]
    return np.int64((mask * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32))
