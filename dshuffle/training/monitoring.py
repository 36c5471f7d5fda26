"""Time per phase of synchronous training, and the training rate of each worker.

References
----------
Nguyen et al. (2022), Figure 10; see docs/papers.md.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Seconds that one rank spent in each phase of an epoch's steps.

    Parameters
    ----------
    batches
        Seconds of gathering mini-batches from the partition.
    forward_backward
        Seconds of computing losses and gradients.
    gradient_exchange
        Seconds of averaging gradients, including the wait for slower ranks, and of updating the weights.
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
    """Time spent in each phase of an epoch.

    Parameters
    ----------
    epoch
        Epoch, counted from 0 at the start of the fit.
    ranks
        Seconds of each rank, in rank order.
    record
        Record of the exchange before this epoch: its total time, and the part that training could not hide
        (``waited_seconds``). None for the last epoch of a fit that stopped early, whose record the shuffler writes when
        it continues or is closed.
    """

    epoch: int
    ranks: tuple[PhaseSeconds, ...]
    record: EpochRecord | None = None

    @property
    def io(self) -> float:
        """I/O in Nguyen et al. (2022): gathering mini-batches (the mean over ranks) and waiting for the store."""
        return _mean([rank.batches for rank in self.ranks]) + self._waited(from_storage=True)

    @property
    def exchange(self) -> float:
        """EXCHANGE in Nguyen et al. (2022): waiting for samples of other workers that training does not hide."""
        return self._waited(from_storage=False)

    @property
    def forward_backward(self) -> float:
        """FW+BW in Nguyen et al. (2022), the mean over ranks."""
        return _mean([rank.forward_backward for rank in self.ranks])

    @property
    def gradient_exchange(self) -> float:
        """GE+WU in Nguyen et al. (2022), the mean over ranks."""
        return _mean([rank.gradient_exchange for rank in self.ranks])

    def _waited(self, *, from_storage: bool) -> float:
        record = self.record
        if record is None or record.reads_store != from_storage:
            return 0.0
        return record.waited_seconds


def with_records(breakdown: Mapping[int, EpochBreakdown], records: Sequence[EpochRecord]) -> tuple[EpochBreakdown, ...]:
    """Return each epoch's breakdown with its record, if there is one. Keys are the shuffler's epoch numbers."""
    by_epoch = {record.epoch: record for record in records}
    return tuple(replace(seconds, record=by_epoch.get(number)) for number, seconds in breakdown.items())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


logger = logging.getLogger(__name__)

SLOW = 2.0
"""A worker is slow if its rate is less than the median rate divided by this factor."""


NOTICEABLE = 0.5
"""Seconds of an epoch's longest task below which differences between workers are noise."""


def timed(partition: Partition, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int, float]:
    """Return ``fn(partition, *args, **kwargs)``, which trains on all samples, their number, and the seconds.

    Runs as a task on each worker.
    """
    partition.mark_trained(0)
    started = time.perf_counter()
    value = fn(partition, *args, **kwargs)
    partition.mark_trained()
    return value, len(partition), max(time.perf_counter() - started, 1e-9)


@dataclass(slots=True)
class WorkerSpeeds:
    """Training rates of all workers, epoch by epoch.

    Parameters
    ----------
    epochs
        Samples per second of each rank in every epoch.
    emulated
        Whether the speeds were requested. Slow workers are then not logged.
    longest
        Seconds of the longest task of every epoch.

    Examples
    --------
    >>> speeds = WorkerSpeeds()
    >>> speeds.add([100.0, 110.0, 25.0], seconds=4.0)
    >>> speeds.slow()
    {2: 4.0}
    """

    epochs: list[tuple[float, ...]] = field(default_factory=list)
    emulated: bool = False
    longest: list[float] = field(default_factory=list)

    def collect(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Return the values of :func:`timed` tasks, and record their rates as one epoch."""
        values, counts, seconds = zip(*gathered(futures), strict=True)
        self.add([count / spent for count, spent in zip(counts, seconds, strict=True)], seconds=max(seconds))
        return list(values)

    def add(self, rates: Sequence[float], seconds: float) -> None:
        """Record the samples per second of each rank in one epoch, and the seconds of its longest task."""
        self.epochs.append(tuple(rates))
        self.longest.append(seconds)

    def rates(self) -> tuple[float, ...]:
        """Return the samples per second of each rank: the median, as the first epoch compiles and imports.

        If the number of ranks has changed, epochs with the last number count.
        """
        alike = [rates for rates in self.epochs if len(rates) == len(self.epochs[-1])]
        return tuple(np.median(alike, axis=0).tolist()) if alike else ()

    def slow(self) -> dict[int, float]:
        """Return the ranks that are much slower than the median worker, and by which factor."""
        rates = self.rates()
        middle = float(np.median(rates)) if rates else 0.0
        return {rank: middle / rate for rank, rate in enumerate(rates) if rate * SLOW < middle}

    def warn(self) -> None:
        """Log a warning for each slow worker, as every epoch waits for it, unless the epochs are too short to tell."""
        usual = self.longest[1:] or self.longest  # the first epoch compiles and imports
        if self.emulated or not usual or np.median(usual) < NOTICEABLE:
            return
        for rank, times in self.slow().items():
            logger.warning("dshuffle: worker %d trained %.1f times slower than the median worker", rank, times)
