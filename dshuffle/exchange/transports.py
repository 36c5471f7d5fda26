"""What carries the items of an exchange: rows, packets or bundles, and the registry of these."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

from dshuffle.exchange.bundles import BundledRows, Bundles, ForwardedRows, Routes, forwarded
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.endpoints import RowSink, RowSource
from dshuffle.exchange.messages import (
    MIB,
    ArrivingRows,
    Bring,
    Flow,
    Items,
    LeavingRows,
    RowHolder,
    flows_of_samples,
    rows_per_message,
)
from dshuffle.exchange.packet_flows import CodedPart, PacketDecoder, PacketStore
from dshuffle.planning import SERVER, STORE, EpochPlan, Packets, ShuffleSpec, WorkerPart, get_delivery
from dshuffle.planning.delivery.grid import WorkerGrid
from dshuffle.planning.delivery.relay import Hops, packets_per_batch, route
from dshuffle.planning.epoch_plan import in_disk_order
from dshuffle.planning.pacing import Pacing
from dshuffle.rows import RowLayout

ItemsInFlows = tuple[Items, dict[int, Flow]]


class MessageLimits(Protocol):
    """Limits of the messages of a session."""

    @property
    def message_bytes(self) -> int:
        """Size of a full message."""

    @property
    def window_bytes(self) -> int:
        """Bytes that a participant has under way at most."""

    @property
    def window(self) -> int:
        """Full messages that fit into ``window_bytes``."""


class ServerHolder(RowHolder, Protocol):
    """What the server has: every row, and packets that combine them."""

    def encoded(self, plan: Packets, leaving: Items) -> RowSource:
        """Make a source whose items are these packets of a plan."""


@dataclass(frozen=True, slots=True)
class Flows:
    """What the participants of a process send and receive in an exchange, in which messages.

    Parameters
    ----------
    sends, receives
        Participant -> the items that it sends or receives, and their flows. The items are samples. In a coded plan, the
        items sent are packets and the items received are components.
    at_most, requests, answers
        Maximum number of items in a message, of messages that a participant requests at once, and of messages that it
        answers at once. (A server that sends packets answers fewer.)
    acknowledged
        Whether receivers acknowledge the messages of this process.
    bundle_requests, row_answers
        Maximum number of bundles that a forwarder requests, and of messages with their rows that it answers at once.
    """

    sends: dict[int, ItemsInFlows]
    receives: dict[int, ItemsInFlows]
    at_most: int
    requests: int
    answers: int
    acknowledged: bool = True
    bundle_requests: int = 1
    row_answers: int = 1


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The plan of an epoch as one process needs it.

    Parameters
    ----------
    parts
        Participant of this process -> its part.
    epoch_plan
        The plan of the whole epoch; None if this worker has planned its own part alone.
    most_rows
        Largest number of samples that a worker trains on.
    layout, limits
        Layout of a row, and limits of messages.
    """

    spec: ShuffleSpec
    parts: Mapping[int, WorkerPart]
    epoch_plan: EpochPlan | None
    most_rows: int
    layout: RowLayout
    limits: MessageLimits


