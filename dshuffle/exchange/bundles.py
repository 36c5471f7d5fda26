"""Rows in two hops: their bundles, and the participant that forwards them."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dshuffle.errors import ChecksumMismatch, ExchangeError
from dshuffle.exchange.endpoints import Meter, Network, Receiver, RowSink, RowSource, Sender
from dshuffle.exchange.inbox import Inbox
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.messages import Flow, Items, RowHolder
from dshuffle.planning.epoch_plan import STORE, forwarder_of
from dshuffle.rows import ByteMatrix, Checksums, RowLayout

logger = logging.getLogger(__name__)


HEADER = -1
"""In place of a sample: a row of a header."""


class Routes(Protocol):
    """The forwarder between every two workers. :class:`~dshuffle.planning.delivery.grid.WorkerGrid` is one."""

    @property
    def n_columns(self) -> int:
        """Number of bundles that a worker sends."""

    def column_of(self, rank: int) -> Items:
        """The destinations that a worker forwards to, ascending."""

    def forwarders_of(self, sender: int) -> list[int]:
        """The workers that a sender sends bundles to."""

    def forwarders_to(self, destination: int) -> list[int]:
        """The workers that a destination receives from, ascending."""

    def senders_through(self, forwarder: int) -> Items:
        """The senders whose rows a worker forwards, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class Bundles:
    """The bundles that a rank sends.

    Parameters
    ----------
    items
        ``(m,)`` sample of each row, or :data:`HEADER`.
    flows
        Forwarder -> flow of one message.
    counts
        First item of a bundle -> ``(k,)`` number of rows for each destination.
    """

    items: Items
    flows: dict[int, Flow]
    counts: dict[int, Items]

    @classmethod
    def of(cls, sends: Mapping[int, Items], routes: Routes, rank: int, row_nbytes: int) -> Bundles:
        """Bundle the samples that a rank sends to each destination."""
        nothing = np.empty(0, np.int64)
        items, flows, counts, first = [nothing], {}, {}, 0
        for forwarder in routes.forwarders_of(rank):
            samples = [sends.get(destination, nothing) for destination in routes.column_of(forwarder).tolist()]
            header = np.full(header_rows(len(samples), row_nbytes), HEADER)
            items += [header, *samples]
            counts[first] = np.array([len(ids) for ids in samples])
            last = first + len(header) + int(counts[first].sum())
            flows[forwarder_of(forwarder)] = Flow(np.array([first, last]))
            first = last
        return cls(np.concatenate(items), flows, counts)


