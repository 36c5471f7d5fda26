"""Ranks as functions: blocks of positions, slots of workers, and how both change with the workers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning.exchange_epochs import EVERY_EPOCH, ExchangeEpochs, Weights, check_weights, share_sizes
from dshuffle.planning.randomness import Bijection, permutation, random_words, words_at
from dshuffle.planning.types import Integers, Ranks, Samples, starts_of


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The ranks of one epoch: positions are cut into a block for each worker."""

    n_samples: int
    # Samples that stay together: 1, or the rows of a chunk. A short chunk at the end goes to the last block, which is
    # never larger than the others if there are no weights.
    unit: int
    names: Ranks  # ``(n_workers,)`` int32, the worker of each block.
    starts: Integers  # ``(n_workers + 1,)``, the position at which each block begins, in whole units.
    bijection: Bijection | None  # From units to positions; None leaves them in order.

    @classmethod
    def drawn(cls, n_samples: int, n_workers: int, unit: int, *path: int | str, weights: Weights = ()) -> Blocks:
        """Draw uniform ranks."""
        # Without random names, the same workers would get the larger blocks, and be slower, in every epoch.
        names = permutation(n_workers, "names", *path).astype(np.int32)
        n_units = n_samples // unit  # none if a worker has a single chunk that is short
        return cls._cut(n_samples, unit, names, Bijection.of(n_units, *path) if n_units else None, weights)

    @classmethod
    def contiguous(cls, n_samples: int, n_workers: int, unit: int = 1, weights: Weights = ()) -> Blocks:
        """Give consecutive units to each worker, in rank order."""
        return cls._cut(n_samples, unit, np.arange(n_workers, dtype=np.int32), None, weights)

    @classmethod
    def _cut(cls, n_samples: int, unit: int, names: Ranks, bijection: Bijection | None, weights: Weights) -> Blocks:
        if weights:
            sizes = share_sizes(n_samples // unit, weights)[names]
        else:
            each, extra = divmod(n_samples // unit, len(names))
            sizes = each + (np.arange(len(names)) < extra)
        return cls(n_samples, unit, names, starts_of(sizes), bijection)

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return len(self.names)

    def _mapped(self, units: Integers, *, back: bool = False) -> Integers:
        """Positions of units, or the other way round."""
        return units if self.bijection is None else self.bijection.forward(units, back=back)

    def ranks_of(self, samples: Samples) -> Ranks:
        """``(k,)`` int32, the workers that train on the given ``(k,)`` samples."""
        units = samples // self.unit if self.unit > 1 else samples
        whole = units < self.starts[-1]
        blocks = np.searchsorted(self.starts[1:], self._mapped(np.where(whole, units, 0)), side="right")
        return self.names[np.where(whole, blocks, self.n_workers - 1)]

    def samples_of(self, rank: int) -> Samples:
        """Ascending int64, the samples on which a worker trains."""
        block = int(np.flatnonzero(self.names == rank)[0])
        units = np.sort(self._mapped(np.arange(self.starts[block], self.starts[block + 1]), back=True))
        if self.unit == 1:
            return units
        samples = (units[:, np.newaxis] * self.unit + np.arange(self.unit)).ravel()
        last = self.n_samples if block == self.n_workers - 1 else 0
        return np.concatenate([samples, np.arange(self.starts[-1] * self.unit, last)])

    @property
    def sizes(self) -> Integers:
        """``(n_workers,)`` int64, the units of each worker."""
        return np.diff(self.starts)[np.argsort(self.names)]

    def samples_at(self, workers: Integers, places: Integers) -> Samples:
        """``(k,)`` int64, the samples at the given ``(k,)`` places of the workers' blocks, if units are samples."""
        return self._mapped(self.starts[np.argsort(self.names)][workers] + places, back=True)

    def places_of(self, samples: Samples) -> tuple[Integers, Integers]:
        """Workers and places of the given ``(k,)`` samples, ``(k,)`` int64 each, if units are samples."""
        positions = self._mapped(samples)
        blocks = np.searchsorted(self.starts[1:], positions, side="right")
        return self.names[blocks].astype(np.int64), positions - self.starts[blocks]

    def all_ranks(self) -> Ranks:
        """``(n_samples,)`` int32, the worker of every sample."""
        return self.ranks_of(np.arange(self.n_samples))

    @property
    def shares(self) -> tuple[int, int]:
        """Smallest and largest number of samples that a worker trains on."""
        sizes = np.diff(self.starts) * self.unit
        sizes[-1] += self.n_samples % self.unit
        return int(sizes.min()), int(sizes.max())


NEW = -1
"""Former rank of a worker that has joined."""


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """Other workers take over the samples."""

    epoch: int  # First epoch of the new workers.
    carried: int  # Last epoch of the workers before. It is the same epoch if they had trained on a part of it.
    n_before: int
    # For each new rank, the rank that its worker had before; :data:`NEW` for a worker that has joined.
    former: tuple[int, ...]
    weights: Weights = ()  # Relative share of each new rank; none for equal shares.

    def __post_init__(self) -> None:
        if self.carried < 0 or self.epoch not in (self.carried, self.carried + 1):
            raise InvalidParameter.of("epoch", self.epoch, f"{self.carried} or {self.carried + 1}")
        stay = [rank for rank in self.former if rank != NEW]
        if not self.former or len(set(stay)) < len(stay) or not all(0 <= rank < self.n_before for rank in stay):
            allowed = f"ranks below n_before={self.n_before}, each at most once, or {NEW}"
            raise InvalidParameter.of("former", self.former, allowed)
        check_weights(self.weights, len(self.former))


@dataclass(frozen=True, slots=True)
class WorkerHistory:
    """How many workers there are, and how they have changed."""

    n_workers: int
    # The changes that led to them, in order; none if there were always as many, with the same shares.
    changes: tuple[WorkerChange, ...] = ()
    first_weights: Weights = ()  # Relative share of each rank in epoch 0; none for equal shares.

    def __post_init__(self) -> None:
        check_weights(self.first_weights, self.first_n_workers)
        epoch, n_workers = 0, self.first_n_workers
        for change in self.changes:
            if change.carried < epoch or change.n_before != n_workers:
                raise InvalidParameter.of("changes", change, f"a change of {n_workers} workers after epoch {epoch}")
            epoch, n_workers = change.epoch, len(change.former)
        if self.n_workers != n_workers:
            raise InvalidParameter.of("n_workers", self.n_workers, f"{n_workers}, as after the last change")

    @property
    def first_n_workers(self) -> int:
        """Number of workers in epoch 0."""
        return self.changes[0].n_before if self.changes else as_integer("n_workers", self.n_workers, 1)

    @property
    def weights(self) -> Weights:
        """Relative share of each rank now; none for equal shares."""
        return self.changes[-1].weights if self.changes else self.first_weights

    @property
    def epoch(self) -> int:
        """First epoch of the present workers."""
        return self.changes[-1].epoch if self.changes else 0

    @property
    def before(self) -> WorkerHistory:
        """The history before the last change."""
        return WorkerHistory(self.changes[-1].n_before, self.changes[:-1], self.first_weights)

    def trained_in(self, epoch: int, n_workers: int, weights: Weights = ()) -> WorkerHistory:
        """The history without its last changes in the middle of an epoch, back to the workers that trained in it."""
        # Workers that take over in the middle of an epoch, and do not train in it, leave the samples where they were.
        trained = (self.n_workers, self.weights) == (n_workers, weights)
        if trained or not self.changes or self.changes[-1].carried != epoch:
            return self
        return self.before.trained_in(epoch, n_workers, weights)

    def changed(self, former: Sequence[int], *, epoch: int, carried: int, weights: Weights = ()) -> WorkerHistory:
        """The history with one more change; the same history if ranks, workers and shares are the same."""
        # The parameters are those of :class:`WorkerChange`.
        if list(former) == list(range(self.n_workers)) and weights == self.weights:
            return self
        change = WorkerChange(epoch, carried, self.n_workers, tuple(former), weights)
        return WorkerHistory(len(former), (*self.changes, change), self.first_weights)

    def to_dict(self) -> dict[str, Any]:
        """The history as JSON can hold it."""
        fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """What :meth:`to_dict` returned."""
        changes = (
            WorkerChange(**{**entry, "former": tuple(entry["former"]), "weights": tuple(entry["weights"])})
            for entry in fields["changes"]
        )
        return cls(fields["n_workers"], tuple(changes), tuple(fields["first_weights"]))


@dataclass(frozen=True, slots=True, eq=False)
class Handover:
    """Which slot of the new workers gets the sample of which slot of the workers before, point by point."""

    # The samples of each worker before are put into random order. A worker that stays keeps as many of the first ones
    # as it has slots. All others go to the slots that are left, again in random order.

    # Of each pair, the first is about the workers before, and the second about those after the change.
    ranks: tuple[Integers, Integers]  # ``(n,)``, the rank of each on the other side, or :data:`NEW`.
    kept: tuple[Integers, Integers]  # ``(n,)``, how many slots of each worker keep their samples.
    # ``(n + 1,)``, how many slots of all workers with a lower rank give up a sample, or get one.
    moved: tuple[Integers, Integers]
    within: Bijection  # From the slots of each worker before to their random order.
    order: Bijection  # From slots that give up a sample to those that get one.

    @classmethod
    def drawn(cls, change: WorkerChange, before: Integers, after: Integers, *path: int | str) -> Handover:
        """Draw where samples go."""
        # before, after: ``(n,)`` int64 each, numbers of slots of the workers before and after. Their sums are equal.
        former = np.array(change.former, np.int64)
        stays = np.flatnonzero(former != NEW)
        later = np.full(change.n_before, NEW)
        later[former[stays]] = stays
        kept_before, kept_after = np.zeros_like(before), np.zeros_like(after)
        kept_after[stays] = np.minimum(after[stays], before[former[stays]])
        kept_before[former[stays]] = kept_after[stays]
        surplus, vacant = starts_of(before - kept_before), starts_of(after - kept_after)
        # Otherwise the same samples would come and go if workers often do.
        within = Bijection.family(before, random_words(1, "within", *path)[0])
        order = Bijection.of(int(surplus[-1]), *path)
        return cls((later, former), (kept_before, kept_after), (surplus, vacant), within, order)

    def trace(self, workers: Integers, slots: Integers, *, back: bool = False) -> None:
        """Replace the ``(k,)`` places of samples before the change by those after it, or the other way round."""
        if not back:
            slots[:] = self.within.forward(slots, workers)
        kept, starts = self.kept[back], self.moved[back]
        moves = slots >= kept[workers]
        numbers = starts[workers[moves]] + slots[moves] - kept[workers[moves]]
        numbers = self.order.forward(numbers, back=back)
        workers[~moves] = self.ranks[back][workers[~moves]]
        # The numbered slots follow the kept ones of each worker.
        kept, starts = self.kept[not back], self.moved[not back]
        workers[moves] = np.searchsorted(starts, numbers, side="right") - 1
        slots[moves] = kept[workers[moves]] + numbers - starts[workers[moves]]
        if back:
            slots[:] = self.within.inverse(slots, workers)


def sizes_after(change: WorkerChange, before: Integers) -> Integers:
    """``(n,)`` int64, the numbers of slots after a change. Without weights they differ by at most one."""
    # The workers that have most slots then get the larger numbers, so that no sample moves needlessly.
    if change.weights:
        return share_sizes(int(before.sum()), change.weights)
    had = [0 if rank == NEW else int(before[rank]) for rank in change.former]
    each, extra = divmod(int(before.sum()), len(had))
    sizes = np.full(len(had), each)
    sizes[np.argsort(np.negative(had), kind="stable")[:extra]] += 1
    return sizes


def places_of_all(sizes: Integers) -> tuple[Integers, Integers]:
    """Worker and slot of all places, worker by worker."""
    workers = np.repeat(np.arange(len(sizes)), sizes)
    return workers, np.arange(len(workers)) - starts_of(sizes)[workers]


ORDERS = 16
"""Random orders of the ranks in an epoch. Rounds of the same order and distance have the same destinations."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotExchange:
    """The exchange of one epoch."""

    count: int  # Rounds: samples that every worker sends and receives.
    # From a worker's slots to rounds; slots with a round of ``count`` or more keep their samples.
    rounds: Bijection
    orders: Bijection  # ``ORDERS`` bijections of the ranks.
    distances: Integers  # ``(count,)`` int64, how far round ``i`` shifts the ranks.

    @classmethod
    def drawn(cls, sizes: Integers, count: int, seed: int, epoch: int) -> SlotExchange:
        """Draw an exchange."""
        # sizes: ``(n,)``, the slots of each worker; at least ``count``.
        n_workers = len(sizes)
        slots, orders, distances = random_words(3, "partial", seed, epoch)
        # The upper 32 bits of a word, scaled to the number of distances, none of which is 0.
        drawn = words_at(distances, np.arange(count)) >> np.uint64(32)
        scaled = (drawn * np.uint64(n_workers - 1)) >> np.uint64(32)
        return cls(
            count,
            Bijection.family(sizes, slots),
            Bijection.family(np.full(ORDERS, n_workers), orders, largest_tables=n_workers),
            scaled.astype(np.int64) + 1,
        )

    def emptied(self, workers: Integers, rounds: Integers) -> Integers:
        """``(k,)``, the slot that each of the ``(k,)`` rounds empties and fills at each of the ``(k,)`` workers."""
        return self.rounds.inverse(rounds, workers)

    def shifted(self, workers: Integers, rounds: Integers, sign: int) -> Integers:
        """``(k,)``, the ranks to which (``sign`` 1) or from which (-1) the workers send or receive in the rounds."""
        orders = rounds % ORDERS
        places = self.orders.forward(workers, orders) + sign * self.distances[rounds]
        return self.orders.inverse(places % (len(self.rounds.offsets) - 1), orders)

    def trace(self, workers: Integers, slots: Integers, *, back: bool = False) -> None:
        """Replace the ``(k,)`` places of samples before the exchange by those after it, or the other way round."""
        rounds = self.rounds.forward(slots, workers)
        moved = np.flatnonzero(rounds < self.count)
        rounds = rounds[moved]
        workers[moved] = self.shifted(workers[moved], rounds, -1 if back else 1)
        slots[moved] = self.emptied(workers[moved], rounds)

    def applied(self, samples: Samples) -> Samples:
        """``(q,)``, the samples of all slots after the exchange, from the ``(q,)`` before it; worker by worker."""
        offsets, after = self.rounds.offsets, samples.copy()
        workers, rounds = places_of_all(np.full(len(offsets) - 1, self.count))
        sources = self.shifted(workers, rounds, -1)
        after[offsets[workers] + self.emptied(workers, rounds)] = samples[
            offsets[sources] + self.emptied(sources, rounds)
        ]
        return after


@dataclass(frozen=True, slots=True, eq=False)
class Era:
    """Epochs with the same workers."""

    epoch: int
    sizes: Integers  # ``(n,)`` int64, the slots of each worker.
    count: int  # Samples that every worker exchanges for each of the later epochs.
    # handover, carried: How the samples came from the slots of the workers before, and the last epoch of these; None
    # and -1 for the first era.
    handover: Handover | None = None
    carried: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The samples in all slots, in every epoch."""

    first: Blocks  # Ranks of epoch 0. A worker's first slots have its samples in the order of their positions.
    eras: tuple[Era, ...]  # The eras in order, from epoch 0; at least one.
    seed: int
    epochs: ExchangeEpochs = EVERY_EPOCH  # Which epochs have an exchange.

    @classmethod
    def of(cls, first: Blocks, changes: Sequence[WorkerChange], count: Callable[[int], int], seed: int) -> Slots:
        """Slots of workers that have changed."""
        eras = [Era(0, first.sizes, count(first.n_workers))]
        for number, change in enumerate(changes):
            before, after = eras[-1].sizes, sizes_after(change, eras[-1].sizes)
            # The number tells two changes in one epoch apart.
            handover = Handover.drawn(change, before, after, "handover", seed, change.epoch, number)
            eras.append(Era(change.epoch, after, count(len(after)), handover, change.carried))
        return cls(first, tuple(eras), seed)

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
        return self.samples_at(*places_of_all(self.last.sizes), epoch)

    def samples_at(self, workers: Integers, slots: Integers, epoch: int) -> Samples:
        """``(k,)`` int64, the samples in the ``(k,)`` slots of the ``(k,)`` workers in an epoch; O(k epoch) time."""
        workers, slots = workers.copy(), slots.copy()
        for step in self._steps(epoch, back=True):
            step.trace(workers, slots, back=True)
        return self.first.samples_at(workers, slots)

    def ranks_of(self, samples: Integers, epoch: int) -> Ranks:
        """``(k,)`` int32, the workers that train on the ``(k,)`` samples in an epoch; O(k epoch) time."""
        workers, slots = self.first.places_of(samples)
        for step in self._steps(epoch):
            step.trace(workers, slots)
        return workers.astype(np.int32)

    def samples_of(self, rank: int, epoch: int) -> Samples:
        """``(m,)`` int64, the samples of a worker in an epoch of the present workers, by slot."""
        size = int(self.last.sizes[rank])
        return self.samples_at(np.full(size, rank), np.arange(size), epoch)

    def _steps(self, epoch: int, *, back: bool = False) -> Iterator[Handover | SlotExchange]:
        """The handovers between eras and the exchanges up to an epoch, in order or backwards."""
        eras = [era for era in self.eras if era.epoch <= epoch]
        steps = [
            (era, number)
            for era, last in zip(eras, [*(era.carried for era in eras[1:]), epoch], strict=True)
            for number in (None, *(self.epochs.after(era.epoch, last) if era.count else ()))
        ]
        for era, number in steps[::-1] if back else steps:
            step: Handover | SlotExchange | None = era.handover if number is None else self.exchange(era, number)
            if step is not None:
                yield step

    def exchange(self, era: Era, epoch: int) -> SlotExchange:
        """The exchange of the workers of an era for one of their later epochs."""
        return SlotExchange.drawn(era.sizes, era.count, self.seed, epoch)
