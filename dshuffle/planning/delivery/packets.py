"""Deliveries of packets from a server that holds all rows: ``coded`` and ``ubershuffle``."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.kernels import kernel
from dshuffle.planning.delivery.definition import Demand, Excess, Loads, PlanInput, loads_of_hops
from dshuffle.planning.delivery.relay import (
    MESSAGE_BYTES,
    RELAYS,
    WINDOW_BYTES,
    Batches,
    batch_sizes,
    packets_per_batch,
    route,
)
from dshuffle.planning.delivery.rows import STORAGE, RowsFromServer
from dshuffle.planning.epoch_plan import SERVER, Packets, missing_samples
from dshuffle.planning.types import Holders, Ranks, Samples, Words, group_by, lowest_bit, popcount

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


BATCH = 8192
"""Packets that a relay forwards together where loads are counted. The number hardly affects what each worker sends."""

RING_WAITS = 1.6
"""Time of a ring relative to links that are never idle; it is longer because rounds wait for each other.

Fitted to measurements with 8 workers: 1.3 and 1.4 at cache fractions of 0.2 and 0.35, 1.9 at 0.5, and 1.6 at 0.5 with
more samples.
"""


class PacketsFromServer(RowsFromServer):
    """Deliveries whose packets combine several samples. A relay brings each packet to all of its destinations."""

    transport: ClassVar[str] = "packets"
    coded: ClassVar[bool] = True
    server_holds_all: ClassVar[bool] = True
    excess: ClassVar[Excess] = Excess.USED
    demands: ClassVar[int] = 2

    @property
    def last_resort(self) -> str:
        """The store: a packet that cannot be decoded spoils the rows that depend on it."""
        return STORAGE.name

    def gains_by(self, *, needs_holders: bool, in_chunks: bool, excess: bool) -> bool:
        """Chunks leave nothing to combine. Without excess, an assignment cannot be drawn for packets."""
        return not in_chunks and (excess or not needs_holders)

    def passed_on(self, n_workers: int, *, relay: str, in_chunks: bool, most_incoming: int) -> int:
        """A worker only relays packets from which it decodes a sample."""
        return 0 if relay == "unicast" else most_incoming

    def counted_loads(self, demand: Demand, plan: Packets) -> Loads:
        """Count the hops of a relay. A larger job has fewer packets for each sample."""
        rows, packets = float(plan.n_components), float(plan.n_packets) * demand.fewer
        hops = route(demand.relay, plan, demand.n_workers, BATCH)
        sent = float(np.count_nonzero(hops.senders == SERVER))
        if demand.relay != "unicast":
            sent *= demand.fewer
        row = demand.wire_nbytes * demand.growth
        links = loads_of_hops(demand, hops.senders, plan.destinations, row, sent=sent)
        degrees = np.diff(plan.offsets)[hops.packets]
        read_rows = np.bincount(plan.destinations, degrees, minlength=demand.n_workers) / demand.fewer
        links["decoded"] = read_rows * demand.growth * demand.row_nbytes
        return dataclasses.replace(
            demand.no_loads(packets=packets * demand.growth),
            **links,
            encoded=rows * demand.growth * demand.row_nbytes,
            passed_on=self._passed_on_in_a_ring(demand, rows, packets) * row,
        )

    def pair_count(self, n_workers: int, relay: str) -> int:
        """The server sends to every worker. As relays, workers send to each other."""
        return n_workers if relay == "unicast" else n_workers * n_workers

    def message_count(self, loads: Loads, row_nbytes: int, relay: str, rate: float) -> float:
        """Packets are sent in batches. A relay forwards each batch in one message to each of the other workers."""
        # In a ring, a worker sends one message to each of the others in every round but the last.
        n, rows, packets = len(loads.worker_in), loads.rows_received(row_nbytes), round(loads.packets)
        if relay == "pipelined":
            return min(rows, _pipelined_messages(packets, n, row_nbytes, rows))
        batches = rows / packets_per_batch(packets, n, row_nbytes)
        if relay == "unicast":
            return max(float(min(n, rows)), batches)
        rounds = float(loads.worker_in.sum()) / loads.server_out - 1
        return min(rows, n * (1 + (n - 1) * rounds) + batches)

    def batches(self, loads: Loads, row_nbytes: int, relay: str) -> Batches | None:
        """The batches of a pipelined relay. The server sends equally many to each worker at a time."""
        if relay != "pipelined" or loads.packets < 1:
            return None
        return _batches(round(loads.packets), len(loads.worker_in), row_nbytes)

    @property
    def relays(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(RELAYS)

    def label(self, relay: str) -> str:
        """Its name and the relay."""
        return f"{self.name}, {relay}"

    @property
    def family(self) -> str:
        """The fastest code is enough."""
        return "any coded delivery"

    @staticmethod
    def _passed_on_in_a_ring(demand: Demand, components: float, packets: float) -> float:
        """Duration of a ring's second stage on a link, in rows; 0 for other relays."""
        # It is ``(U - P) / n`` if the rings of all groups keep all links busy, and ``P (m - 1) / m`` if one group
        # follows the other. Measured durations are between the two.
        # Chung et al. (2017), Theorem 4; see docs/papers.md. Scatter then ring takes ``P (2 m - 1) / m`` for a single
        # group of m workers, and scattering takes P of it.
        if demand.relay != "ring" or not components:
            return 0.0
        return min(RING_WAITS * (components - packets) / demand.n_workers, packets * (1 - packets / components))


