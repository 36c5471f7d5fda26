"""The plan of an epoch: ranks, holders and packets, the part of one worker, and checks of all of these."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.planning.exchange_epochs import EVERY_EPOCH, ExchangeEpochs
from dshuffle.planning.types import (
    NO_SAMPLES,
    Holders,
    Ranks,
    Samples,
    count_held,
    group_by,
    held_by,
    holders_of,
    sorted_positions,
    starts_of,
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

    @classmethod
    def uncoded(cls, samples: ArrayLike, destinations: ArrayLike, senders: ArrayLike) -> Packets:
        """Build a plan with one packet per (sample, destination) pair."""
        return cls(
            np.arange(np.size(samples) + 1),
            np.asarray(samples, np.int64),
            np.asarray(destinations, np.int32),
            np.asarray(senders, np.int32),
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
    epochs: ExchangeEpochs = EVERY_EPOCH  # Which epochs have an exchange, and the order of training.
    # Ascending int64, the samples that all workers train on.
    broadcast: Samples = field(default_factory=lambda: NO_SAMPLES)

    @property
    def shares(self) -> tuple[int, int]:
        """Smallest and largest number of samples that a worker trains on."""
        # Every worker trains on all broadcast samples, whose ranks are -1.
        counts = np.bincount(self.ranks + 1, minlength=self.n_workers + 1)[1:] + len(self.broadcast)
        return int(counts.min()), int(counts.max())

    def with_broadcast(self, broadcast: Samples, dealt: Samples, *, loads: bool) -> EpochPlan:
        """Return the plan of all samples, if this plan is for the samples that are not broadcast."""
        # Sample j of this plan is ``dealt[j]``; ``dealt`` is ascending. ``loads`` says that workers read what they
        # hold.
        n_samples, n = len(broadcast) + len(dealt), self.n_workers
        ranks = np.full(n_samples, -1, np.int32)
        ranks[dealt] = self.ranks
        holders = np.empty((n_samples, self.holders.shape[1]), np.uint64)
        holders[dealt] = self.holders
        holders[broadcast] = np.bitwise_or.reduce(holders_of(np.arange(n), n))
        packets = dataclasses.replace(self.packets, samples=dealt[self.packets.samples])
        if loads:
            packets = loading(holders, n)
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
            return WorkerPart(rank, self.epoch, NO_SAMPLES, NO_SAMPLES, NO_SAMPLES, {}, sends)
        incoming = np.flatnonzero(packets.destinations[rows] == rank)
        own = np.flatnonzero(self.ranks == rank)
        if len(self.broadcast):
            own = np.sort(np.concatenate([own, self.broadcast]))
        order = self.epochs.permutation(own, seed=self.seed, epoch=self.epoch, rank=rank)
        receives = split_by_worker(packets.samples[incoming], packets.senders[incoming], self.n_workers)
        return WorkerPart(rank, self.epoch, own, order, np.flatnonzero(held_by(self.holders, rank)), receives, sends)


def loading(holders: Holders, n_workers: int) -> Packets:
    """Plan that every worker reads the samples that it will hold from the store, in ascending order."""
    # Into arrays of the right types at once: this is the largest plan of a shuffle with excess.
    offsets = starts_of(count_held(holders, n_workers))
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


def in_disk_order(part: WorkerPart, *, seed: int, stored: int | None, moves_within: bool) -> WorkerPart:
    """The same part of an exchange, with samples in the order in which they are stored on their senders' disks."""

    def ordered(sender: int, samples: Samples) -> Samples:
        if stored is None or sender < 0:
            return samples
        return EVERY_EPOCH.order(samples, seed=seed, epoch=stored, rank=sender)

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
