"""The plan of an epoch: ranks, holders and packets, the part of one worker, and checks of all of these."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import PlanError
from dshuffle.kernels import kernel
from dshuffle.planning.exchange_epochs import EVERY_EPOCH, ExchangeEpochs, epoch_order
from dshuffle.planning.types import (
    Holders,
    Ranks,
    Samples,
    as_instance,
    count_held,
    count_keys,
    group_by,
    held_by,
    holders_of,
    holds,
    sorted_positions,
)

SERVER = -1
"""Sender of the packets that the server sends."""
STORE = -2
"""Sender of the rows that their destination reads from the store."""


def name_of(participant: int) -> str:
    """Return the name of a participant of an exchange for messages to users."""
    return {SERVER: "the server", STORE: "the store"}.get(participant, f"rank {participant}")


@dataclass(frozen=True, slots=True, eq=False)
class Packets:
    """All packets of one epoch, in sending order."""

    # ``(P + 1,)`` int64. Packet p has the components ``offsets[p]`` to ``offsets[p + 1] - 1``, at least one.
    offsets: Samples
    samples: Samples  # ``(E,)`` int64, the sample of each component.
    destinations: Ranks  # ``(E,)`` int32, the worker that decodes the sample of each component.
    senders: Ranks  # ``(P,)`` int32, the sender of each packet: a rank, :data:`SERVER` or :data:`STORE`.

    def __post_init__(self) -> None:
        types = [(array.dtype, array.ndim) for array in (self.offsets, self.samples, self.destinations, self.senders)]
        if (
            types != [(np.dtype(name), 1) for name in ("int64", "int64", "int32", "int32")]
            or len(self.destinations) != len(self.samples)
            or len(self.offsets) != len(self.senders) + 1
            or (self.offsets[0], self.offsets[-1]) != (0, len(self.samples))
            or (self.offsets[1:] <= self.offsets[:-1]).any()
        ):
            raise PlanError(
                "the arrays of packets do not fit each other. For P packets with E components, give ascending offsets "
                "(P + 1,) from 0 to E and samples (E,) of int64, and destinations (E,) and senders (P,) of int32"
            )

    @classmethod
    def uncoded(cls, samples: ArrayLike, destinations: ArrayLike, senders: ArrayLike) -> Packets:
        """Build a plan with one packet per (sample, destination) pair."""
        return cls(
            offsets=np.arange(np.size(samples) + 1, dtype=np.int64),
            samples=np.asarray(samples, dtype=np.int64),
            destinations=np.asarray(destinations, dtype=np.int32),
            senders=np.asarray(senders, dtype=np.int32),
        )

    @property
    def n_packets(self) -> int:
        """Number of packets."""
        return len(self.senders)

    @property
    def n_components(self) -> int:
        """Number of components of all packets."""
        return len(self.samples)

    @property
    def coded(self) -> bool:
        """Whether any packet has more than one component."""
        return self.n_components != self.n_packets


def missing_samples(holders: Holders, destinations: Ranks) -> Samples:
    """Return the samples that their destination does not hold, ascending; ``(D,)`` int64."""
    # holders: ``(q, words)`` masks, see :func:`~dshuffle.planning.types.as_instance`.
    # destinations: ``(q,)`` int32 ranks that will train on the samples.
    missing = np.empty(len(destinations), dtype=np.int64)
    return missing[: _missing(holders, destinations, missing)]


@kernel("(u8[:,::1], i4[::1], i8[::1])")
def _missing(holders, destinations, missing):  # type: ignore[no-untyped-def]
    count = 0
    for sample in range(destinations.size):
        missing[count] = sample
        count += not holds(holders, sample, destinations[sample])
    return count


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPart:
    """One worker's part of an epoch plan."""

    rank: int  # Rank of the worker, or :data:`SERVER`.
    epoch: int  # Epoch that the exchange leads to.
    own: Samples  # Ascending int64, the samples that the worker trains on.
    permutation: Samples  # ``(own,)`` int64, positions in ``own`` in training order.
    # Ascending int64, the samples that the worker holds after the exchange is committed, including ``own``.
    held: Samples
    # Source (a rank, :data:`SERVER` or :data:`STORE`) -> int64 samples in plan order. Empty if the plan is coded; use
    # :func:`~dshuffle.planning.delivery.relay.route` to find how its packets travel.
    receives: dict[int, Samples]
    # Destination rank -> int64 samples in plan order, the same array as in the destination's ``receives``.
    sends: dict[int, Samples]

    @property
    def order(self) -> Samples:
        """``(own,)`` int64, the samples of ``own`` in training order."""
        return self.own[self.permutation]

    def positions_of(self, samples: Samples) -> Samples:
        """``(k,)`` int64, positions of ``(k,)`` samples in training order; ``len(own)`` if they are not trained on."""
        positions = np.empty(len(self.own) + 1, np.int64)
        positions[self.permutation] = np.arange(len(self.own))
        positions[-1] = len(self.own)
        return positions[sorted_positions(self.own, samples)]

    @property
    def n_received(self) -> int:
        """Samples that the worker receives or reads, unless the plan is coded."""
        return sum(map(len, self.receives.values()))

    @property
    def n_sent(self) -> int:
        """Samples that the worker sends, unless the plan is coded."""
        return sum(map(len, self.sends.values()))


