"""What carries the items of an exchange: rows or packets."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.coding import add_packets, decode, encode
from dshuffle.errors import ChecksumMismatch, ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.mailboxes import MIB, Flow, Items, flows_of_hops, flows_of_samples, rows_per_message
from dshuffle.kernels import kernel
from dshuffle.planning import SERVER, STORE, EpochPlan, Packets, ShuffleSpec, WorkerPart, get_delivery
from dshuffle.planning.delivery.relay import Hops, Pacing, packets_per_batch, route
from dshuffle.planning.epoch_plan import in_disk_order
from dshuffle.planning.types import Samples, sorted_positions
from dshuffle.rows import ByteMatrix, Checksums, RowLayout, checksum_rows

ItemsInFlows = tuple[Items, dict[int, Flow]]
"""Items, and the flows that they are in."""

Stop = Callable[[], bool]

RowSource = Callable[[int, int, ByteMatrix, Checksums], None]
"""Copies items ``first`` to ``last - 1`` of a sender into buffers: rows of a partition, or packets of the server."""

Bring = Callable[..., Awaitable[None]]
"""Brings samples into slots until ``stop`` returns true. It skips samples marked in ``done``, and marks others there.

The arguments are those of :meth:`ArrivingRows.load`. ``recovers`` says that a sender could not deliver the rows.
"""


def leaving(pack: Callable[[Samples, ByteMatrix, Checksums], None], sample_ids: Samples) -> RowSource:
    """The source of some samples that a partition or the server has, which ``pack`` copies into buffers."""
    return lambda first, last, rows, checksums: pack(sample_ids[first:last], rows, checksums)


class ArrivingRows:
    """The rows that a rank receives in a run."""

    # cache: cache partition that receives the rows.
    # sample_ids, slots: ``(m,)`` sample and reserved slot of each item.

    intact = True  # rows do not depend on each other

    def __init__(self, cache: CachePartition, sample_ids: Samples, slots: Samples, bring: Bring) -> None:
        self._cache, self._sample_ids, self._slots, self._bring = cache, sample_ids, slots, bring
        self._brought: dict[int, NDArray[np.bool_]] = {}  # of loads that have not succeeded yet, by their first item

    @property
    def n_loading(self) -> int:
        """Number of rows that have been loaded so far."""
        return sum(int(np.count_nonzero(done)) for done in self._brought.values())

    def unpack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Verify rows and copy them into their slots."""
        self._cache.unpack(self._sample_ids[first:last], self._slots[first:last], rows, checksums)

    async def load(self, first: int, last: int, stop: Stop, *, recovers: bool) -> None:
        """Bring rows into their slots. Rows that an earlier attempt has brought stay there."""
        done = self._brought.setdefault(first, np.zeros(last - first, np.bool_))
        await self._bring(self._sample_ids[first:last], self._slots[first:last], stop, done=done, recovers=recovers)
        del self._brought[first]


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

    def keep(self, places: Items, rows: ByteMatrix, checksums: Checksums) -> None:
        """Store the packets with a nonnegative position; ignore the others."""
        is_kept = places >= 0
        if is_kept.any():
            self._rows[places[is_kept]] = rows if is_kept.all() else rows[is_kept]
            self._checksums[places[is_kept]] = checksums[is_kept]

    def __call__(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy stored packets into buffers."""
        places = self._leaving[first:last]
        np.take(self._rows, places, axis=0, out=rows, mode="clip")
        np.take(self._checksums, places, out=checksums, mode="clip")


class PacketDecoder:
    """Decoder of the packets that a rank receives in a run."""

    # cache: cache partition with the rows of the current epoch and free slots.
    # packets: packet of each plan component.
    # arriving: ``(m,)`` plan component that each received item delivers.
    # is_kept: ``(m,)`` whether the sample of each item is kept. Other items only help to decode further rows.
    # slots: reserved slots of the kept items, in the order of the items.
    # relay: store of the packets to forward.

    n_loading = 0  # packets are not loaded

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
        self._to_relay = sorted_positions(relay.packets, packets[arriving])  # -1 if it is not forwarded
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
        cache.check_shape(last - first, rows, checksums)
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

    async def load(self, first: int, last: int, stop: Stop, *, recovers: bool) -> None:
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
        # Of a sample that is neither held nor incoming, which a plan does not have, another row is taken: it shows.
        items[unknown] = sorted_items[sorted_positions(self._samples[sorted_items], side_samples[unknown])]
        several = np.diff(np.append(0, np.cumsum(unknown))[self._offsets]) > 0
        joint = np.flatnonzero(several & (self._targets >= 0))
        members, member_offsets, held, held_offsets = _expand(joint, self._offsets, self._slots, items)
        if len(joint) and not member_offsets[-1]:
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


def _side_samples(offsets: Items, samples: Items, packets: Items, arriving: Items) -> tuple[Items, Items]:
    """Return the other samples in the packet of each arriving component, in CSR form."""
    of = packets[arriving]
    counts = np.diff(offsets)[of]
    ends = np.cumsum(counts)
    members = np.arange(ends[-1] if len(ends) else 0) + np.repeat(offsets[of] - ends + counts, counts)
    return np.append(0, np.cumsum(counts - 1)), samples[members[members != np.repeat(arriving, counts)]]


@kernel("(i8[::1], i8[::1], i8[::1], i8[::1])")
def _expand(joint, offsets, slots, items):  # type: ignore[no-untyped-def]
    """Return the items and the held rows whose XOR is the row of each joint item, each in CSR form."""
    # A row that appears twice cancels out, so duplicates need no handling.
    member_offsets = np.zeros(joint.size + 1, dtype=np.int64)
    held_offsets = np.zeros(joint.size + 1, dtype=np.int64)
    members, held = [np.int64(0) for _ in range(0)], [np.int64(0) for _ in range(0)]
    for j in range(joint.size):
        at = len(members)
        members.append(joint[j])
        while at < len(members):  # breadth-first search
            item = members[at]
            at += 1
            for e in range(offsets[item], offsets[item + 1]):
                if slots[e] >= 0:
                    held.append(slots[e])
                else:
                    members.append(items[e])
            if at - member_offsets[j] > 16 * offsets.size:  # far more members than items: a circular dependency
                return np.array(members), 0 * member_offsets, np.array(held), held_offsets
        member_offsets[j + 1], held_offsets[j + 1] = len(members), len(held)
    return np.array(members), member_offsets, np.array(held), held_offsets


RowSink = ArrivingRows | PacketDecoder
"""Where a receiver's items go."""


@dataclass(frozen=True, slots=True)
class Flows:
    """What the participants of a process send and receive in an exchange, in which messages."""

    # sends, receives: Participant -> the items that it sends or receives, and their flows. The items are samples. In a
    # coded plan, the items sent are packets and the items received are components.
    sends: dict[int, ItemsInFlows]
    receives: dict[int, ItemsInFlows]
    requests: int  # Number of messages that a participant requests at once.
    answers: int  # Number of messages that a participant sends at once.
    # The same of the server, and how many of them may go to one destination; None if it is like the others.
    of_server: tuple[int, int | None] | None = None
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
    kernels: ClassVar[tuple[str, ...]] = ("rows", "exchange.cache_partition")  # Modules whose kernels it calls.

    spec: ShuffleSpec
    parts: Mapping[int, WorkerPart]  # Participant of this process -> its part.
    epoch_plan: EpochPlan | None  # The plan of the whole epoch; None if this worker has planned its own part alone.
    layout: RowLayout
    message_bytes: int  # Size of a full message, and bytes that a participant has under way at most.
    window_bytes: int
    flows: Flows | None = None  # What this process sends and receives; None until items are cut into messages.

    def routed(self) -> Transport:
        """The same exchange with routes, if its plan has any."""
        return self

    @property
    def messages(self) -> Flows:
        """The flows, once items have been cut into messages."""
        assert self.flows is not None
        return self.flows

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

    def with_messages(self, rate: float | None, cache: CachePartition | None = None) -> Transport:
        """The same exchange with its rows cut into messages, for the partition of a worker that trains."""
        if self.flows is not None:
            return self
        if cache is not None and cache.file is not None:
            return self.for_disk(len(cache.free)).with_messages(rate)
        parts, nbytes = self.parts, self.layout.nbytes
        served = any(SERVER in part.receives or (of == SERVER and part.sends) for of, part in parts.items())
        if served:  # one long message for each worker in turn, so that all move through the dataset together
            pacing = Pacing(self.message_bytes, self.window_bytes)
        else:
            pacing = Pacing.of(rate, message_bytes=self.message_bytes, window_bytes=self.window_bytes)
        at_most = rows_per_message(nbytes, pacing.message_nbytes)
        sends = {of: flows_of_samples(part.sends, at_most=at_most) for of, part in parts.items()}
        receives = {of: flows_of_samples(part.receives, at_most=at_most) for of, part in parts.items()}
        longest_sent, longest_received = (
            nbytes * max([1, *(flow.longest for _, flows in lists.values() for flow in flows.values())])
            for lists in (sends, receives)
        )
        # Nothing but the requests limits what unacknowledged messages take, so all of them together must fit the
        # window.
        total = sum(len(items) for items, _ in sends.values()) * nbytes
        flows = Flows(
            sends,
            receives,
            requests=pacing.asked(longest_received),
            answers=max(1, self.window_bytes // max(1, longest_sent)),
            acknowledged=served or longest_sent > UNACKNOWLEDGED_BYTES or total > self.window_bytes,
        )
        return dataclasses.replace(self, flows=flows)

    def source(self, participant: int, holder: Any) -> RowSource:
        """What a participant sends: rows of its partition, or of the server."""
        return leaving(holder.pack, self.messages.sends[participant][0])

    def sink(self, rank: int, cache: CachePartition, source: RowSource, bring: Bring) -> RowSink:
        """Rows that go to free slots of the cache."""
        arriving, part = self.messages.receives[rank][0], self.parts[rank]
        # A disk reads rows faster in the order of their slots. Rows from the store keep its order instead: they are
        # written through the memory map, and pages beside each other share faults.
        sorts = cache.file is not None and STORE not in part.receives
        positions = part.positions_of(arriving) if sorts else None
        return ArrivingRows(cache, arriving, cache.reserve(arriving, positions), bring)


@dataclass(frozen=True)
class PacketTransport(Transport):
    """Packets. Their messages follow from the plan alone."""

    encodes: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = (
        *Transport.kernels,
        "coding",
        "exchange.transports",
        "planning.delivery.relay",
    )

    hops: Hops | None = None  # The routes of its packets.

    def routed(self) -> Transport:
        """Route the packets, and cut their hops into messages. Without packets of several rows, rows travel alone."""
        assert self.epoch_plan is not None
        packets, n_workers, nbytes = self.epoch_plan.packets, self.spec.n_workers, self.layout.nbytes
        limits = {"message_bytes": self.message_bytes, "window_bytes": self.window_bytes}
        if not packets.coded:
            return Transport(self.spec, self.parts, self.epoch_plan, self.layout, self.message_bytes, self.window_bytes)
        window, fitting = self.window_bytes // self.message_bytes, rows_per_message(nbytes, self.window_bytes)
        at_most = packets_per_batch(packets.n_packets, n_workers, nbytes, **limits)
        # At any time at least one message is requested from every other participant (see Inbox), or a few if they fit
        # the window.
        requests = max(n_workers, min(fitting // at_most, 3 * n_workers))
        answers = max(window, min(requests, 2 * n_workers))  # a relay answers two per worker
        # A server answers only a few requests at a time. If it answered all at once, workers with fast connections
        # would be done early, and the packets that the others relay would be late. If workers pass on packets while
        # others come, each gets an equal part of the window, so that they have something to pass on at about the same
        # time. With other relays this would only add pauses.
        relay = self.spec.choices.relay
        of_server = window, max(1, window // n_workers) if relay == "pipelined" else None
        hops = route(relay, packets, n_workers, at_most)
        parts = {rank: coded_part(packets, hops, rank, at_most=at_most) for rank in self.parts}
        sends = {rank: sent for rank, (sent, _) in parts.items()}
        receives = {rank: received for rank, (_, received) in parts.items()}
        return dataclasses.replace(self, flows=Flows(sends, receives, requests, answers, of_server), hops=hops)

    def source(self, participant: int, holder: Any) -> RowSource:
        """Packets that a rank passes on, or that the server encodes."""
        assert self.epoch_plan is not None
        items = self.messages.sends[participant][0]
        if participant != SERVER:
            return PacketStore(self.layout, items)
        encoded: RowSource = holder.encoded(self.epoch_plan.packets, items)
        return encoded

    def sink(self, rank: int, cache: CachePartition, source: RowSource, bring: Bring) -> RowSink:
        """Packets that are decoded into free slots of the cache, and passed on."""
        assert isinstance(source, PacketStore)
        assert self.epoch_plan is not None
        assert self.hops is not None
        arriving, packets = self.messages.receives[rank][0], self.epoch_plan.packets
        samples = packets.samples[arriving]
        is_kept = self.epoch_plan.ranks[samples] == rank
        return PacketDecoder(
            cache, packets, self.hops.packets, arriving, is_kept, cache.reserve(samples[is_kept]), source
        )


def transport_of(delivery: str) -> type[Transport]:
    """The transport of a delivery."""
    return PacketTransport if get_delivery(delivery).coded else Transport