@functools.lru_cache(maxsize=256)  # called again for every scaled cluster
def _sizes(packets: int, n_workers: int, row_nbytes: int) -> NDArray[np.int64]:
    """Return the sizes of a worker's batches."""
    return np.array(batch_sizes(packets, n_workers, row_nbytes))


@functools.lru_cache(maxsize=256)
def _pipelined_messages(packets: int, n_workers: int, row_nbytes: int, rows: float) -> float:
    """Return the number of messages of a pipelined relay."""
    n, sizes = n_workers, _sizes(packets, n_workers, row_nbytes)
    # Probability that another worker needs a packet. A batch without one is not sent to it.
    probability = min(1.0, (rows / packets - 1) / max(1, n - 1))
    handed_on = n * (n - 1) * float((1 - (1 - probability) ** sizes).sum())
    return n * len(sizes) + handed_on


@functools.lru_cache(maxsize=256)
def _batches(packets: int, n_workers: int, row_nbytes: int) -> Batches:
    return Batches.of(_sizes(packets, n_workers, row_nbytes), WINDOW_BYTES // MESSAGE_BYTES // n_workers)


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


class Coded(PacketsFromServer):
    """Packets of one sample from every column of an encoding table."""

    name = "coded"
    plan = staticmethod(plan_coded)
    most_workers = MOST_WORKERS


CODED = Coded()


def plan_ubershuffle(plan_input: PlanInput, depth: int = 2) -> Packets:
    """Plan the packets of ``coded`` after moving samples to tables of subsets with shorter columns."""
    depth = as_integer("depth", depth, 1, "Use the delivery 'coded' to move no samples.")
    n_workers = plan_input.n_workers
    tables = Tables.of(plan_input.holders, plan_input.destinations, n_workers)
    by_size, layers = group_by(_set_sizes(tables.masks), n_workers + 1)
    packet_of = np.empty(len(tables.samples), dtype=np.int64)
    n_packets = _carpool(
        tables.masks, tables.columns, tables.starts, tables.workers, by_size, layers, min(depth, n_workers), packet_of
    )
    return tables.plan(packet_of, n_packets, plan_input.destinations)


@kernel("(u8[::1],)")
def _set_sizes(masks):  # type: ignore[no-untyped-def]
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


class UberShuffle(PacketsFromServer):
    """The packets of ``coded``, with gaps filled from the tables of larger sets."""

    name = "ubershuffle"
    plan = staticmethod(plan_ubershuffle)
    most_workers = MOST_WORKERS


UBERSHUFFLE = UberShuffle()