@dataclass(frozen=True, slots=True, eq=False)
class EpochPlan:
    """Plan of the exchange that leads to an epoch."""

    epoch: int  # Number of the epoch, from 0. The exchange for epoch 0 loads rows from the store.
    seed: int  # seed, n_workers: Seed and number of workers of the specification.
    n_workers: int
    ranks: Ranks  # ``(q,)`` int32, the worker that trains on each sample; -1 for samples that all workers train on.
    # ``(q, words)`` uint64 masks of the workers that hold each sample after the exchange is committed.
    holders: Holders
    packets: Packets
    n_needed: int  # Number of samples that were missing from their worker's partition before the exchange.
    # Ascending int64, the samples that all workers train on.
    broadcast: Samples = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    epochs: ExchangeEpochs = EVERY_EPOCH  # Which epochs have an exchange, and the order of training.

    @property
    def shares(self) -> tuple[int, int]:
        """Smallest and largest number of samples that a worker trains on."""
        # Skip key -1 (broadcast samples): every worker trains on all of them.
        counts = count_keys(self.ranks, -1, self.n_workers)[1:] + len(self.broadcast)
        return int(counts.min()), int(counts.max())

    def with_broadcast(self, broadcast: Samples, dealt: Samples, *, loads: bool) -> EpochPlan:
        """Return the plan of all samples, if this plan is for the samples that are not broadcast."""
        # Sample j of this plan is ``dealt[j]``; ``dealt`` is ascending. ``loads`` says that workers read what they
        # hold.
        n_samples = len(broadcast) + len(dealt)
        ranks = np.full(n_samples, -1, dtype=np.int32)
        ranks[dealt] = self.ranks
        holders = np.empty((n_samples, self.holders.shape[1]), dtype=np.uint64)
        holders[dealt] = self.holders
        holders[broadcast] = np.bitwise_or.reduce(holders_of(np.arange(self.n_workers, dtype=np.int32), self.n_workers))
        packets = dataclasses.replace(self.packets, samples=dealt[self.packets.samples])
        if loads:
            packets = loading(holders, self.n_workers)
        n_needed = n_samples if loads else self.n_needed
        return dataclasses.replace(
            self, ranks=ranks, holders=holders, packets=packets, n_needed=n_needed, broadcast=broadcast
        )

    def digest(self) -> int:
        """Return a checksum of the assignment and the packets, to compare plans between processes."""
        value = 0
        packets = self.packets
        for array in (self.ranks, packets.offsets, packets.samples, packets.destinations, packets.senders):
            value = zlib.crc32(array.data, value)
        return value

    def for_worker(self, rank: int) -> WorkerPart:
        """Return the part of one worker, or of the server."""
        packets = self.packets
        # Only uncoded plans have packets of single rows to list.
        rows = slice(0 if packets.coded else packets.n_packets)
        outgoing = np.flatnonzero(packets.senders[rows] == rank)
        sends = split_by_worker(packets.samples[outgoing], packets.destinations[outgoing], self.n_workers)
        if rank == SERVER:
            nothing = np.empty(0, dtype=np.int64)
            return WorkerPart(rank, self.epoch, nothing, nothing, nothing, {}, sends)
        incoming = np.flatnonzero(packets.destinations[rows] == rank)
        own = np.flatnonzero(self.ranks == rank)
        if len(self.broadcast):
            own = np.sort(np.concatenate([own, self.broadcast]))
        return WorkerPart(
            rank=rank,
            epoch=self.epoch,
            own=own,
            permutation=self.epochs.permutation(own, seed=self.seed, epoch=self.epoch, rank=rank),
            held=np.flatnonzero(held_by(self.holders, rank)),
            receives=split_by_worker(packets.samples[incoming], packets.senders[incoming], self.n_workers),
            sends=sends,
        )