@dataclass(frozen=True)
class Transport(ABC):
    """How the items of one exchange travel, in one process. Those that exist are in ``transports.py``.

    Deliveries name their transports. The first epoch of a session, and what a lost worker had, is read from the store
    with the transport ``"rows"``, whatever the delivery.

    Attributes
    ----------
    name
        Name by which deliveries choose it.
    forwards
        Whether workers need a forwarder.
    encodes
        Whether packets are encoded and decoded, which is measured.
    readable
        Whether an item that does not arrive can be read from the store.
    kernels
        Modules whose kernels it calls.

    Parameters
    ----------
    plan
        The plan of the epoch.
    flows
        What this process sends and receives. None until it is known how fast the links are, if messages depend on that.
    """

    name: ClassVar[str]
    forwards: ClassVar[bool] = False
    encodes: ClassVar[bool] = False
    readable: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = ("rows", "exchange.cache_partition")

    plan: ProcessPlan
    flows: Flows | None = None

    @classmethod
    def of(cls, plan: ProcessPlan) -> Transport:
        """Make the transport of an exchange, as soon as it is planned."""
        return cls(plan)

    def for_disk(self, n_free: int) -> Transport:
        """The same exchange with rows in the order in which disks read them, if that matters."""
        return self

    @abstractmethod
    def with_messages(self, rate: float | None) -> Transport:
        """The same exchange with its items cut into messages, for links of a rate (bytes per second into a worker)."""

    @property
    def messages(self) -> Flows:
        """The flows, once items have been cut into messages."""
        assert self.flows is not None
        return self.flows

    def answered_by(self, participant: int) -> int:
        """Number of messages that a participant sends at once."""
        return self.messages.answers

    def answered_to_one_by(self, participant: int) -> int | None:
        """Number of messages to one destination that a participant sends at once; None for no limit of its own."""
        return None

    def reuses_buffers(self, participant: int) -> bool:
        """Whether a participant may use the buffers of a message again, once it has been received."""
        return True

    @abstractmethod
    def source(self, rank: int, cache: CachePartition) -> RowSource:
        """Make the source of the items that a rank sends."""

    @abstractmethod
    def served(self, server: ServerHolder) -> RowSource:
        """Make the source of the items that the server sends."""

    @abstractmethod
    def sink(
        self,
        rank: int,
        cache: CachePartition,
        source: RowSource,
        bring: Bring,
    ) -> RowSink:
        """Make the sink of the items that the rank receives; ``source`` is the source that it sends from."""

    def forwarded(self, rank: int) -> ForwardedRows | None:
        """Make what the rank of this process keeps as a forwarder; None if it forwards nothing."""
        return None


UNACKNOWLEDGED_BYTES = MIB // 4
"""Messages up to this length are not acknowledged. An acknowledgement costs nearly as much as a short message."""

SHORT_ROW = 16 * 2**10
"""Rows on a disk up to this length move to the order of the next epoch. Random reads of longer ones are fast."""


