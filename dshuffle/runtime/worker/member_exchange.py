"""The plan of an epoch as one worker process uses it: what it receives and sends, and in which messages."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import PlanError
from dshuffle.exchange.bundles import BundledRows, Bundles, ForwardedRows, forwarded
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.endpoints import RowSink, RowSource
from dshuffle.exchange.messages import MIB, Flow, flows_of_samples, rows_per_message
from dshuffle.exchange.packet_flows import CodedPart, PacketDecoder, PacketStore
from dshuffle.exchange.row_flows import ArrivingRows, LeavingRows
from dshuffle.planning import SERVER, STORE, EpochPlan, EpochPlanner, Packets, ShuffleSpec, WorkerPart, get_delivery
from dshuffle.planning.bijection import DRAW_VERSION
from dshuffle.planning.delivery.grid import WorkerGrid
from dshuffle.planning.delivery.relay import Hops, packets_per_batch, route
from dshuffle.planning.disk_order import in_disk_order
from dshuffle.planning.own_part import OwnPlanner
from dshuffle.planning.pacing import Pacing
from dshuffle.rows import RowLayout
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker.server_rows import EncodedPackets, ServerRows

UNACKNOWLEDGED_BYTES = MIB // 4
"""Messages up to this length are not acknowledged. An acknowledgement costs nearly as much as a short message."""

STORE_BYTES = 256 * MIB
"""Rows that are read from the store at a time. If reading fails, only these are read again."""

SHORT_ROW = 16 * 2**10
"""Rows on a disk up to this length move to the order of the next epoch. Random reads of longer ones are fast."""

Listed = tuple[NDArray[np.int64], dict[int, Flow]]
ReadFormer = Callable[[NDArray[np.int64], NDArray[np.int64], Callable[[], bool]], Awaitable[NDArray[np.int64]]]
ReadStore = Callable[[NDArray[np.int64], NDArray[np.int64], Callable[[], bool]], None]


@dataclass(frozen=True, slots=True)
class Flows:
    """What the participants of a process send and receive in an exchange, in which messages.

    Parameters
    ----------
    sends, receives
        Participant -> the items that it sends or receives, and their flows. The items are samples. In a coded plan, the
        items sent are packets and the items received are components.
    at_most, asked, answered
        Maximum number of items in a message, of messages that a participant requests at once, and of messages that it
        answers at once. (A server that sends packets answers fewer.)
    acknowledged
        Whether receivers acknowledge the messages of this process.
    bundles
        Rank -> the bundles that it sends, if rows take two hops.
    asked_bundles, answered_rows
        Maximum number of bundles that a forwarder requests, and of messages with their rows that it answers at once.
    """

    sends: dict[int, Listed]
    receives: dict[int, Listed]
    at_most: int
    asked: int
    answered: int
    acknowledged: bool = True
    bundles: dict[int, Bundles] = field(default_factory=dict)
    asked_bundles: int = 1
    answered_rows: int = 1


@dataclass(frozen=True, slots=True)
class MemberExchange:
    """The parts of an epoch's plan that concern this process, and a summary of the plan.

    Parameters
    ----------
    epoch_plan, hops
        The plan of the epoch, or None if this worker has planned its own part alone; and the routes of its packets if
        it is coded.
    parts
        Participant of this process -> its part.
    flows
        What the participants of this process send and receive, in which messages. Rows of an uncoded plan are cut into
        messages only when the exchange begins (:meth:`with_messages`).
    summary
        Values that participants report in their votes. The digest must be the same for all of them.
    seconds
        Duration of planning.
    shares
        Smallest and largest number of samples that a worker trains on.
    broadcast
        The samples that all workers train on.
    grid
        The grid of workers over which rows take two hops; None if they take one.
    """

    epoch_plan: EpochPlan | None
    hops: Hops | None
    parts: dict[int, WorkerPart]
    flows: Flows | None
    summary: dict[str, int]
    seconds: float
    shares: tuple[int, int]
    broadcast: NDArray[np.int64]
    grid: WorkerGrid | None = None

    @classmethod
    def alone(cls, planner: OwnPlanner, epoch: int, delivery: str) -> MemberExchange:
        """Plan this rank's part of an epoch, and nothing else."""
        started = time.perf_counter()
        spec, own = planner.spec, planner.plan(epoch, delivery)
        rank = planner.rank
        expected = own.n_received
        summary = {
            "packets": expected,
            "needed": expected,
            "expected": expected,
            "arriving": expected - len(own.part.receives.get(STORE, ())),
            "leaving": own.n_sent,
            "digest": zlib.crc32(f"{DRAW_VERSION} {spec.n_samples} {spec.history} {spec.choices} {epoch}".encode()),
        }
        seconds = time.perf_counter() - started
        grid = _grid(spec, epoch, delivery)
        return cls(None, None, {rank: own.part}, None, summary, seconds, own.shares, own.part.own[:0], grid)

    @classmethod
    def restoring(cls, planner: OwnPlanner | EpochPlanner, epoch: int, rank: int) -> MemberExchange:
        """Plan to read all that a rank holds in an epoch from the store."""
        if isinstance(planner, OwnPlanner):
            spec = dataclasses.replace(planner.spec, first_epoch=epoch)
            return cls.alone(OwnPlanner(spec, rank), epoch, spec.choices.delivery)
        started = time.perf_counter()
        made = planner.load(epoch)
        parts = {rank: made.for_worker(rank)}
        seconds = time.perf_counter() - started
        return cls(made, None, parts, None, {}, seconds, made.shares, made.broadcast)

    @classmethod
    def make(
        cls,
        planner: EpochPlanner,
        epoch: int,
        participants: Sequence[int],
        layout: RowLayout,
        settings: Settings,
        delivery: str,
    ) -> MemberExchange:
        """Plan the given epoch: the planner's next one, or one that it has just planned."""
        started = time.perf_counter()
        made = planner.current or planner.load()
        if made.epoch < epoch:
            made = planner.advance(delivery)
        elif epoch > planner.spec.first_epoch:  # an earlier call planned this epoch, perhaps for another delivery
            made = planner.again(epoch, delivery)
        if made.epoch != epoch:
            raise PlanError(f"epoch {epoch} was to be planned, but the planner is at epoch {made.epoch}")
        packets = made.packets
        summary = {
            "packets": packets.n_packets,
            "needed": made.n_needed,
            "expected": packets.n_components,
            "digest": made.digest(),
        }
        parts = {who: made.for_worker(who) for who in participants}
        hops, flows = None, None
        if packets.coded:
            hops, flows = _coded_flows(packets, parts, planner.spec, layout, settings)
        seconds = time.perf_counter() - started
        grid = _grid(planner.spec, epoch, delivery)
        return cls(made, hops, parts, flows, summary, seconds, made.shares, made.broadcast, grid)

    def for_disk(self, spec: ShuffleSpec, layout: RowLayout, n_free: int) -> MemberExchange:
        """The same exchange with rows in the order in which disks read them (:mod:`dshuffle.planning.disk_order`).

        Parameters
        ----------
        spec, layout
            Specification of the shuffle, and layout of a row.
        n_free
            Number of free slots of this worker.
        """
        if self.flows is not None or self.grid is not None:
            return self
        seed, first = spec.choices.seed, spec.first_epoch
        short = layout.nbytes <= SHORT_ROW
        parts = {
            who: in_disk_order(
                part, seed=seed, trained=part.epoch > first + 1, moves_within=short and len(part.own) <= n_free
            )
            for who, part in self.parts.items()
            if who >= 0
        }
        return dataclasses.replace(self, parts=self.parts | parts)

    def with_messages(self, layout: RowLayout, settings: Settings, rate: float | None) -> MemberExchange:
        """The same exchange with its rows cut into messages, for links of a rate (bytes per second into a worker)."""
        if self.flows is not None:
            return self
        pacing = Pacing.of(rate, message_bytes=settings.message_bytes, window_bytes=settings.window_bytes)
        grid = self.grid
        if grid is not None and not 0 < self.shares[1] * layout.nbytes <= grid.n_columns * settings.window_bytes:
            # A header does not fit into rows without bytes. Bundles beyond the window are slower than direct messages.
            grid = None
        flows = _uncoded_flows(self.parts, layout, settings, pacing, grid)
        return dataclasses.replace(self, flows=flows, grid=grid)

    @property
    def messages(self) -> Flows:
        """The flows, once rows have been cut into messages."""
        assert self.flows is not None
        return self.flows

    def answered_by(self, who: int, settings: Settings) -> int:
        """Number of messages that a participant sends at once.

        A server that sends packets answers only a few requests at a time, in the order of arrival. If it answered all
        at once, workers with fast connections would be done early, and the packets that the others relay would be late.
        """
        return settings.window if who == SERVER and self.hops is not None else self.messages.answered

    def outgoing(self, who: int) -> dict[int, Flow]:
        """Flows that a participant of this process sends, by destination."""
        return self.messages.sends[who][1]

    def incoming(self, rank: int) -> dict[int, Flow]:
        """Flows that the rank of this process receives, by sender."""
        return self.messages.receives[rank][1]

    def source(self, who: int, holder: CachePartition | ServerRows) -> RowSource:
        """Make the source of the items that a participant sends."""
        leaving = self.messages.sends[who][0]
        if (bundles := self.messages.bundles.get(who)) is not None:
            return BundledRows(holder, bundles)
        if self.hops is None:
            return LeavingRows(holder, leaving)
        if isinstance(holder, ServerRows):
            assert self.epoch_plan is not None
            return EncodedPackets(holder, self.epoch_plan.packets, leaving)
        return PacketStore(holder.layout, leaving)

    def forwarded(self, rank: int, layout: RowLayout) -> ForwardedRows | None:
        """Make what the rank of this process keeps as a forwarder, if rows take two hops."""
        return None if self.grid is None else ForwardedRows(self.grid, rank, layout)

    def sink(
        self,
        rank: int,
        cache: CachePartition,
        source: RowSource,
        read_store: ReadStore,
        read_former: ReadFormer | None = None,
    ) -> RowSink:
        """Make the sink of the items that the rank receives; ``source`` is the source that it sends from."""
        arriving = self.messages.receives[rank][0]
        if self.hops is None:
            # A disk reads rows faster in the order of their slots. Rows from the store keep its order instead: they are
            # written through the memory map, and pages beside each other share faults.
            part = self.parts[rank]
            sorts = cache.on_disk and STORE not in part.receives
            positions = part.positions_of(arriving) if sorts else None
            return ArrivingRows(cache, arriving, cache.reserve(arriving, positions), read_store, read_former)
        assert self.epoch_plan is not None
        packets = self.epoch_plan.packets
        assert isinstance(source, PacketStore)
        samples = packets.samples[arriving]
        wanted = self.epoch_plan.ranks[samples] == rank
        return PacketDecoder(
            cache, packets, self.hops.packets, arriving, wanted, cache.reserve(samples[wanted]), source
        )