def loading(holders: Holders, n_workers: int) -> Packets:
    """Plan that every worker reads the samples that it will hold from the store, in ascending order."""
    # Into arrays of the right types at once: this is the largest plan of a shuffle with excess.
    offsets = np.concatenate([[0], np.cumsum(count_held(holders, n_workers))])
    samples = np.empty(offsets[-1], np.int64)
    for worker in range(n_workers):
        samples[offsets[worker] : offsets[worker + 1]] = np.flatnonzero(held_by(holders, worker))
    destinations = np.repeat(np.arange(n_workers, dtype=np.int32), np.diff(offsets))
    return Packets.uncoded(samples, destinations, np.full(len(samples), STORE, np.int32))


def split_by_worker(samples: Samples, keys: Ranks, n_workers: int) -> dict[int, Samples]:
    """Group samples by key (a rank, SERVER or STORE), in the given order."""
    order, offsets = group_by(keys - STORE, n_workers - STORE)
    grouped = samples[order]
    return {key + STORE: grouped[offsets[key] : offsets[key + 1]] for key in np.flatnonzero(np.diff(offsets)).tolist()}


def check_plan(
    plan: Packets, holders: ArrayLike, destinations: ArrayLike, n_workers: int, *, capacity: int | None = None
) -> None:
    """Raise an error unless a plan delivers every needed sample exactly once."""
    # A component may also deliver a sample to a worker that does not train on it, but only if the worker needs the
    # sample to decode another packet. Leftover coding decodes in two such steps (Attia and Tandon, 2016).
    # holders: ``(q, words)`` masks of the workers that hold each sample before the exchange.
    # destinations: ``(q,)`` integers, the worker that will train on each sample.
    masks, ranks = as_instance(holders, destinations, n_workers)
    if capacity is not None:
        _check_capacity("holds", count_held(masks, n_workers), capacity)
        _check_capacity("is assigned", np.bincount(ranks, minlength=n_workers), capacity)
    fault, packet, entry, other = _find_fault(
        plan.offsets, plan.samples, plan.destinations, plan.senders, masks, ranks, n_workers
    )
    if fault == _SOUND:
        return
    facts = {"packet": packet, "other": other, "q": len(ranks), "n": n_workers}
    if fault == _MISSING:
        facts |= {"sample": entry, "worker": ranks[entry]}
    else:
        facts |= {"sample": plan.samples[entry], "worker": plan.destinations[entry], "sender": plan.senders[packet]}
    raise PlanError(_FAULTS[fault].format(**facts))


def _check_capacity(verb: str, counts: NDArray[np.int64], capacity: int) -> None:
    worker = int(np.argmax(counts))
    if counts[worker] > capacity:
        raise PlanError(f"worker {worker} {verb} {counts[worker]} samples, over the capacity of {capacity}")


