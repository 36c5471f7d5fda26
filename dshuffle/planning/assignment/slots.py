"""Samples in slots: which sample is where in any epoch, point by point, with partial exchanges and changes of workers.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.assignment.blocks import Blocks
from dshuffle.planning.assignment.worker_change import Handover, WorkerChange, sizes_after
from dshuffle.planning.bijection_family import BijectionFamily
from dshuffle.planning.exchange_epochs import EVERY_EPOCH, ExchangeEpochs
from dshuffle.planning.randomness import random_words, words_at
from dshuffle.planning.types import Ranks, Samples

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
        self._follow(workers, slots, -1)

    def trace(self, workers: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Replace the ``(k,)`` places of samples before the exchange by the places after it."""
        self._follow(workers, slots, 1)

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

    def _follow(self, workers: NDArray[np.int64], slots: NDArray[np.int64], sign: int) -> None:
        rounds = self.rounds.forward(workers, slots)
        moved = np.flatnonzero(rounds < self.count)
        rounds = rounds[moved]
        workers[moved] = self._shifted(workers[moved], rounds, sign)
        slots[moved] = self.emptied(workers[moved], rounds)

    def _shifted(self, workers: NDArray[np.int64], rounds: NDArray[np.int64], sign: int) -> NDArray[np.int64]:
        n_workers = len(self.rounds.offsets) - 1
        orders = rounds % ORDERS
        places = self.orders.forward(orders, workers) + sign * self.distances[rounds]
        return self.orders.inverse(orders, places % n_workers)


@dataclass(frozen=True, slots=True, eq=False)
class Era:
    """Epochs with the same workers.

    Parameters
    ----------
    epoch
        The first one.
    sizes
        ``(n,)`` int64, the slots of each worker.
    count
        Samples that every worker exchanges for each of the later epochs.
    handover, carried
        How the samples came from the slots of the workers before, and the last epoch of these; None and -1 for the
        first era.
    """

    epoch: int
    sizes: NDArray[np.int64]
    count: int
    handover: Handover | None = None
    carried: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The samples in all slots, in every epoch.

    Parameters
    ----------
    first
        Ranks of epoch 0. A worker's first slots have its samples in the order of their positions.
    eras
        The eras in order, from epoch 0; at least one.
    fixed_points, seed
        Whether a worker may receive its own samples in an exchange, and the seed of the shuffle.
    epochs
        Which epochs have an exchange.

    Examples
    --------
    >>> slots = Slots.of(Blocks.contiguous(12, 3), (), lambda n_workers: 1, fixed_points=False, seed=7)
    >>> slots.samples_of(0, epoch=0), slots.samples_of(0, epoch=1)
    (array([0, 1, 2, 3]), array([0, 6, 2, 3]))
    >>> slots.ranks_of(np.array([0, 6, 1]), epoch=1)
    array([0, 0, 2], dtype=int32)
    """

    first: Blocks
    eras: tuple[Era, ...]
    fixed_points: bool
    seed: int
    epochs: ExchangeEpochs = EVERY_EPOCH

    @classmethod
    def of(
        cls,
        first: Blocks,
        changes: Sequence[WorkerChange],
        count: Callable[[int], int],
        *,
        fixed_points: bool,
        seed: int,
    ) -> Slots:
        """Slots of workers that have changed.

        Parameters
        ----------
        first, fixed_points, seed
            See :class:`Slots`.
        changes
            How the workers changed.
        count
            Returns the samples that each of a number of workers exchanges.
        """
        eras = [Era(0, first.sizes, count(first.n_workers))]
        for number, change in enumerate(changes):
            before, after = eras[-1].sizes, sizes_after(change, eras[-1].sizes)
            # The number tells two changes in one epoch apart.
            handover = Handover.drawn(change, before, after, "handover", seed, change.epoch, number)
            eras.append(Era(change.epoch, after, count(len(after)), handover, change.carried))
        return cls(first, tuple(eras), fixed_points, seed)

    @property
    def last(self) -> Era:
        """The era of the present workers."""
        return self.eras[-1]

    @property
    def shares(self) -> tuple[int, int]:
        """Smallest and largest number of samples that a worker trains on now."""
        return int(self.last.sizes.min()), int(self.last.sizes.max())

    def all_samples(self, epoch: int) -> Samples:
        """``(q,)`` int64, the samples of all slots in an epoch of the present workers, worker by worker."""
        sizes = self.last.sizes
        workers = np.repeat(np.arange(len(sizes)), sizes)
        return self.samples_at(workers, np.concatenate([np.arange(size) for size in sizes.tolist()]), epoch)

    def exchange(self, epoch: int) -> SlotExchange:
        """The exchange for an epoch after the first one of the present workers."""
        return self._exchange(self.last, epoch)

    def samples_at(self, workers: NDArray[np.int64], slots: NDArray[np.int64], epoch: int) -> Samples:
        """``(k,)`` int64, the samples in the ``(k,)`` slots of the ``(k,)`` workers in an epoch; O(k epoch) time."""
        workers, slots = workers.copy(), slots.copy()
        for era, last in reversed(self._until(epoch)):
            for past in self._exchanges(era, last)[::-1]:
                self._exchange(era, past).trace_back(workers, slots)
            if era.handover is not None:
                era.handover.trace_back(workers, slots)
        return self.first.samples_at(workers, slots)

    def ranks_of(self, samples: NDArray[np.int64], epoch: int) -> Ranks:
        """``(k,)`` int32, the workers that train on the ``(k,)`` samples in an epoch; O(k epoch) time."""
        workers, slots = self.first.places_of(samples)
        for era, last in self._until(epoch):
            if era.handover is not None:
                era.handover.trace(workers, slots)
            for past in self._exchanges(era, last):
                self._exchange(era, past).trace(workers, slots)
        return workers.astype(np.int32)

    def samples_of(self, rank: int, epoch: int) -> Samples:
        """``(m,)`` int64, the samples of a worker in an epoch of the present workers, by slot."""
        size = int(self.last.sizes[rank])
        return self.samples_at(np.full(size, rank), np.arange(size), epoch)

    def _until(self, epoch: int) -> list[tuple[Era, int]]:
        """The eras up to an epoch, and the last epoch of each that later ones depend on."""
        eras = [era for era in self.eras if era.epoch <= epoch]
        return list(zip(eras, [*(era.carried for era in eras[1:]), epoch], strict=True))

    def _exchange(self, era: Era, epoch: int) -> SlotExchange:
        return SlotExchange.drawn(era.sizes, era.count, self.fixed_points, *path_of(self.seed, epoch))

    def _exchanges(self, era: Era, last: int) -> range:
        """The epochs of an era for which there was an exchange."""
        return self.epochs.after(era.epoch, last) if era.count else range(0)


def path_of(seed: int, epoch: int) -> tuple[str, int, int]:
    """Name of the random numbers of an epoch's exchange."""
    return "partial", seed, epoch