def _grid(spec: ShuffleSpec, epoch: int, delivery: str) -> WorkerGrid | None:
    """The grid of workers over which the rows of an epoch take two hops, if they do. All workers agree on it."""
    moves = epoch > spec.first_epoch and spec.choices.assignment.moves
    return WorkerGrid(spec.n_workers) if moves and get_delivery(delivery).two_hops else None


def _uncoded_flows(
    parts: Mapping[int, WorkerPart], layout: RowLayout, settings: Settings, pacing: Pacing, grid: WorkerGrid | None
) -> Flows:
    served = any(SERVER in part.receives for part in parts.values()) or (SERVER in parts and bool(parts[SERVER].sends))
    if served:  # one long message for each worker in turn, so that all move through the dataset together
        pacing = Pacing(settings.message_bytes, settings.window_bytes)
    at_most = rows_per_message(layout.nbytes, pacing.message_nbytes)
    bundles = {}
    if grid is not None:
        bundles = {who: Bundles.of(part.sends, grid, who, layout.nbytes) for who, part in parts.items() if who >= 0}
    sends = {who: flows_of_samples(part.sends, at_most=at_most) for who, part in parts.items()}
    sends |= {who: (bundle.items, bundle.flows) for who, bundle in bundles.items()}
    at_most_from = {STORE: rows_per_message(layout.nbytes, STORE_BYTES)}
    receives = {
        who: flows_of_samples(
            part.receives if grid is None else forwarded(part.receives, grid, who),
            at_most=at_most,
            at_most_from=at_most_from,
        )
        for who, part in parts.items()
    }
    leaving = _longest(sends) * layout.nbytes
    answered = max(1, settings.window_bytes // max(1, leaving))
    asked = pacing.asked(_longest(receives) * layout.nbytes)
    if any(STORE in part.receives for part in parts.values()):
        asked = max(asked, 2)  # one is read while another waits for the thread that reads
    # Nothing but the requests limits what unacknowledged messages take, so all of them together must fit the window.
    total = sum(len(items) for items, _ in sends.values()) * layout.nbytes
    acknowledged = served or leaving > UNACKNOWLEDGED_BYTES or total > settings.window_bytes
    fitting = max(1, settings.window_bytes // (at_most * max(1, layout.nbytes)))
    return Flows(sends, receives, at_most, asked, answered, acknowledged, bundles, answered, fitting)


def _coded_flows(
    packets: Packets, parts: Mapping[int, WorkerPart], spec: ShuffleSpec, layout: RowLayout, settings: Settings
) -> tuple[Hops, Flows]:
    n_workers = spec.n_workers
    fitting = rows_per_message(layout.nbytes, settings.window_bytes)
    at_most = packets_per_batch(
        packets.n_packets,
        n_workers,
        layout.nbytes,
        message_bytes=settings.message_bytes,
        window_bytes=settings.window_bytes,
    )
    # At any time at least one message is requested from every other participant (see Inbox), or a few if they fit the
    # window.
    asked = max(n_workers, min(fitting // at_most, 3 * n_workers))
    answered = max(settings.window, min(asked, 2 * n_workers))  # a relay answers two per worker
    hops = route(spec.choices.relay, packets, n_workers, at_most)
    coded = {who: CodedPart.of(packets, hops, who, at_most=at_most) for who in parts}
    sends = {who: (part.leaving, part.outgoing) for who, part in coded.items()}
    receives = {who: (part.arriving, part.incoming) for who, part in coded.items()}
    return hops, Flows(sends, receives, at_most, asked, answered)


def _longest(lists: Mapping[int, Listed]) -> int:
    return max([1, *(flow.longest for _, flows in lists.values() for flow in flows.values())])
