"""Lock between training and the exchange: tasks read one epoch, and a commit waits until all of them have ended."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import StaleEpoch
from dshuffle.exchange.cache_partition import RowFile
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.planning.remainder import SampleDigest
from dshuffle.rows import ByteMatrix, RowLayout
from dshuffle.runtime.messages import TrainingTime
from dshuffle.runtime.partition import Partition


@dataclass(frozen=True, slots=True)
class View:
    """An epoch as seen by training tasks. The fields are those of :class:`~dshuffle.runtime.Partition`."""

    epoch: int
    sample_ids: NDArray[np.int64]
    slots: NDArray[np.int64]
    shares: tuple[int, int]
    broadcast: NDArray[np.int64]
    weights: Weights = ()
    unequal: bool = False


class EpochLock:
    """Access of tasks to a worker's partition of the current epoch. A commit waits until no task reads.

    Parameters
    ----------
    layout, rows
        Row layout and cached rows of the worker.
    seed
        Seed of the shuffle, for digests of samples.
    loop
        Event loop on which commits wait. Tasks run in other threads.
    file
        The file of the rows, if they are on a disk.
    """

    def __init__(
        self,
        layout: RowLayout,
        rows: ByteMatrix,
        rank: int,
        seed: int,
        loop: asyncio.AbstractEventLoop,
        file: RowFile | None = None,
    ) -> None:
        self._layout = layout
        self._rows = rows
        self._rank = rank
        self._loop = loop
        self._file = file
        self._seed = seed
        self._view: View | None = None
        self._lock = threading.Lock()
        self._readers = 0
        self._no_readers = asyncio.Event()
        self._training_seconds = self._waiting_seconds = 0.0
        self._trained: dict[int, SampleDigest] = {}  # epoch -> samples that were trained on

    @property
    def readers(self) -> int:
        """Number of tasks that read the current epoch."""
        return self._readers

    @contextmanager
    def partition(self, epoch: int) -> Iterator[Partition]:
        """The partition of an epoch, valid for one task."""
        with self._lock:
            view = self._view
            if view is None or view.epoch != epoch:
                now = "none" if view is None else str(view.epoch)
                raise StaleEpoch(
                    f"a task of epoch {epoch} ran on rank {self._rank} while the current epoch was {now}; submit "
                    "tasks only during their epoch"
                )
            partition = Partition(
                self._layout,
                self._rows,
                view.slots,
                view.sample_ids,
                rank=self._rank,
                epoch=epoch,
                shares=view.shares,
                broadcast=view.broadcast,
                weights=view.weights,
                unequal=view.unequal,
                note=functools.partial(self._note_trained, view),
                note_waiting=self._note_waiting,
                file=self._file,
            )
            in_use = ExitStack()
            if self._file is not None:
                in_use.enter_context(self._file.in_use())
            self._readers += 1
        started = time.perf_counter()
        try:
            yield partition
        finally:
            partition.close()
            in_use.close()
            with self._lock:
                self._training_seconds += time.perf_counter() - started
                self._readers -= 1
                if not self._readers:
                    self._loop.call_soon_threadsafe(self._no_readers.set)

    async def swap(self, view: View, install: Callable[[], bool]) -> None:
        """Wait until no task reads, then switch to the next epoch atomically, if ``install`` returns true."""
        while True:
            with self._lock:
                if not self._readers:
                    if install():
                        before = -1 if self._view is None else self._view.epoch
                        self._trained = {before: self.trained(before)}  # others may not have swapped yet
                        self._view = view
                    return
                self._no_readers.clear()
            await self._no_readers.wait()

    def close(self) -> None:
        """Let go of the rows. Tasks that run keep them until they end, and no other task gets them."""
        with self._lock:
            self._rows, self._view, self._file = self._layout.empty(0), None, None

    def trained(self, epoch: int) -> SampleDigest:
        """Digest of the samples of the current epoch, or of the one before, that tasks have said to be trained on."""
        return self._trained.get(epoch, SampleDigest())  # without the lock, which ``swap`` holds

    def _note_trained(self, view: View, n_samples: int) -> None:
        trained = self.trained(view.epoch)
        if trained.count > n_samples:  # a task that begins again
            trained = SampleDigest()
        trained += SampleDigest.of(view.sample_ids[trained.count : n_samples], self._seed)
        with self._lock:
            if self._view is view:
                self._trained[view.epoch] = trained

    def _note_waiting(self, seconds: float) -> None:
        with self._lock:
            self._waiting_seconds += seconds

    def take_training_time(self) -> TrainingTime:
        """Time of training on this worker since the last call."""
        with self._lock:
            time_of_tasks = TrainingTime(seconds=self._training_seconds, waiting=self._waiting_seconds)
            self._training_seconds = self._waiting_seconds = 0.0
        return time_of_tasks
