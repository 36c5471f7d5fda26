"""Partitions on the disk of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DShuffleError, ExchangeError
from dshuffle.exchange.cache_partition import CachePartition, Index, RowFile, does_not_fit
from dshuffle.exchange.comms import RowsReply
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.kept_partition import (
    KeptFolder,
    KeptLabel,
    KeptPartition,
    PartitionFolder,
    remove_unused,
)
from dshuffle.rows import Checksums, RowLayout
from dshuffle.runtime.session_spec import PartitionSources

logger = logging.getLogger(__name__)


T = TypeVar("T")


async def made_in_thread(executor: Executor, make: Callable[..., T], *args: Any, close: Callable[[T], None]) -> T:
    """Call a function in a thread, and close what it returns if the caller is cancelled meanwhile.

    A thread cannot be cancelled. Without this, nobody would have its result, and only the garbage collector would free
    the files in it. The caller does not wait, because a store may take long to answer.
    """
    making = executor.submit(make, *args)
    try:
        return await asyncio.wrap_future(making)
    except asyncio.CancelledError:
        making.add_done_callback(functools.partial(_close_result, close))
        raise


def _close_result(close: Callable[[T], None], made: Future[T]) -> None:
    if not made.cancelled() and made.exception() is None:
        close(made.result())


ROOM_WITHIN = 1.0
"""Seconds in which the workers of a machine make room on its disk."""


class PartitionOnDisk:
    """The file of a partition, and the folder in which it stays if it is to outlive the session.

    ``memory_limit`` is that of the process in bytes. ``label`` says what the partition is of, if it is to outlive the
    session.
    """

    def __init__(
        self, directory: str, layout: RowLayout, n_slots: int, memory_limit: int | None, label: KeptLabel | None
    ) -> None:
        self._folder: PartitionFolder | None = None
        self._latest: tuple[int, Index, Checksums] | None = None
        self._writing: asyncio.Task[None] | None = None
        rows: BinaryIO | None = None
        if label is not None:
            try:
                self._folder, rows = _room_for(directory, label)
            except OSError as error:
                raise does_not_fit(directory, error) from error
        with contextlib.ExitStack() as on_error:
            if self._folder is not None:
                on_error.callback(self._folder.close)
            self.file = RowFile(layout, n_slots, directory, memory_limit, file=rows)
            on_error.pop_all()

    def keep(self, epoch: int, cache: CachePartition, jobs: JobQueue) -> None:
        """Write the index of an epoch that has just begun, if the partition is to outlive the session.

        If epochs are shorter than writing takes, some of them are left out.
        """
        if self._folder is not None:
            self._latest = epoch, cache.index, cache.checksums
            if self._writing is None or self._writing.done():
                self._writing = asyncio.create_task(self._write(self._folder, jobs))

    async def settle(self) -> None:
        """Wait until the index of the last epoch is written."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    def close(self) -> None:
        """Leave a kept partition to later sessions, and free any other one. Idempotent."""
        self.file.close()
        if self._folder is not None:
            self._folder.close()

    async def _write(self, folder: PartitionFolder, jobs: JobQueue) -> None:
        while self._latest is not None:
            latest, self._latest = self._latest, None
            try:
                await jobs.run(folder.write, *latest)
            except OSError as error:  # the partition itself has its room
                logger.warning("dshuffle: the partition of epoch %d cannot be kept: %s", latest[0], error)


def _room_for(directory: str, label: KeptLabel) -> tuple[PartitionFolder, BinaryIO]:
    """The folder and the file of a partition to keep. If the disk is full, those of earlier sessions are removed."""
    deadline = time.monotonic() + ROOM_WITHIN
    while True:
        folder: PartitionFolder | None = None
        try:
            folder = PartitionFolder(directory, label)
            return folder, folder.open_rows()
        except OSError:
            if folder is not None:
                folder.close()
            if time.monotonic() > deadline:
                raise
            if remove_unused(directory, label) or remove_unused(directory, label, of_session=True):
                logger.warning("dshuffle: kept partitions in %s were removed to make room for a new one", directory)
            time.sleep(0.1)  # another worker of this machine may be removing some


class KeptPartitions:
    """Kept partitions that this worker reads, for itself and for others, while a session reads its first partitions."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._open: dict[str, dict[str, KeptPartition]] = {}  # session -> name -> partition

    async def open(
        self, session_id: str, names: Iterable[str], directory: str, layout: RowLayout, memory_limit: int | None
    ) -> None:
        """Open those that a session counts on. If one cannot be used any more, its rows come from the dataset."""

        def opened() -> dict[str, KeptPartition]:
            partitions = {}
            for name in names:
                try:
                    partitions[name] = KeptPartition(os.path.join(directory, name), layout, memory_limit)
                except DShuffleError as error:
                    logger.warning("dshuffle: %s", error)
            return partitions

        self._open[session_id] = await made_in_thread(self._executor, opened, close=_close_all)

    async def rows(self, name: str, sample_ids: NDArray[np.int64]) -> RowsReply:
        """Rows of a partition, and which of the samples it has."""
        partition = next((named[name] for named in self._open.values() if name in named), None)
        if partition is None:
            raise ExchangeError(f"the kept partition {name} is gone or damaged")
        loop = asyncio.get_running_loop()
        rows, checksums, present = await loop.run_in_executor(self._executor, partition.read, sample_ids)
        return RowsReply(rows, checksums, present=present)

    def close(self, session_id: str) -> None:
        """Let go of the partitions of a session, which has read them."""
        _close_all(self._open.pop(session_id, {}))


def _close_all(partitions: dict[str, KeptPartition]) -> None:
    for partition in partitions.values():
        partition.close()


def kept_here(directory: str, label: KeptLabel, address: str) -> PartitionSources | None:
    """The partition of a rank and an epoch that a lost worker has left in a folder on this worker's disk."""
    for folder in KeptFolder.all_in(directory, label.dataset):
        if dataclasses.replace(folder.label, session=label.session) == label:
            return PartitionSources(label.epoch, {label.rank: (address, folder.name)}, kept=True)
    return None
