"""The plan of one epoch and each worker's part of it."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass, field

import numpy as np

from dshuffle.planning.exchange_epochs import EVERY_EPOCH, ExchangeEpochs
from dshuffle.planning.grouping import count_held, count_keys, group_by
from dshuffle.planning.holders import held_by, holders_of
from dshuffle.planning.packets import SERVER, STORE, Packets
from dshuffle.planning.sorted_ids import sorted_positions
from dshuffle.planning.types import Holders, Ranks, Samples


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPart:
    """One worker's part of an epoch plan.

    Parameters
    ----------
    rank
        Rank of the worker, or :data:`SERVER`.
    epoch
        Epoch that the exchange leads to.
    own
        Ascending int64, the samples that the worker trains on.
    permutation
        ``(own,)`` int64, positions in ``own`` in training order.
    held
        Ascending int64, the samples that the worker holds after the exchange is committed, including ``own``.
    receives
        Source (a rank, :data:`SERVER` or :data:`STORE`) -> int64 samples in plan order. Empty if the plan is coded;
        use :func:`~dshuffle.planning.route` to find how its packets travel.
    sends
        Destination rank -> int64 samples in plan order, the same array as in the destination's ``receives``.
    """

    rank: int
    epoch: int
    own: Samples
    permutation: Samples
    held: Samples
    receives: dict[int, Samples]
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


@dataclass(frozen=True, slots=True, eq=False)
class EpochPlan:
    """Plan of the exchange that leads to an epoch.

    Parameters
    ----------
    epoch
        Number of the epoch, from 0. The exchange for epoch 0 loads rows from the store.
    seed, n_workers
        Seed and number of workers of the specification.
    ranks
        ``(q,)`` int32, the worker that trains on each sample; -1 for samples that all workers train on.
    holders
        ``(q, words)`` uint64 masks of the workers that hold each sample after the exchange is committed.
    packets
        Packets of the exchange.
    n_needed
        Number of samples that were missing from their worker's partition before the exchange.
    broadcast
        Ascending int64, the samples that all workers train on.
    epochs
        Which epochs have an exchange, and the order of training.
    """

    epoch: int
    seed: int
    n_workers: int
    ranks: Ranks
    holders: Holders
    packets: Packets
    n_needed: int
    broadcast: Samples = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    epochs: ExchangeEpochs = EVERY_EPOCH

    @property
    def shares(self) -> tuple[int, int]:
        """Smallest and largest number of samples that a worker trains on."""
        # Skip key -1 (broadcast samples): every worker trains on all of them.
        counts = count_keys(self.ranks, -1, self.n_workers)[1:] + len(self.broadcast)
        return int(counts.min()), int(counts.max())

    def with_broadcast(self, broadcast: Samples, dealt: Samples, *, loads: bool) -> EpochPlan:
        """Return the plan of all samples, if this plan is for the samples that are not broadcast.

        Sample j of this plan is ``dealt[j]``; ``dealt`` is ascending. ``loads`` says that workers read what they hold.
        """
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
