"""Partial exchanges between slots: which sample is where in any epoch, point by point.

Every worker has a slot for each sample of its share. An exchange empties some slots of every worker and fills them
again, and the rest keep their samples. A keyed bijection of a worker's slots says which are emptied: slot ``s`` is
emptied in round ``b(s)`` if that is below the number of samples to exchange. In a round every worker sends one sample
and receives one, which goes to the slot that the round has emptied. So a sample can be followed from slot to slot, back
to the first epoch, without looking at the others.

References
----------
Nguyen et al. (2022), Algorithm 1; see docs/papers.md. There, every round has a random permutation of the ranks. Here it
is a cyclic shift of the ranks, by a random distance and in one of 16 random orders of the epoch. A sample's destination
is uniform in both, and every worker sends and receives the same number. But a worker need not draw ``n`` destinations
for every round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.assignment.blocks import Blocks
from dshuffle.planning.bijection_family import BijectionFamily
from dshuffle.planning.randomness import random_words, words_at
from dshuffle.planning.types import Samples

ORDERS = 16
"""Random orders of the ranks in an epoch. Rounds of the same order and distance have the same destinations."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotExchange:
    """The exchange of one epoch.

    Parameters
    ----------
    count
        Rounds: samples that every worker sends and receives.
    rounds
        From a worker's slots to rounds; slots with a round of ``count`` or more keep their samples.
    orders
        ``ORDERS`` bijections of the ranks.
    distances
        ``(count,)`` int64, how far round ``i`` shifts the ranks.

    Examples
    --------
    >>> exchange = SlotExchange.drawn(np.array([5, 5, 6]), 2, False, "example", 7)
    >>> workers, rounds = np.array([0, 1, 2]), np.array([1, 1, 1])
    >>> exchange.destinations(workers, rounds)
    array([1, 2, 0])
    >>> exchange.sources(exchange.destinations(workers, rounds), rounds)
    array([0, 1, 2])
    """

    count: int
    rounds: BijectionFamily
    orders: BijectionFamily
    distances: NDArray[np.int64]

    @classmethod
    def drawn(cls, sizes: NDArray[np.int64], count: int, fixed_points: bool, *path: int | str) -> SlotExchange:
        """Draw an exchange.

        Parameters
        ----------
        sizes
            ``(n,)``, the slots of each worker; at least ``count``.
        fixed_points
            Whether a round may send every sample to the worker that has it.
        path
            Names the random numbers, as in :func:`~dshuffle.planning.randomness.random_words`.
        """
        n_workers = len(sizes)
        slots, orders, distances = random_words(3, *path)
        least = 0 if fixed_points else 1
        # The upper 32 bits of a word, scaled to the number of distances.
        drawn = words_at(distances, np.arange(count)) >> np.uint64(32)
        scaled = (drawn * np.uint64(n_workers - least)) >> np.uint64(32)
        return cls(
            count,
            BijectionFamily.of(sizes, slots),
            BijectionFamily.of(np.full(ORDERS, n_workers), orders, largest_tables=n_workers),
            scaled.astype(np.int64) + least,
        )

    def emptied(self, workers: NDArray[np.int64], rounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """``(k,)``, the slot that each of the ``(k,)`` rounds empties and fills at each of the ``(k,)`` workers."""
        return self.rounds.inverse(workers, rounds)

    def destinations(self, workers: NDArray[np.int64], rounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """``(k,)``, the ranks to which the ``(k,)`` workers send in the ``(k,)`` rounds."""
        return self._shifted(workers, rounds, 1)

    def sources(self, workers: NDArray[np.int64], rounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """``(k,)``, the ranks from which the ``(k,)`` workers receive in the ``(k,)`` rounds."""
        return self._shifted(workers, rounds, -1)

    def trace_back(self, workers: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Replace the ``(k,)`` places of samples after the exchange by the places before it."""
        rounds = self.rounds.forward(workers, slots)
        moved = np.flatnonzero(rounds < self.count)
        rounds = rounds[moved]
        workers[moved] = self.sources(workers[moved], rounds)
        slots[moved] = self.emptied(workers[moved], rounds)

    def applied(self, samples: Samples) -> Samples:
        """``(q,)``, the samples of all slots after the exchange, from the ``(q,)`` before it; worker by worker."""
        offsets, all_rounds = self.rounds.offsets, np.arange(self.count)
        slots = np.empty((len(offsets) - 1, self.count), np.int64)
        for worker, offset in enumerate(offsets[:-1]):
            slots[worker] = offset + self.emptied(np.full(self.count, worker), all_rounds)
        after = samples.copy()
        for worker in range(len(slots)):
            sources = self.sources(np.full(self.count, worker), all_rounds)
            after[slots[worker]] = samples[slots[sources, all_rounds]]
        return after

    def _shifted(self, workers: NDArray[np.int64], rounds: NDArray[np.int64], sign: int) -> NDArray[np.int64]:
        n_workers = len(self.rounds.offsets) - 1
        orders = rounds % ORDERS
        places = self.orders.forward(orders, workers) + sign * self.distances[rounds]
        return self.orders.inverse(orders, places % n_workers)


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The samples in all slots, in every epoch.

    Parameters
    ----------
    first
        Ranks of epoch 0. A worker's first slots have its samples in the order of their positions.
    count, fixed_points, seed
        Samples that every worker exchanges in an epoch, whether it may receive its own, and the seed of the shuffle.

    Examples
    --------
    >>> slots = Slots(Blocks.contiguous(12, 3), count=1, fixed_points=False, seed=7)
    >>> slots.samples_of(0, epoch=0), slots.samples_of(0, epoch=1)
    (array([0, 1, 2, 3]), array([0, 6, 2, 3]))
    """

    first: Blocks
    count: int
    fixed_points: bool
    seed: int

    def first_samples(self) -> Samples:
        """``(q,)`` int64, the samples of all slots in epoch 0, worker by worker."""
        sizes = self.first.sizes
        workers = np.repeat(np.arange(len(sizes)), sizes)
        return self.first.samples_at(workers, np.concatenate([np.arange(size) for size in sizes.tolist()]))

    def exchange(self, epoch: int) -> SlotExchange:
        """The exchange for an epoch from 1."""
        return SlotExchange.drawn(self.first.sizes, self.count, self.fixed_points, *path_of(self.seed, epoch))

    def samples_at(self, workers: NDArray[np.int64], slots: NDArray[np.int64], epoch: int) -> Samples:
        """``(k,)`` int64, the samples in the ``(k,)`` slots of the ``(k,)`` workers in an epoch; O(k epoch) time."""
        workers, slots = workers.copy(), slots.copy()
        if self.count:
            for past in range(epoch, 0, -1):
                self.exchange(past).trace_back(workers, slots)
        return self.first.samples_at(workers, slots)

    def samples_of(self, rank: int, epoch: int) -> Samples:
        """``(m,)`` int64, the samples of a worker in an epoch, by slot."""
        size = int(self.first.sizes[rank])
        return self.samples_at(np.full(size, rank), np.arange(size), epoch)


def path_of(seed: int, epoch: int) -> tuple[str, int, int]:
    """Name of the random numbers of an epoch's exchange."""
    return "partial", seed, epoch
