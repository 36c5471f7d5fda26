"""Where the seconds of an epoch of synchronous training go: paper 004, Figure 10.

How fast each worker trains: measured in every epoch, and said when one is much slower than the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from distributed import Future

from dshuffle.records import EpochRecord
from dshuffle.runtime import Partition, gathered

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


logger = logging.getLogger(__name__)

SLOW = 2.0
"""A worker is slow if its rate is less than the median's divided by this."""


def timed(partition: Partition, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
    """``fn(partition, *args, **kwargs)``, and how many samples a second it trained on; a task on each worker."""
    started = time.perf_counter()
    value = fn(partition, *args, **kwargs)
    return value, len(partition) / max(time.perf_counter() - started, 1e-9)


@dataclass(slots=True)
class WorkerSpeeds:
    """The rates of all workers, epoch by epoch.

    Parameters
    ----------
    epochs
        Samples a second of each rank.
    emulated
        Whether that is what was asked for, so that nobody is told of slow workers.

    Examples
    --------
    >>> speeds = WorkerSpeeds()
    >>> speeds.add([100.0, 110.0, 25.0])
    >>> speeds.slow()
    {2: 4.0}
    """

    epochs: list[tuple[float, ...]] = field(default_factory=list)
    emulated: bool = False

    def collect(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """The values of some :func:`timed` tasks; their rates count as one epoch's."""
        values, rates = zip(*gathered(futures), strict=True)
        self.add(rates)
        return list(values)

    def add(self, rates: Sequence[float]) -> None:
        """Samples a second of each rank in one epoch."""
        self.epochs.append(tuple(rates))

    def rates(self) -> tuple[float, ...]:
        """Samples a second of each rank: the median over epochs, as the first one compiles and imports."""
        return tuple(np.median(self.epochs, axis=0).tolist()) if self.epochs else ()

    def slow(self) -> dict[int, float]:
        """Ranks that are much slower than the median worker, and how many times."""
        rates = self.rates()
        middle = float(np.median(rates)) if rates else 0.0
        return {rank: middle / rate for rank, rate in enumerate(rates) if rate * SLOW < middle}

    def warn(self) -> None:
        """Log the slow workers: every epoch waits for them."""
        if self.emulated:
            return
        for rank, times in self.slow().items():
            logger.warning("dshuffle: worker %d trained %.1f times slower than the median worker", rank, times)