class BundledRows:
    """The bundles that a rank sends in a run: a :class:`~dshuffle.exchange.endpoints.RowSource`."""

    def __init__(self, holder: RowHolder, bundles: Bundles) -> None:
        self._holder = holder
        self._bundles = bundles

    def pack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy the header and the rows of a bundle into buffers."""
        counts = self._bundles.counts[first]
        n_header = header_rows(len(counts), rows.shape[1])
        header = counts.tobytes()
        rows[:n_header] = np.frombuffer(header.ljust(n_header * rows.shape[1], b"\0"), np.uint8).reshape(n_header, -1)
        checksums[:n_header] = zlib.crc32(header)
        self._holder.pack(self._bundles.items[first + n_header : last], rows[n_header:], checksums[n_header:])


class ForwardedRows:
    """What a forwarder keeps of the bundles that it receives, and sends on once it has all of them.

    It is a :class:`~dshuffle.exchange.endpoints.RowSink` whose items are bundles, and a
    :class:`~dshuffle.exchange.endpoints.RowSource` whose items are rows, by destination and then by sender.

    Parameters
    ----------
    routes, rank
        The forwarders, and the worker that forwards.
    """

    intact = True
    n_loading = 0

    def __init__(self, routes: Routes, rank: int, layout: RowLayout) -> None:
        self._layout = layout
        self._column = routes.column_of(rank)
        self._senders = routes.senders_through(rank)
        self._rows = [layout.empty(0)] * len(self._senders)
        self._checksums: list[Checksums] = [np.empty(0, np.uint32)] * len(self._senders)
        self._counts = np.zeros((len(self._senders), len(self._column)), np.int64)
        self._sorted: tuple[Items, Items] | None = None

    @property
    def incoming(self) -> dict[int, Flow]:
        """Sender -> flow of its bundle."""
        return {int(sender): Flow(np.array([item, item + 1])) for item, sender in enumerate(self._senders)}

    def unpack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Keep a bundle. Its sender must not use the buffers again."""
        n_header = header_rows(len(self._column), self._layout.nbytes)
        header = rows[:n_header].tobytes()[: 8 * len(self._column)]
        if rows.shape[1] != self._layout.nbytes or len(checksums) != len(rows) or len(rows) < n_header:
            raise ExchangeError(f"a bundle has rows {rows.shape} and checksums {checksums.shape}")
        if (checksums[:n_header] != zlib.crc32(header)).any():
            raise ChecksumMismatch("the header of a bundle is corrupted")
        counts = np.frombuffer(header, np.int64)
        if counts.sum() != len(rows) - n_header:
            raise ExchangeError(f"a bundle has {len(rows) - n_header} rows, but its header says {counts.sum()}")
        self._rows[first], self._checksums[first], self._counts[first] = rows[n_header:], checksums[n_header:], counts

    async def load(self, first: int, last: int, stop: Callable[[], bool], *, recovers: bool) -> None:
        """Raise ExchangeError: a forwarder does not know the samples of a bundle."""
        raise ExchangeError("a bundle cannot be read from the store")

    def outgoing(self, *, at_most: int) -> dict[int, Flow]:
        """Destination -> flow of rows, in messages of at most ``at_most`` rows; call it once all bundles are here."""
        by_destination = self._counts.T
        starts = np.concatenate([[0], by_destination.cumsum()])
        places = self._counts.cumsum(axis=1) - self._counts
        self._sorted = starts, places
        firsts, totals = starts[:: len(self._senders)], by_destination.sum(axis=1)
        return {
            int(destination): Flow.evenly(int(first), int(total), at_most=at_most)
            for destination, first, total in zip(self._column, firsts, totals, strict=False)
            if total
        }

    def pack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy rows into buffers."""
        assert self._sorted is not None
        starts, places = self._sorted
        for piece in range(int(np.searchsorted(starts, first, "right")) - 1, int(np.searchsorted(starts, last))):
            destination, sender = divmod(piece, len(self._senders))
            begin, end = max(first, int(starts[piece])), min(last, int(starts[piece + 1]))
            source = slice(begin - starts[piece] + places[sender, destination], None)
            rows[begin - first : end - first] = self._rows[sender][source][: end - begin]
            checksums[begin - first : end - first] = self._checksums[sender][source][: end - begin]


def header_rows(n_destinations: int, row_nbytes: int) -> int:
    """Number of rows that hold the header of a bundle."""
    return -(-8 * n_destinations // row_nbytes)


def forwarded(receives: Mapping[int, Items], routes: Routes, rank: int) -> dict[int, Items]:
    """Sort the samples that a rank receives by forwarder: ``forwarder -> samples``, by sender."""
    samples_through = {}
    for forwarder in routes.forwarders_to(rank):
        samples = [receives[sender] for sender in routes.senders_through(forwarder).tolist() if sender in receives]
        if samples:
            samples_through[forwarder_of(forwarder)] = np.concatenate(samples)
    return samples_through


class Forwarder:
    """Forwards rows between other workers, in runs whose delivery has two hops.

    Requests for rows wait until all bundles are here, like requests for a run that has not begun. If a bundle cannot be
    fetched, the requests are refused, and the destinations read these rows from the store.

    Parameters
    ----------
    participant
        Its number as a participant.
    sender
        Sender of the forwarded rows.
    network, jobs
        Network of the session, and threads that keep bundles.
    timeout
        Seconds in which a request for a bundle must be answered.
    """

    def __init__(self, participant: int, sender: Sender, network: Network, jobs: JobQueue, *, timeout: float) -> None:
        self.sender = sender
        self.receiver = Receiver(
            Inbox(participant, window=1),
            network,
            jobs,
            store=STORE,
            report=self._received,
            timeout=timeout,
            open_gate=lambda run_id, gate: None,
        )
        self._rows: ForwardedRows | None = None
        self._at_most = self._answers = 1

    def begin(
        self, run_id: int, rows: ForwardedRows, *, requests: int, answers: int, at_most: int, resumed: bool
    ) -> None:
        """Start a run."""
        self._rows, self._at_most, self._answers = rows, at_most, answers
        self.sender.meter = Meter()
        sink: asyncio.Future[RowSink] = asyncio.get_running_loop().create_future()
        sink.set_result(rows)
        self.receiver.begin(run_id, rows.incoming, sink, window=requests, resumed=resumed)

    async def end(self) -> None:
        """End the run, finished or not. The caller of :meth:`begin` has the bundles."""
        self._rows = None
        self.sender.end()
        await self.receiver.abort()

    async def close(self) -> None:
        """End the run; no run will follow. The owner of the sender closes that one."""
        self._rows = None
        await self.receiver.close()

    def sit_out(self) -> None:
        """Measure nothing in a run whose rows take one hop."""
        self.sender.meter, self.receiver.meter = Meter(), Meter()

    def _received(self, run_id: int, reason: str | None, again: bool) -> None:
        rows = self._rows
        if rows is None:
            return
        if reason is not None:
            logger.warning("dshuffle: rows cannot be forwarded, and are read from the store: %s", reason)
            self.sender.refuse(run_id, reason)
            return
        source: asyncio.Future[RowSource] = asyncio.get_running_loop().create_future()
        source.set_result(rows)
        self.sender.begin(run_id, rows.outgoing(at_most=self._at_most), source, window=self._answers)


def with_forwarders(addresses: Mapping[int, str]) -> dict[int, str]:
    """Add the address of each rank's forwarder to the addresses of participants."""
    return dict(addresses) | {forwarder_of(rank): address for rank, address in addresses.items() if rank >= 0}
