"""Workers that change between epochs, where ranks depend on those of earlier epochs.

With ``local`` and ``partial``, a sample stays with its worker unless it is exchanged. When workers join or leave, as
few samples as possible change workers: each worker that stays keeps its samples, as far as its new share has room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning.bijection import Bijection
from dshuffle.planning.bijection_family import BijectionFamily
from dshuffle.planning.randomness import random_words
from dshuffle.planning.share_sizes import Weights, check_weights, share_sizes

NEW = -1
"""Former rank of a worker that has joined."""


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """Other workers take over the samples.

    Parameters
    ----------
    epoch
        First epoch of the new workers.
    carried
        Last epoch of the workers before. It is the same epoch if they had trained on a part of it.
    n_before
        Number of workers before.
    former
        For each new rank, the rank that its worker had before; :data:`NEW` for a worker that has joined.
    weights
        Relative share of each new rank; none for equal shares.

    Raises
    ------
    InvalidParameter
        If the epochs do not follow each other, or a former rank does not exist or occurs twice.
    """

    epoch: int
    carried: int
    n_before: int
    former: tuple[int, ...]
    weights: Weights = ()

    def __post_init__(self) -> None:
        as_integer("carried", self.carried, 0)
        as_integer("n_before", self.n_before, 1)
        if self.epoch not in (self.carried, self.carried + 1):
            raise InvalidParameter.of("epoch", self.epoch, f"{self.carried} or {self.carried + 1}")
        former_ranks = [as_integer("former", rank, NEW) for rank in self.former if rank != NEW]
        if (
            not self.former
            or len(set(former_ranks)) < len(former_ranks)
            or any(rank >= self.n_before for rank in former_ranks)
        ):
            allowed = f"ranks below n_before={self.n_before}, each at most once, or {NEW}"
            raise InvalidParameter.of("former", self.former, allowed)
        check_weights(self.weights, len(self.former))


@dataclass(frozen=True, slots=True)
class WorkerHistory:
    """How many workers there are, and how they have changed.

    Parameters
    ----------
    n_workers
        Number of workers now.
    changes
        The changes that led to them, in order; none if there were always as many, with the same shares.
    first_weights
        Relative share of each rank in epoch 0; none for equal shares.

    Raises
    ------
    InvalidParameter
        If the changes do not follow from each other.

    Examples
    --------
    >>> history = WorkerHistory(3).changed([0, 2], epoch=5, carried=4)
    >>> history.n_workers, history.changes
    (2, (WorkerChange(epoch=5, carried=4, n_before=3, former=(0, 2), weights=()),))
    >>> history.changed([0, 1], epoch=7, carried=6) == history  # the same workers
    True
    """

    n_workers: int
    changes: tuple[WorkerChange, ...] = ()
    first_weights: Weights = ()

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
        """The history without its last changes in the middle of an epoch, back to the workers that trained in it.

        Workers that take over in the middle of an epoch, and do not train in it, leave the samples where they were.

        Parameters
        ----------
        epoch
            The epoch.
        n_workers, weights
            Number of workers that trained in it last, and the weights of their shares.

        Examples
        --------
        >>> history = WorkerHistory(3).changed([0, 1], epoch=5, carried=5)
        >>> history.trained_in(5, 3), history.trained_in(5, 2) == history
        (WorkerHistory(n_workers=3, changes=(), first_weights=()), True)
        """
        history = self
        trained = n_workers, weights
        while (
            (history.n_workers, history.weights) != trained and history.changes and history.changes[-1].carried == epoch
        ):
            history = history.before
        return history

    def changed(self, former: Sequence[int], *, epoch: int, carried: int, weights: Weights = ()) -> WorkerHistory:
        """The history with one more change; the same history if ranks, workers and shares are the same.

        The parameters are those of :class:`WorkerChange`.
        """
        if list(former) == list(range(self.n_workers)) and weights == self.weights:
            return self
        change = WorkerChange(epoch, carried, self.n_workers, tuple(former), weights)
        return WorkerHistory(len(former), (*self.changes, change), self.first_weights)

    def to_dict(self) -> dict[str, Any]:
        """The history as JSON can hold it."""
        changes = [
            {**dataclasses.asdict(change), "former": list(change.former), "weights": list(change.weights)}
            for change in self.changes
        ]
        return {"n_workers": self.n_workers, "changes": changes, "first_weights": list(self.first_weights)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """What :meth:`to_dict` returned."""
        changes = [
            WorkerChange(**{**change, "former": tuple(change["former"]), "weights": tuple(change.get("weights", ()))})
            for change in fields["changes"]
        ]
        return cls(fields["n_workers"], tuple(changes), tuple(fields.get("first_weights", ())))


@dataclass(frozen=True, slots=True, eq=False)
class Handover:
    """Which slot of the new workers gets the sample of which slot of the workers before, point by point.

    The samples of each worker before are put into random order. A worker that stays keeps as many of the first ones as
    it has slots. All others go to the slots that are left, again in random order.

    Parameters
    ----------
    former, later
        ``(n,)`` int64 each: the former rank of each new one, and the new rank of each former one; :data:`NEW` if there
        is none.
    kept_before, kept_after
        ``(n,)`` int64 each: how many slots of each worker keep their samples, before and after.
    surplus, vacant
        ``(n + 1,)`` int64 each: how many slots of all workers with a lower rank give up a sample, and get one.
    within
        From the slots of each worker before to their random order.
    order
        From slots that give up a sample to those that get one; None if there are none.
    """

    former: NDArray[np.int64]
    later: NDArray[np.int64]
    kept_before: NDArray[np.int64]
    kept_after: NDArray[np.int64]
    surplus: NDArray[np.int64]
    vacant: NDArray[np.int64]
    within: BijectionFamily
    order: Bijection | None

    @classmethod
    def drawn(
        cls, change: WorkerChange, before: NDArray[np.int64], after: NDArray[np.int64], *path: int | str
    ) -> Handover:
        """Draw where samples go.

        Parameters
        ----------
        change
            The change.
        before, after
            ``(n,)`` int64 each, numbers of slots of the workers before and after. Their sums are equal.
        path
            Names the random numbers, as in :func:`~dshuffle.planning.randomness.random_words`.
        """
        former = np.array(change.former, np.int64)
        stays = np.flatnonzero(former != NEW)
        later = np.full(change.n_before, NEW)
        later[former[stays]] = stays
        kept_before, kept_after = np.zeros_like(before), np.zeros_like(after)
        kept_after[stays] = np.minimum(after[stays], before[former[stays]])
        kept_before[former[stays]] = kept_after[stays]
        surplus, vacant = _starts(before - kept_before), _starts(after - kept_after)
        order = Bijection.of(int(surplus[-1]), *path) if surplus[-1] else None
        # Otherwise the same samples would come and go if workers often do.
        within = BijectionFamily.of(before, random_words(1, "within", *path)[0])
        return cls(former, later, kept_before, kept_after, surplus, vacant, within, order)

    def trace_back(self, workers: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Replace the ``(k,)`` places of samples after the change by the places before it."""
        moved = slots >= self.kept_after[workers]
        numbers = self.vacant[workers[moved]] + slots[moved] - self.kept_after[workers[moved]]
        if self.order is not None:
            numbers = self.order.inverse(numbers)
        workers[~moved] = self.former[workers[~moved]]
        workers[moved], slots[moved] = _placed(numbers, self.surplus, self.kept_before)
        slots[:] = self.within.inverse(workers, slots)

    def trace(self, workers: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Replace the ``(k,)`` places of samples before the change by the places after it."""
        slots[:] = self.within.forward(workers, slots)
        moved = slots >= self.kept_before[workers]
        numbers = self.surplus[workers[moved]] + slots[moved] - self.kept_before[workers[moved]]
        if self.order is not None:
            numbers = self.order.forward(numbers)
        workers[~moved] = self.later[workers[~moved]]
        workers[moved], slots[moved] = _placed(numbers, self.vacant, self.kept_after)


def sizes_after(change: WorkerChange, before: NDArray[np.int64]) -> NDArray[np.int64]:
    """``(n,)`` int64, the numbers of slots after a change. Without weights they differ by at most one.

    The workers that have most slots then get the larger numbers, so that no sample moves needlessly.

    Examples
    --------
    >>> sizes_after(WorkerChange(1, 0, 3, (2, 0, NEW)), np.array([3, 3, 4]))
    array([4, 3, 3])
    """
    if change.weights:
        return share_sizes(int(before.sum()), change.weights)
    former = np.array(change.former)
    had = np.where(former == NEW, 0, before[former])
    each, extra = divmod(int(before.sum()), len(former))
    sizes = np.full(len(former), each, np.int64)
    sizes[np.argsort(-had, kind="stable")[:extra]] += 1
    return sizes


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)])


def _placed(
    numbers: NDArray[np.int64], starts: NDArray[np.int64], kept: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Workers and slots of numbered slots, which follow the kept ones of each worker."""
    workers = np.searchsorted(starts, numbers, side="right") - 1
    return workers, kept[workers] + numbers - starts[workers]