_SOUND, _MISSING, _SENDER_UNKNOWN, _OUT_OF_RANGE, _NO_WORKER, _TO_ITSELF, _SENDER_LACKS = range(7)
_HELD, _TWICE, _SAME_PACKET, _LACKS, _CIRCULAR, _NOT_WANTED = range(7, 13)

_FAULTS = {
    _MISSING: "sample {sample} is not delivered to worker {worker}, which needs it",
    _SENDER_UNKNOWN: (
        "packet {packet} is sent by {sender}, which is neither a worker in [0, {n}) nor SERVER (-1) nor STORE (-2)"
    ),
    _OUT_OF_RANGE: "packet {packet} for worker {worker} has sample {sample}, which is not in [0, {q})",
    _NO_WORKER: "packet {packet} delivers sample {sample} to worker {worker}, which is not in [0, {n})",
    _TO_ITSELF: "packet {packet} with sample {sample} is sent by worker {worker} to itself",
    _SENDER_LACKS: "packet {packet} for worker {worker} has sample {sample}, which its sender {sender} does not hold",
    _HELD: "packet {packet} delivers sample {sample} to worker {worker}, which already holds it",
    _TWICE: "packet {packet} delivers sample {sample} to worker {worker} again, after packet {other}",
    _SAME_PACKET: "packet {packet} has samples {other} and {sample} for worker {worker}; it can decode only one",
    _LACKS: "worker {worker} cannot decode sample {sample} from packet {packet}: it lacks sample {other}",
    _CIRCULAR: (
        "worker {worker} cannot decode sample {sample} from packet {packet}: "
        "it needs sample {other} first, which it cannot decode earlier"
    ),
    _NOT_WANTED: (
        "packet {packet} delivers sample {sample} to worker {worker}, "
        "which neither trains on it nor needs it to decode another sample"
    ),
}


@kernel("(i8[::1], i8[::1], i4[::1], i4[::1], u8[:,::1], i4[::1], i8)")
def _find_fault(  # type: ignore[no-untyped-def]
    offsets, samples, destinations, senders, holders, wanted, n_workers
):
    """Return the first fault as (kind, packet, component, other sample or packet)."""
    q, n_packets, n_entries = wanted.size, senders.size, samples.size
    # The components of a sample form a linked list for looking up (sample, worker) pairs.
    last = np.full(q, -1, dtype=np.int64)
    before = np.empty(n_entries, dtype=np.int64)
    packet_of = np.empty(n_entries, dtype=np.int64)
    for p in range(n_packets):
        sender = senders[p]
        if sender >= n_workers or sender < STORE:
            return _SENDER_UNKNOWN, p, offsets[p], 0
        for e in range(offsets[p], offsets[p + 1]):
            j, d = samples[e], destinations[e]
            if j < 0 or j >= q:
                return _OUT_OF_RANGE, p, e, 0
            if d < 0 or d >= n_workers:
                return _NO_WORKER, p, e, 0
            if d == sender:
                return _TO_ITSELF, p, e, 0
            if sender >= 0 and not holds(holders, j, sender):
                return _SENDER_LACKS, p, e, 0
            if holds(holders, j, d):
                return _HELD, p, e, 0
            twin = _entry(j, d, last, before, destinations)
            if twin >= 0:
                return _TWICE, p, e, packet_of[twin]
            for i in range(offsets[p], e):
                if destinations[i] == d:
                    return _SAME_PACKET, p, e, samples[i]
            packet_of[e] = p
            before[e] = last[j]
            last[j] = e

    # A component is decoded once its destination has all other samples of the packet.
    decoded = np.zeros(n_entries, dtype=np.bool_)
    helps = np.zeros(n_entries, dtype=np.bool_)
    waiting = np.arange(n_entries)
    n_waiting = n_entries
    while n_waiting > 0:
        still = 0
        for w in range(n_waiting):
            e = waiting[w]
            p, d = packet_of[e], destinations[e]
            ready = True
            for i in range(offsets[p], offsets[p + 1]):
                if i == e or holds(holders, samples[i], d):
                    continue
                source = _entry(samples[i], d, last, before, destinations)
                if source < 0:
                    return _LACKS, p, e, samples[i]
                helps[source] = True
                ready = ready and decoded[source]
            decoded[e] = ready
            if not ready:
                waiting[still] = e
                still += 1
        if still == n_waiting:
            e = waiting[0]
            p, d = packet_of[e], destinations[e]
            for i in range(offsets[p], offsets[p + 1]):
                known = i == e or holds(holders, samples[i], d)
                if not known and not decoded[_entry(samples[i], d, last, before, destinations)]:
                    return _CIRCULAR, p, e, samples[i]
        n_waiting = still

    for e in range(n_entries):
        if destinations[e] != wanted[samples[e]] and not helps[e]:
            return _NOT_WANTED, packet_of[e], e, 0
    for j in range(q):
        if not holds(holders, j, wanted[j]) and _entry(j, wanted[j], last, before, destinations) < 0:
            return _MISSING, 0, j, 0
    return _SOUND, 0, 0, 0


