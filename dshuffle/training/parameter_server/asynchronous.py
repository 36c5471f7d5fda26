"""Work of one worker in an epoch with an asynchronous parameter server, real or simulated."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning.randomness import permutation
from dshuffle.planning.types import Samples
from dshuffle.training.inputs import check_step

logger = logging.getLogger(__name__)

ONCE, FREE = "once", "free"
PACES = (ONCE, FREE)


@dataclass(frozen=True, slots=True)
class Asynchrony:
    """Checked parameters of :func:`fit_parameter_server` that say how workers divide the work.

    Parameters
    ----------
    n_workers
        Number of workers n.
    batch_size, step
        Batch size B and step alpha of a single worker.
    pace, speeds, seed
        See :func:`fit_parameter_server`.

    Raises
    ------
    InvalidParameter
        A parameter is out of range.

    References
    ----------
    Provatas et al. (2021), equations 3 and 4; see docs/papers.md.

    Examples
    --------
    >>> sharing = Asynchrony(n_workers=12, batch_size=120, step=0.6)
    >>> sharing.worker_batch, round(sharing.worker_step, 3)
    (10, 0.05)
    """

    n_workers: int
    batch_size: int
    step: float
    pace: str = ONCE
    speeds: tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        as_integer("n_workers", self.n_workers, 1)
        as_integer("batch_size", self.batch_size, 1)
        as_integer("seed", self.seed)
        if self.batch_size < self.n_workers:
            raise InvalidParameter.of(
                "batch_size", self.batch_size, f"at least the number of workers ({self.n_workers})", "They share it."
            )
        check_step(self.step)
        if self.pace not in PACES:
            raise InvalidParameter.of("pace", self.pace, f"one of {', '.join(PACES)}")
        if self.speeds is not None:
            if len(self.speeds) != self.n_workers:
                raise InvalidParameter.of("len(speeds)", len(self.speeds), f"{self.n_workers}, one per worker")
            for rank, speed in enumerate(self.speeds):
                if not (math.isfinite(speed) and speed > 0):
                    raise InvalidParameter.of(f"speeds[{rank}]", speed, "a finite number > 0")

    @property
    def worker_batch(self) -> int:
        """Batch size of a worker, WB = B / n (equation 3), rounded down."""
        return self.batch_size // self.n_workers

    @property
    def rounded_batch(self) -> int:
        """Batch size of all workers together."""
        return self.worker_batch * self.n_workers

    def warn_of_rounding(self) -> None:
        """Log a warning if the workers together take smaller batches than asked for."""
        if self.rounded_batch < self.batch_size:
            logger.warning(
                "dshuffle: batch_size=%d on %d workers is rounded to %d: each takes %d samples",
                *(self.batch_size, self.n_workers, self.rounded_batch, self.worker_batch),
            )

    @property
    def worker_step(self) -> float:
        """Step of a worker, alpha_w = alpha / n (equation 4)."""
        return self.step / self.n_workers

    def n_updates(self, n_samples: int) -> int | None:
        """Return the number of updates of an epoch; None if it ends when all samples have been used."""
        return -(-n_samples // self.worker_batch) if self.pace == FREE else None

    def check_partition(self, n_samples: int) -> None:
        """Check that mini-batches are not larger than a share.

        Raises
        ------
        InvalidParameter
            The batch size is too large. The message says the largest allowed batch size.
        """
        if n_samples < self.worker_batch:
            raise InvalidParameter.of(
                "batch_size",
                self.batch_size,
                f"at most {n_samples * self.n_workers}",
                f"Each of {self.n_workers} workers takes {self.worker_batch} samples of it, but one worker has only "
                f"{n_samples}. Use a smaller batch or fewer workers.",
            )


class MiniBatches:
    """Mini-batches of a worker's samples, in the order in which it takes them.

    A pass visits all samples in an order that depends only on the seed, the rank and the pass. The same partition
    therefore gives the same batches, whichever delivery brought it.

    Parameters
    ----------
    sample_ids
        ``(n,)``, in any order.
    sharing
        Batch size, pace and seed.
    rank
        Rank of the worker.
    epoch
        Epoch, counted from 0.
    done
        Number of mini-batches that the worker has trained on before. It is ignored at the pace ``"once"``.

    Examples
    --------
    >>> batches = MiniBatches(np.arange(5), Asynchrony(n_workers=1, batch_size=2, step=1), rank=0, epoch=0)
    >>> taken = []
    >>> while batches.following:
    ...     taken.append(batches.take().tolist())
    >>> [len(batch) for batch in taken], sorted(sum(taken, []))
    ([2, 2, 1], [0, 1, 2, 3, 4])
    """

    def __init__(
        self, sample_ids: NDArray[np.integer], sharing: Asynchrony, *, rank: int, epoch: int, done: int = 0
    ) -> None:
        self._positions = np.argsort(sample_ids, kind="stable")
        self._size = sharing.worker_batch
        self._path: tuple[int | str, ...] = ("mini-batches", sharing.seed, rank)
        self._per_pass = -(-len(sample_ids) // self._size)
        self._done = epoch * self._per_pass if sharing.pace == ONCE else done
        self._end = self._done + self._per_pass if sharing.pace == ONCE else None
        self._begin_pass()

    @property
    def following(self) -> int:
        """Number of samples in the next mini-batch; 0 if there is none left in this epoch."""
        if self._done == self._end:
            return 0
        return min(self._size, len(self._positions) - self._done % self._per_pass * self._size)

    def take(self) -> Samples:
        """Return the next mini-batch, as positions in ``sample_ids``."""
        first = self._done % self._per_pass * self._size
        batch = self._order[first : first + self._size]
        self._done += 1
        if self._done % self._per_pass == 0 and self._done != self._end:
            self._begin_pass()
        return batch

    def _begin_pass(self) -> None:
        order = permutation(len(self._positions), *self._path, self._done // self._per_pass)
        self._order: Samples = self._positions[order]


def geometric_speeds(n_workers: int, ratio: float) -> tuple[float, ...]:
    """Return speeds that fall by a constant factor from 1 to ``1 / ratio``.

    Raises
    ------
    InvalidParameter
        The ratio is less than 1.

    Examples
    --------
    >>> geometric_speeds(3, 4)
    (1.0, 0.5, 0.25)
    """
    if not 1 <= ratio < math.inf:
        raise InvalidParameter.of("ratio", ratio, "a finite number >= 1")
    speeds: Sequence[float] = np.geomspace(1, 1 / ratio, n_workers).tolist()
    return tuple(speeds)
