"""Where the seconds of an epoch of synchronous training go: paper 004, Figure 10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dshuffle.records import EpochRecord

FROM_STORAGE = ("load", "storage")
"""Deliveries whose waiting is for the store, and not for other workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """What one rank spent an epoch's steps on.

    Parameters
    ----------
    batches
        Gathering mini-batches from the partition.
    forward_backward
        Computing losses and gradients.
    gradient_exchange
        Averaging gradients, waiting for slower ranks included, and the step.
    """

    batches: float = 0.0
    forward_backward: float = 0.0
    gradient_exchange: float = 0.0

    @property
    def own(self) -> float:
        """Seconds that depend on this rank alone."""
        return self.batches + self.forward_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBreakdown:
    """Where the seconds of an epoch went.

    Parameters
    ----------
    epoch
        From 0, the first of the fit.
    ranks
        Of every rank, in rank order.
    record
        What the exchange that led to this epoch took: how long all of it was, and how much of that training could not
        hide (``waited_seconds``). None for the last epoch of a fit that ended early, whose record its shuffler writes
        when it goes on or is closed.
    """

    epoch: int
    ranks: tuple[PhaseSeconds, ...]
    record: EpochRecord | None = None

    @property
    def io(self) -> float:
        """The paper's I/O: gathering mini-batches (the mean over ranks), and standing still for the store."""
        return _mean([rank.batches for rank in self.ranks]) + self._waited(from_storage=True)

    @property
    def exchange(self) -> float:
        """The paper's EXCHANGE: standing still for samples of other workers. What training hides costs nothing."""
        return self._waited(from_storage=False)

    @property
    def forward_backward(self) -> float:
        """The paper's FW+BW, the mean over ranks."""
        return _mean([rank.forward_backward for rank in self.ranks])

    @property
    def gradient_exchange(self) -> float:
        """The paper's GE+WU, the mean over ranks."""
        return _mean([rank.gradient_exchange for rank in self.ranks])

    def _waited(self, *, from_storage: bool) -> float:
        record = self.record
        if record is None or (record.delivery in FROM_STORAGE) != from_storage:
            return 0.0
        return record.waited_seconds


def with_records(breakdown: Mapping[int, EpochBreakdown], records: Sequence[EpochRecord]) -> tuple[EpochBreakdown, ...]:
    """Each epoch with its record, if that is known, by the shuffler's number of the epoch."""
    known = {record.epoch: record for record in records}
    return tuple(replace(one, record=known.get(number)) for number, one in breakdown.items())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