@kernel()
def _entry(sample, worker, last, before, destinations):  # type: ignore[no-untyped-def]
    """Return the component that delivers ``sample`` to ``worker``, or -1."""
    e = last[sample]
    while e >= 0 and destinations[e] != worker:
        e = before[e]
    return e


def in_disk_order(part: WorkerPart, *, seed: int, stored: int | None, moves_within: bool) -> WorkerPart:
    """The same part of an exchange, with samples in the order in which they are stored on their senders' disks."""

    def ordered(sender: int, samples: Samples) -> Samples:
        if stored is None or sender < 0:
            return samples
        return epoch_order(samples, seed=seed, epoch=stored, rank=sender)

    sends = {other: ordered(part.rank, samples) for other, samples in part.sends.items()}
    receives = {other: ordered(other, samples) for other, samples in part.receives.items()}
    if moves_within and receives and STORE not in receives:
        arriving = np.concatenate([part.own[:0], *receives.values()])
        staying = part.own[~np.isin(part.own, arriving)]
        if len(staying):
            sends[part.rank] = receives[part.rank] = ordered(part.rank, staying)
    return dataclasses.replace(part, sends=sends, receives=receives)


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Which samples come to a worker for an epoch, and which leave it."""

    own: Samples  # Ascending int64, the samples that the worker trains on.
    arriving: Samples  # arriving, senders: The samples that it lacks, ascending, and the worker that has each of them.
    senders: Ranks
    # leaving, receivers: The samples that it gives up, ascending, and the worker that each of them goes to.
    leaving: Samples
    receivers: Ranks

    @classmethod
    def none(cls, own: Samples) -> Moves:
        """Nothing comes or goes."""
        return cls(own, own[:0], np.empty(0, np.int32), own[:0], np.empty(0, np.int32))

    @classmethod
    def loading(cls, own: Samples) -> Moves:
        """Everything comes from the store."""
        return dataclasses.replace(cls.none(own), arriving=own, senders=np.full(len(own), STORE, np.int32))

    @classmethod
    def between(cls, before: Ranks, after: Ranks, rank: int) -> Moves:
        """The moves of a worker between two assignments of all samples, ``(q,)`` int32 each."""
        own, held = np.flatnonzero(after == rank), np.flatnonzero(before == rank)
        return cls.of(rank, own, before[own], held, after[held])

    @classmethod
    def of(cls, rank: int, own: Samples, before: Ranks, held: Samples, after: Ranks) -> Moves:
        """The moves of a worker that has ``held`` and trains on ``own`` next."""
        # ``before`` says which worker has each of its next samples, and ``after`` who gets each of those that it has.
        missing, leaving = before != rank, after != rank
        return cls(own, own[missing], before[missing], held[leaving], after[leaving])
