"""What carries the items of an exchange: rows or packets."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dshuffle.coding import add_packets, decode, encode
from dshuffle.errors import ChecksumMismatch, ExchangeError
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
    flows_of_hops,
    flows_of_samples,
    rows_per_message,
)
from dshuffle.kernels import kernel
from dshuffle.planning import SERVER, STORE, EpochPlan, Packets, ShuffleSpec, WorkerPart, get_delivery
from dshuffle.planning.delivery.relay import Hops, Pacing, packets_per_batch, route
from dshuffle.planning.epoch_plan import in_disk_order
from dshuffle.planning.types import sorted_positions
from dshuffle.rows import ByteMatrix, Checksums, RowLayout, checksum_rows

ItemsInFlows = tuple[Items, dict[int, Flow]]
"""Items, and the flows that they are in."""


def coded_part(plan: Packets, hops: Hops, participant: int, *, at_most: int) -> tuple[ItemsInFlows, ItemsInFlows]:
    """What a participant sends and receives in a coded run, in messages of at most ``at_most`` packets."""
    # The items that it sends are packets, and those that it receives are components of the plan.
    groups = np.maximum(hops.waits_for, hops.opens)
    away, ended = np.flatnonzero(hops.senders == participant), np.flatnonzero(plan.destinations == participant)
    sent, outgoing = flows_of_hops(plan.destinations[away], groups[away], hops.waits_for[away], at_most=at_most)
    order, incoming = flows_of_hops(hops.senders[ended], groups[ended], hops.opens[ended], at_most=at_most)
    return (hops.packets[away[sent]], outgoing), (ended[order], incoming)


class PacketStore:
    """The packets that a worker forwards: stores arriving packets and is the source of the worker's sender."""

    # layout: layout of a row; a packet has the same size.
    # leaving: ``(k,)`` packet of each item to send.

    def __init__(self, layout: RowLayout, leaving: Items) -> None:
        self.packets, places = np.unique(leaving, return_inverse=True)
        self._leaving = places.astype(np.int64)
        self._rows = layout.empty(len(self.packets))
        self._checksums: Checksums = np.empty(len(self.packets), dtype=np.uint32)

    def find(self, packets: Items) -> Items:
        """Return the position of each packet in this store, or -1 if it is not forwarded."""
        return sorted_positions(self.packets, packets)

    def keep(self, places: Items, rows: ByteMatrix, checksums: Checksums) -> None:
        """Store the packets with a nonnegative position; ignore the others."""
        is_kept = places >= 0
        if is_kept.any():
            self._rows[places[is_kept]] = rows if is_kept.all() else rows[is_kept]
            self._checksums[places[is_kept]] = checksums[is_kept]

    def pack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy stored packets into buffers."""
        places = self._leaving[first:last]
        np.take(self._rows, places, axis=0, out=rows, mode="clip")
        np.take(self._checksums, places, out=checksums, mode="clip")


class PacketDecoder:
    """Decoder of the packets that a rank receives in a run: a :class:`~dshuffle.exchange.endpoints.RowSink`."""

    # cache: cache partition with the rows of the current epoch and free slots.
    # packets: packet of each plan component.
    # arriving: ``(m,)`` plan component that each received item delivers.
    # is_kept: ``(m,)`` whether the sample of each item is kept. Other items only help to decode further rows.
    # slots: reserved slots of the kept items, in the order of the items.
    # relay: store of the packets to forward.

    def __init__(
        self,
        cache: CachePartition,
        plan: Packets,
        packets: Items,
        arriving: Items,
        is_kept: NDArray[np.bool_],
        slots: Items,
        relay: PacketStore,
    ) -> None:
        self._cache = cache
        self._relay = relay
        self._to_relay = relay.find(packets[arriving])
        self._samples = plan.samples[arriving]
        self._offsets, side_samples = _side_samples(plan.offsets, plan.samples, packets, arriving)
        # A negative slot marks a row that is decoded from other items.
        self._slots = cache.index.search(side_samples)
        self._targets: Items = np.full(len(arriving), -1, dtype=np.int64)
        self._targets[is_kept] = slots
        self._join(side_samples)
        self._lock = threading.Lock()
        self._joined: set[int] = set()
        self._spoilt: int | None = None

    @property
    def intact(self) -> bool:
        """Whether no sum of several packets is wrong: a wrong one cannot be mended."""
        return self._spoilt is None

    def unpack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Decode packets, verify the rows, and store the packets to forward."""
        cache = self._cache
        if rows.shape != (last - first, cache.layout.nbytes) or checksums.shape != (last - first,):
            raise ExchangeError(
                f"a message has rows {rows.shape} and checksums {checksums.shape}; "
                f"{last - first} packets of {cache.layout.nbytes} bytes were expected"
            )
        wrong = decode(
            cache.rows,
            cache.checksums,
            rows,
            checksums,
            self._offsets[first : last + 1],
            self._slots,
            self._targets[first:last],
            self._samples[first:last],
        )
        if wrong >= 0:
            raise _mismatch(self._samples[first + wrong])
        self._relay.keep(self._to_relay[first:last], rows, checksums)
        if self._feeds_offsets[first] < self._feeds_offsets[last]:
            with self._lock:  # two messages may contain packets of the same row
                self._add(first, last, rows, checksums)

    @property
    def n_loading(self) -> int:
        """Packets are not loaded."""
        return 0

    async def load(self, first: int, last: int, stop: Callable[[], bool], *, recovers: bool) -> None:
        """Raise ExchangeError: coded plans do not read from the store."""
        raise ExchangeError("a packet cannot be read from the store")

    def _add(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Add packets to the rows that need several, and verify the rows that are complete."""
        if self._spoilt is not None:  # the corrupted packet cannot be identified or removed
            raise _mismatch(self._spoilt)
        if first in self._joined:  # a repeated message that was already added
            return
        self._joined.add(first)
        cache = self._cache
        offsets = self._feeds_offsets[first : last + 1]
        fed = self._feeds[offsets[0] : offsets[-1]]
        add_packets(cache.rows, cache.checksums, rows, checksums, offsets - offsets[0], self._joint_slots[fed])
        np.subtract.at(self._missing, fed, 1)
        complete = np.unique(fed[self._missing[fed] == 0])
        slots, samples = self._joint_slots[complete], self._joint_samples[complete]
        wrong = np.flatnonzero(checksum_rows(cache.rows, samples, slots) != cache.checksums[slots])
        if len(wrong):
            self._spoilt = int(samples[wrong[0]])
            raise _mismatch(self._spoilt)

    def _join(self, side_samples: Items) -> None:
        """Find the packets of each row that needs several, and initialize it with the XOR of its held rows."""
        unknown = self._slots < 0
        sorted_items = np.argsort(self._samples, kind="stable")
        items = np.full(len(side_samples), -1, dtype=np.int64)
        positions = sorted_positions(self._samples[sorted_items], side_samples[unknown])
        if (lost := positions < 0).any():
            sample = int(side_samples[unknown][int(np.argmax(lost))])
            raise ExchangeError(f"sample {sample} is needed for decoding, but is neither held nor incoming")
        items[unknown] = sorted_items[positions]
        several = _have_unknown(self._offsets, unknown)
        joint = np.flatnonzero(several & (self._targets >= 0))
        members, member_offsets, held, held_offsets = _expand(joint, self._offsets, self._slots, items)
        if member_offsets[-1] < 0:
            raise ExchangeError("the plan has packets each of which can be decoded only after another")
        self._joint_slots = self._targets[joint]
        self._joint_samples = self._samples[joint]
        self._missing = np.diff(member_offsets)
        self._targets[several] = -1  # not decoded from one packet
        # The inverse mapping: the rows that each item contributes to.
        rows = np.repeat(np.arange(len(joint)), self._missing)
        by_item = np.argsort(members, kind="stable")
        self._feeds = rows[by_item]
        self._feeds_offsets = np.searchsorted(members[by_item], np.arange(len(self._samples) + 1))
        cache = self._cache
        cache.rows[self._joint_slots] = 0
        cache.checksums[self._joint_slots] = 0
        begun = np.flatnonzero(np.diff(held_offsets))
        start = cache.layout.empty(len(begun))
        sums = np.empty(len(begun), dtype=np.uint32)
        encode(cache.rows, cache.checksums, held_offsets, held, begun, start, sums)
        cache.rows[self._joint_slots[begun]] = start
        cache.checksums[self._joint_slots[begun]] = sums


def _mismatch(sample: int) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"the row of sample {int(sample)} was decoded incorrectly: a packet or a row held here is corrupted"
    )


@kernel("(i8[::1], i8[::1], i8[::1], i8[::1])")
def _side_samples(offsets, samples, packets, arriving):  # type: ignore[no-untyped-def]
    """Return the other samples in the packet of each arriving component, in CSR form."""
    out_offsets = np.zeros(arriving.size + 1, dtype=np.int64)
    for i in range(arriving.size):
        packet = packets[arriving[i]]
        out_offsets[i + 1] = out_offsets[i] + offsets[packet + 1] - offsets[packet] - 1
    side_samples = np.empty(out_offsets[-1], dtype=np.int64)
    for i in range(arriving.size):
        at, packet = out_offsets[i], packets[arriving[i]]
        for e in range(offsets[packet], offsets[packet + 1]):
            if e != arriving[i]:
                side_samples[at] = samples[e]
                at += 1
    return out_offsets, side_samples


@kernel("(i8[::1], b1[::1])")
def _have_unknown(offsets, unknown):  # type: ignore[no-untyped-def]
    """Whether each item contains a component that is not held."""
    has_unknown = np.zeros(offsets.size - 1, dtype=np.bool_)
    for i in range(has_unknown.size):
        for e in range(offsets[i], offsets[i + 1]):
            has_unknown[i] |= unknown[e]
    return has_unknown


@kernel()
def _twice_as_long(values):  # type: ignore[no-untyped-def]
    longer = np.empty(2 * values.size, dtype=np.int64)
    for place in range(values.size):
        longer[place] = values[place]
    return longer


@kernel("(i8[::1], i8[::1], i8[::1], i8[::1])")
def _expand(joint, offsets, slots, items):  # type: ignore[no-untyped-def]
    """Return the items and the held rows whose XOR is the row of each joint item, each in CSR form."""
    # A row that appears twice cancels out, so duplicates need no handling.
    member_offsets = np.zeros(joint.size + 1, dtype=np.int64)
    held_offsets = np.zeros(joint.size + 1, dtype=np.int64)
    members = np.empty(max(2 * joint.size, 64), dtype=np.int64)
    held = np.empty(members.size, dtype=np.int64)
    n_members, n_held = 0, 0
    for j in range(joint.size):
        if n_members == members.size:
            members = _twice_as_long(members)
        members[n_members] = joint[j]
        n_members += 1
        at = n_members - 1
        while at < n_members:  # breadth-first search
            item = members[at]
            at += 1
            for e in range(offsets[item], offsets[item + 1]):
                if slots[e] >= 0:
                    if n_held == held.size:
                        held = _twice_as_long(held)
                    held[n_held] = slots[e]
                    n_held += 1
                else:
                    if n_members == members.size:
                        members = _twice_as_long(members)
                    members[n_members] = items[e]
                    n_members += 1
            if at - member_offsets[j] > 16 * offsets.size:  # far more members than items: a circular dependency
                member_offsets[-1] = -1
                return members[:0], member_offsets, held[:0], held_offsets
        member_offsets[j + 1], held_offsets[j + 1] = n_members, n_held
    return members[:n_members], member_offsets, held[:n_held], held_offsets


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
    """What the participants of a process send and receive in an exchange, in which messages."""

    # sends, receives: Participant -> the items that it sends or receives, and their flows. The items are samples. In a
    # coded plan, the items sent are packets and the items received are components.
    sends: dict[int, ItemsInFlows]
    receives: dict[int, ItemsInFlows]
    # at_most, requests, answers: Maximum number of items in a message, of messages that a participant requests at once,
    # and of messages that it answers at once. (A server that sends packets answers fewer.)
    at_most: int
    requests: int
    answers: int
    acknowledged: bool = True  # Whether receivers acknowledge the messages of this process.


UNACKNOWLEDGED_BYTES = MIB // 4
"""Messages up to this length are not acknowledged. An acknowledgement costs nearly as much as a short message."""

SHORT_ROW = 16 * 2**10
"""Rows on a disk up to this length move to the order of the next epoch. Random reads of longer ones are fast."""


@dataclass(frozen=True)
class Transport:
    """How the items of one exchange travel, in one process: as single rows, or as packets in the subclass."""

    # Rows are cut into messages only when the exchange begins, and the rates of links are known. The first epoch of a
    # session, and what a lost worker had, is read from the store as single rows, whatever the delivery.

    encodes: ClassVar[bool] = False  # Whether packets are encoded and decoded, which is measured.
    readable: ClassVar[bool] = True  # Whether an item that does not arrive can be read from the store.
    kernels: ClassVar[tuple[str, ...]] = ("rows", "exchange.cache_partition")  # Modules whose kernels it calls.

    spec: ShuffleSpec
    parts: Mapping[int, WorkerPart]  # Participant of this process -> its part.
    epoch_plan: EpochPlan | None  # The plan of the whole epoch; None if this worker has planned its own part alone.
    layout: RowLayout
    limits: MessageLimits
    flows: Flows | None = None  # What this process sends and receives; None until items are cut into messages.

    def routed(self) -> Transport:
        """The same exchange with routes, if its plan has any."""
        return self

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

    def for_disk(self, n_free: int) -> Transport:
        """The same exchange with rows in the order in which disks read them (:mod:`dshuffle.planning.epoch_plan`)."""
        seed, first = self.spec.choices.seed, self.spec.first_epoch
        short = self.layout.nbytes <= SHORT_ROW

        def stored(epoch: int) -> int | None:
            last = self.spec.choices.exchange_epochs.last(epoch - 1)
            return last if last > first else None

        parts = {
            participant: in_disk_order(
                part, seed=seed, stored=stored(part.epoch), moves_within=short and len(part.own) <= n_free
            )
            for participant, part in self.parts.items()
            if participant >= 0
        }
        return dataclasses.replace(self, parts={**self.parts, **parts})

    def with_messages(self, rate: float | None) -> Transport:
        """The same exchange with its rows cut into messages."""
        parts, limits, nbytes = self.parts, self.limits, self.layout.nbytes
        pacing = Pacing.of(rate, message_bytes=limits.message_bytes, window_bytes=limits.window_bytes)
        served = any(SERVER in part.receives for part in parts.values()) or (
            SERVER in parts and bool(parts[SERVER].sends)
        )
        if served:  # one long message for each worker in turn, so that all move through the dataset together
            pacing = Pacing(limits.message_bytes, limits.window_bytes)
        at_most = rows_per_message(nbytes, pacing.message_nbytes)
        sends = {participant: flows_of_samples(part.sends, at_most=at_most) for participant, part in parts.items()}
        receives = {
            participant: flows_of_samples(part.receives, at_most=at_most) for participant, part in parts.items()
        }
        leaving = _longest(sends) * nbytes
        answers = max(1, limits.window_bytes // max(1, leaving))
        requests = pacing.asked(_longest(receives) * nbytes)
        # Nothing but the requests limits what unacknowledged messages take, so all of them together must fit the
        # window.
        total = sum(len(items) for items, _ in sends.values()) * nbytes
        acknowledged = served or leaving > UNACKNOWLEDGED_BYTES or total > limits.window_bytes
        return dataclasses.replace(self, flows=Flows(sends, receives, at_most, requests, answers, acknowledged))

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
        arriving, part = self.messages.receives[rank][0], self.parts[rank]
        # A disk reads rows faster in the order of their slots. Rows from the store keep its order instead: they are
        # written through the memory map, and pages beside each other share faults.
        sorts = cache.on_disk and STORE not in part.receives
        positions = part.positions_of(arriving) if sorts else None
        return ArrivingRows(cache, arriving, cache.reserve(arriving, positions), bring)


def _longest(lists: Mapping[int, ItemsInFlows]) -> int:
    return max([1, *(flow.longest for _, flows in lists.values() for flow in flows.values())])


@dataclass(frozen=True)
class PacketTransport(Transport):
    """Packets. Their messages follow from the plan alone."""

    encodes: ClassVar[bool] = True
    readable: ClassVar[bool] = False
    kernels: ClassVar[tuple[str, ...]] = (
        *Transport.kernels,
        "coding",
        "exchange.transports",
        "planning.delivery.relay",
    )

    hops: Hops | None = None  # The routes of its packets.

    def routed(self) -> Transport:
        """Route the packets, and cut their hops into messages. Without packets of several rows, rows travel alone."""
        packets, limits, n_workers, nbytes = self._packets, self.limits, self.spec.n_workers, self.layout.nbytes
        if not packets.coded:
            return Transport(self.spec, self.parts, self.epoch_plan, self.layout, limits)
        fitting = rows_per_message(nbytes, limits.window_bytes)
        at_most = packets_per_batch(
            packets.n_packets,
            n_workers,
            nbytes,
            message_bytes=limits.message_bytes,
            window_bytes=limits.window_bytes,
        )
        # At any time at least one message is requested from every other participant (see Inbox), or a few if they fit
        # the window.
        requests = max(n_workers, min(fitting // at_most, 3 * n_workers))
        answers = max(limits.window, min(requests, 2 * n_workers))  # a relay answers two per worker
        hops = route(self.spec.choices.relay, packets, n_workers, at_most)
        parts = {rank: coded_part(packets, hops, rank, at_most=at_most) for rank in self.parts}
        sends = {rank: sent for rank, (sent, _) in parts.items()}
        receives = {rank: received for rank, (_, received) in parts.items()}
        flows = Flows(sends, receives, at_most, requests, answers)
        return dataclasses.replace(self, flows=flows, hops=hops)

    @property
    def _packets(self) -> Packets:
        assert self.epoch_plan is not None
        return self.epoch_plan.packets

    def for_disk(self, n_free: int) -> Transport:
        """The same exchange."""
        return self

    def with_messages(self, rate: float | None) -> Transport:
        """The same exchange."""
        return self

    def answered_by(self, participant: int) -> int:
        """Number of messages that a participant sends at once."""
        # A server answers only a few requests at a time. If it answered all at once, workers with fast connections
        # would be done early, and the packets that the others relay would be late.
        return self.limits.window if participant == SERVER else self.messages.answers

    def answered_to_one_by(self, participant: int) -> int | None:
        """An equal part of the server's window, if workers pass on packets while others come."""
        # They then have something to pass on at about the same time. With other relays it would only add pauses.
        if participant != SERVER or self.spec.choices.relay != "pipelined":
            return None
        return max(1, self.limits.window // self.spec.n_workers)

    def source(self, rank: int, cache: CachePartition) -> RowSource:
        """Packets that the rank passes on."""
        return PacketStore(cache.layout, self.messages.sends[rank][0])

    def served(self, server: ServerHolder) -> RowSource:
        """Packets that the server encodes."""
        return server.encoded(self._packets, self.messages.sends[SERVER][0])

    def sink(
        self,
        rank: int,
        cache: CachePartition,
        source: RowSource,
        bring: Bring,
    ) -> RowSink:
        """Packets that are decoded into free slots of the cache, and passed on."""
        assert isinstance(source, PacketStore)
        assert self.epoch_plan is not None
        assert self.hops is not None
        arriving, packets = self.messages.receives[rank][0], self._packets
        samples = packets.samples[arriving]
        is_kept = self.epoch_plan.ranks[samples] == rank
        return PacketDecoder(
            cache, packets, self.hops.packets, arriving, is_kept, cache.reserve(samples[is_kept]), source
        )


def transport_of(delivery: str) -> type[Transport]:
    """The transport of a delivery."""
    return PacketTransport if get_delivery(delivery).coded else Transport
