"""What coded deliveries have in common: packets of several samples from a server that holds all rows."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.delivery.definition import (
    Demand,
    Excess,
    Loads,
    loads_of_hops,
)
from dshuffle.planning.delivery.relay import (
    MESSAGE_BYTES,
    RELAYS,
    WINDOW_BYTES,
    Batches,
    batch_sizes,
    packets_per_batch,
    route,
)
from dshuffle.planning.delivery.server import RowsFromServer
from dshuffle.planning.delivery.storage import STORAGE
from dshuffle.planning.epoch_plan import SERVER, Packets, missing_samples
from dshuffle.planning.grouping import group_by
from dshuffle.planning.types import Holders, Ranks, Samples, Words

MOST_WORKERS = 64
"""A set of workers is one machine word. Sets of more workers hardly ever repeat, so tables would not help."""

_DIGIT = 11


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Non-empty tables by ascending mask of their set, with columns by ascending destination.

    Parameters
    ----------
    masks
        ``(T,)`` uint64, the mask of each table's set.
    columns
        ``(T + 1,)`` int64; the non-empty columns of table t are ``columns[t]`` to ``columns[t + 1] - 1``.
    starts
        ``(C + 1,)`` int64; column c has the samples ``samples[starts[c]:starts[c + 1]]``, ascending.
    workers
        ``(C,)`` int32, the destination of each column.
    samples
        ``(D,)`` int64, the needed samples.
    """

    masks: Words
    columns: Samples
    starts: Samples
    workers: Ranks
    samples: Samples

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
    demands: ClassVar[int] = 3
    passes_on: ClassVar[str] = "packets"

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
        """Packets are sent in batches. A relay forwards each batch in one message to each of the other workers.

        In a ring, a worker sends one message to each of the others in every round but the last.
        """
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
        """Duration of a ring's second stage on a link, in rows; 0 for other relays.

        It is ``(U - P) / n`` if the rings of all groups keep all links busy, and ``P (m - 1) / m`` if one group follows
        the other. Measured durations are between the two.

        References
        ----------
        Chung et al. (2017), Theorem 4; see docs/papers.md. Scatter then ring takes ``P (2 m - 1) / m`` for a single
        group of m workers, and scattering takes P of it.
        """
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
