"""Flows of packets: relays forward packets, and ranks decode rows from packets and the rows that they hold.

Decoding reads rows of the current epoch and writes to free slots, so it runs during training; rows are evicted only at
the commit. A row that needs one packet is decoded directly into its slot. A few rows need several packets, because
packets form a cycle or a chain. The row is then the XOR of all of these packets and of held rows. It accumulates in its
slot, packet by packet, in any order of arrival, and is verified after the last packet. If it is wrong, the run fails,
because a corrupted packet cannot be identified and removed from the sum.

References
----------
Attia and Tandon (2016), on chains of packets; see docs/papers.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.coding import add_packets, decode, encode
from dshuffle.errors import ChecksumMismatch, ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.messages import Flow, Items, flows_of_hops
from dshuffle.kernels import kernel
from dshuffle.planning import Packets
from dshuffle.planning.delivery.relay import Hops
from dshuffle.planning.sorted_ids import sorted_positions
from dshuffle.rows import ByteMatrix, Checksums, RowLayout, checksum_rows


@dataclass(frozen=True, slots=True, eq=False)
class CodedPart:
    """The part of one participant in a coded run.

    Parameters
    ----------
    arriving
        ``(m,)`` plan component that each received item delivers.
    incoming
        Sender -> flow of received items.
    leaving
        ``(k,)`` packet of each item to send.
    outgoing
        Destination -> flow of items to send.
    """

    arriving: Items
    incoming: dict[int, Flow]
    leaving: Items
    outgoing: dict[int, Flow]

    @classmethod
    def of(cls, plan: Packets, hops: Hops, participant: int, *, at_most: int) -> CodedPart:
        """Cut the hops to and from a participant into messages of at most ``at_most`` packets."""
        groups = np.maximum(hops.waits_for, hops.opens)
        ended = np.flatnonzero(plan.destinations == participant)
        order, incoming = flows_of_hops(hops.senders[ended], groups[ended], hops.opens[ended], at_most=at_most)
        away = np.flatnonzero(hops.senders == participant)
        packets, outgoing = flows_of_hops(plan.destinations[away], groups[away], hops.waits_for[away], at_most=at_most)
        return cls(ended[order], incoming, hops.packets[away[packets]], outgoing)


class PacketStore:
    """The packets that a worker forwards: stores arriving packets and is the source of the worker's sender.

    Parameters
    ----------
    layout
        Layout of a row; a packet has the same size.
    leaving
        ``(k,)`` packet of each item to send.
    """

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
    """Decoder of the packets that a rank receives in a run: a :class:`~dshuffle.exchange.endpoints.RowSink`.

    Parameters
    ----------
    cache
        Cache partition with the rows of the current epoch and free slots.
    packets
        Packet of each plan component.
    arriving
        ``(m,)`` plan component that each received item delivers.
    is_kept
        ``(m,)`` whether the sample of each item is kept. Other items only help to decode further rows.
    slots
        Reserved slots of the kept items, in the order of the items.
    relay
        Store of the packets to forward.
    """

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
    """Return the items and the held rows whose XOR is the row of each joint item, each in CSR form.

    A row that appears twice cancels out, so duplicates need no handling.
    """
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