@dataclass(frozen=True)
class RowTransport(Transport):
    """Single rows. They are cut into messages only when the exchange begins, and the rates of links are known."""

    name: ClassVar[str] = "rows"

    def for_disk(self, n_free: int) -> Transport:
        """The same exchange with rows in the order in which disks read them (:mod:`dshuffle.planning.epoch_plan`)."""
        plan = self.plan
        seed, first = plan.spec.choices.seed, plan.spec.first_epoch
        short = plan.layout.nbytes <= SHORT_ROW

        def stored(epoch: int) -> int | None:
            last = plan.spec.choices.exchange_epochs.last(epoch - 1)
            return last if last > first else None

        parts = {
            participant: in_disk_order(
                part, seed=seed, stored=stored(part.epoch), moves_within=short and len(part.own) <= n_free
            )
            for participant, part in plan.parts.items()
            if participant >= 0
        }
        return dataclasses.replace(self, plan=dataclasses.replace(plan, parts={**plan.parts, **parts}))

    def with_messages(self, rate: float | None) -> Transport:
        """The same exchange with its rows cut into messages."""
        parts, limits, nbytes = self.plan.parts, self.plan.limits, self.plan.layout.nbytes
        pacing = Pacing.of(rate, message_bytes=limits.message_bytes, window_bytes=limits.window_bytes)
        served = any(SERVER in part.receives for part in parts.values()) or (
            SERVER in parts and bool(parts[SERVER].sends)
        )
        if served:  # one long message for each worker in turn, so that all move through the dataset together
            pacing = Pacing(limits.message_bytes, limits.window_bytes)
        at_most = rows_per_message(nbytes, pacing.message_nbytes)
        sends = {participant: self.sent_by(participant, part, at_most) for participant, part in parts.items()}
        receives = {
            participant: flows_of_samples(self.received_by(participant, part), at_most=at_most)
            for participant, part in parts.items()
        }
        leaving = _longest(sends) * nbytes
        answers = max(1, limits.window_bytes // max(1, leaving))
        requests = pacing.asked(_longest(receives) * nbytes)
        # Nothing but the requests limits what unacknowledged messages take, so all of them together must fit the
        # window.
        total = sum(len(items) for items, _ in sends.values()) * nbytes
        acknowledged = served or leaving > UNACKNOWLEDGED_BYTES or total > limits.window_bytes
        fitting = max(1, limits.window_bytes // (at_most * max(1, nbytes)))
        return self._cut(Flows(sends, receives, at_most, requests, answers, acknowledged, answers, fitting))

    def sent_by(self, participant: int, part: WorkerPart, at_most: int) -> ItemsInFlows:
        """The samples that a participant sends, in messages of at most ``at_most`` rows."""
        return flows_of_samples(part.sends, at_most=at_most)

    def received_by(self, participant: int, part: WorkerPart) -> Mapping[int, Items]:
        """Sender -> the samples that a participant receives from it."""
        return part.receives

    def source(self, rank: int, cache: CachePartition) -> RowSource:
        """Rows of the cache."""
        return LeavingRows(cache, self.messages.sends[rank][0])

    def served(self, server: ServerHolder) -> RowSource:
        """Rows of the dataset."""
        return LeavingRows(server, self.messages.sends[SERVER][0])

    def sink(
        self,
        rank: int,
        cache: CachePartition,
        source: RowSource,
        bring: Bring,
    ) -> RowSink:
        """Rows that go to free slots of the cache."""
        arriving, part = self.messages.receives[rank][0], self.plan.parts[rank]
        # A disk reads rows faster in the order of their slots. Rows from the store keep its order instead: they are
        # written through the memory map, and pages beside each other share faults.
        sorts = cache.on_disk and STORE not in part.receives
        positions = part.positions_of(arriving) if sorts else None
        return ArrivingRows(cache, arriving, cache.reserve(arriving, positions), bring)

    def _cut(self, flows: Flows) -> Self:
        return dataclasses.replace(self, flows=flows)


def _longest(lists: Mapping[int, ItemsInFlows]) -> int:
    return max([1, *(flow.longest for _, flows in lists.values() for flow in flows.values())])


@dataclass(frozen=True, kw_only=True)
class PacketTransport(Transport):
    """Packets. Their messages follow from the plan alone.

    Parameters
    ----------
    epoch_plan
        The plan of the epoch.
    hops
        The routes of its packets.
    """

    name: ClassVar[str] = "packets"
    encodes: ClassVar[bool] = True
    readable: ClassVar[bool] = False
    kernels: ClassVar[tuple[str, ...]] = (
        *Transport.kernels,
        "coding",
        "exchange.packet_flows",
        "planning.delivery.relay",
    )

    epoch_plan: EpochPlan
    hops: Hops

    @classmethod
    def of(cls, plan: ProcessPlan) -> Transport:
        """Route the packets, and cut their hops into messages. Without packets of several rows, rows travel alone."""
        assert plan.epoch_plan is not None
        packets, limits, n_workers = plan.epoch_plan.packets, plan.limits, plan.spec.n_workers
        if not packets.coded:
            return RowTransport(plan)
        fitting = rows_per_message(plan.layout.nbytes, limits.window_bytes)
        at_most = packets_per_batch(
            packets.n_packets,
            n_workers,
            plan.layout.nbytes,
            message_bytes=limits.message_bytes,
            window_bytes=limits.window_bytes,
        )
        # At any time at least one message is requested from every other participant (see Inbox), or a few if they fit
        # the window.
        requests = max(n_workers, min(fitting // at_most, 3 * n_workers))
        answers = max(limits.window, min(requests, 2 * n_workers))  # a relay answers two per worker
        hops = route(plan.spec.choices.relay, packets, n_workers, at_most)
        coded = {participant: CodedPart.of(packets, hops, participant, at_most=at_most) for participant in plan.parts}
        sends = {participant: (part.leaving, part.outgoing) for participant, part in coded.items()}
        receives = {participant: (part.arriving, part.incoming) for participant, part in coded.items()}
        flows = Flows(sends, receives, at_most, requests, answers)
        return cls(plan, flows, epoch_plan=plan.epoch_plan, hops=hops)

    def with_messages(self, rate: float | None) -> Transport:
        """The same exchange."""
        return self

    def answered_by(self, participant: int) -> int:
        """Number of messages that a participant sends at once.

        A server answers only a few requests at a time. If it answered all at once, workers with fast connections would
        be done early, and the packets that the others relay would be late.
        """
        return self.plan.limits.window if participant == SERVER else self.messages.answers

    def answered_to_one_by(self, participant: int) -> int | None:
        """An equal part of the server's window, if workers pass on packets while others come.

        They then have something to pass on at about the same time. With other relays it would only add pauses.
        """
        if participant != SERVER or self.plan.spec.choices.relay != "pipelined":
            return None
        return max(1, self.plan.limits.window // self.plan.spec.n_workers)

    def source(self, rank: int, cache: CachePartition) -> RowSource:
        """Packets that the rank passes on."""
        return PacketStore(cache.layout, self.messages.sends[rank][0])

    def served(self, server: ServerHolder) -> RowSource:
        """Packets that the server encodes."""
        return server.encoded(self.epoch_plan.packets, self.messages.sends[SERVER][0])

    def sink(
        self,
        rank: int,
        cache: CachePartition,
        source: RowSource,
        bring: Bring,
    ) -> RowSink:
        """Packets that are decoded into free slots of the cache, and passed on."""
        assert isinstance(source, PacketStore)
        arriving, packets = self.messages.receives[rank][0], self.epoch_plan.packets
        samples = packets.samples[arriving]
        is_kept = self.epoch_plan.ranks[samples] == rank
        return PacketDecoder(
            cache, packets, self.hops.packets, arriving, is_kept, cache.reserve(samples[is_kept]), source
        )


@dataclass(frozen=True)
class BundleTransport(RowTransport):
    """Rows in two hops. A subclass with other ``routes`` has other forwarders.

    Attributes
    ----------
    routes
        Number of workers -> the forwarders between them.

    Parameters
    ----------
    bundles
        Rank -> the bundles that it sends.
    """

    name: ClassVar[str] = "bundles"
    forwards: ClassVar[bool] = True
    routes: ClassVar[Callable[[int], Routes]] = WorkerGrid

    bundles: Mapping[int, Bundles] = field(default_factory=dict)

    def for_disk(self, n_free: int) -> Transport:
        """The same exchange: bundles are sorted by destination."""
        return self

    def with_messages(self, rate: float | None) -> Transport:
        """The same exchange with bundles in one message each; with single rows if those are better here."""
        plan, routes = self.plan, self._routes
        if not 0 < plan.most_rows * plan.layout.nbytes <= routes.n_columns * plan.limits.window_bytes:
            # A header does not fit into rows without bytes. Bundles beyond the window are slower than direct messages.
            return RowTransport(plan).with_messages(rate)
        bundles = {
            participant: Bundles.of(part.sends, routes, participant, plan.layout.nbytes)
            for participant, part in plan.parts.items()
            if participant >= 0
        }
        return RowTransport.with_messages(dataclasses.replace(self, bundles=bundles), rate)

    def sent_by(self, participant: int, part: WorkerPart, at_most: int) -> ItemsInFlows:
        """The bundles of a rank."""
        if (bundles := self.bundles.get(participant)) is None:
            return RowTransport.sent_by(self, participant, part, at_most)
        return bundles.items, bundles.flows

    def received_by(self, participant: int, part: WorkerPart) -> Mapping[int, Items]:
        """Forwarder -> the samples that a participant receives from it."""
        return forwarded(part.receives, self._routes, participant)

    def reuses_buffers(self, participant: int) -> bool:
        """Forwarders keep the buffers of bundles."""
        return participant not in self.bundles

    def source(self, rank: int, cache: CachePartition) -> RowSource:
        """Bundles of rows of the cache."""
        return BundledRows(cache, self.bundles[rank])

    def forwarded(self, rank: int) -> ForwardedRows | None:
        """Make what the rank keeps of bundles."""
        return ForwardedRows(self._routes, rank, self.plan.layout)

    @property
    def _routes(self) -> Routes:
        return type(self).routes(self.plan.spec.n_workers)


TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport for transport in (RowTransport, PacketTransport, BundleTransport)
}
"""Every transport by name. Deliveries name the one that they need."""


def transport_of(delivery: str) -> type[Transport]:
    """The transport of a delivery."""
    return TRANSPORTS[get_delivery(delivery).transport]
