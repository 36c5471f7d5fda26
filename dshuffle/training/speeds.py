"""How fast each worker trains: measured in every epoch, and said when one is much slower than the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from distributed import Future

from dshuffle.runtime import Partition, gathered

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
