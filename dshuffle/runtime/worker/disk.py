"""The rows of a worker's partition on its local disk, and partitions that earlier sessions have kept there."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import BinaryIO

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dshuffle.errors import DShuffleError
from dshuffle.exchange.cache_partition import CachePartition, Index
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.kept_index import KeptLabel
from dshuffle.exchange.kept_partition import (
    KeptPartition,
    Listed,
    PartitionFolder,
    kept_nbytes,
    remove_unused,
)
from dshuffle.exchange.replies import RowsReply
from dshuffle.exchange.row_file import RowFile, does_not_fit
from dshuffle.runtime.session_options import LOCAL
from dshuffle.runtime.session_spec import Former, SessionSpec
from dshuffle.runtime.worker.made_in_thread import made_in_thread

logger = logging.getLogger(__name__)

BAD_FOLDER = (errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a folder that no room would mend."""

ROOM_WITHIN = 1.0
"""Seconds in which the workers of a machine make room on its disk."""


class PartitionOnDisk:
    """The file of a partition, and the folder in which it stays if it is to outlive the session.

    Parameters
    ----------
    worker
        The Dask worker.
    spec
        A session with a ``cache_directory``.
    rank
        The worker's rank.

    Raises
    ------
    CacheBudgetError
        If the directory cannot be used, or the disk does not have enough room.
    """

    def __init__(self, worker: Worker, spec: SessionSpec, rank: int) -> None:
        directory = spec.options.cache_directory
        assert directory is not None
        if directory == LOCAL:
            directory = str(worker.local_directory)
        layout, shuffle = spec.dataset.layout, spec.shuffle
        n_slots, limit = shuffle.capacity + shuffle.max_incoming, worker.memory_manager.memory_limit
        self._folder: PartitionFolder | None = None
        self._latest: tuple[int, Index, NDArray[np.uint32]] | None = None
        self._writing: asyncio.Task[None] | None = None
        if spec.kept_as is None:
            self.file = RowFile(layout, n_slots, directory, limit)
            return
        label = KeptLabel(
            spec.dataset.identity,
            spec.kept_as,
            spec.session_id.partition("+")[0],
            layout.nbytes,
            n_slots,
            shuffle.history,
            rank,
        )
        try:
            self._folder, rows = _room_for(directory, label)
        except OSError as error:
            raise does_not_fit(directory, error) from error
        try:
            self.file = RowFile(layout, n_slots, directory, limit, file=rows)
        except BaseException:
            self._folder.close()
            raise

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
        except OSError as error:
            if folder is not None:
                folder.close()
            if error.errno in BAD_FOLDER:
                raise
            if time.monotonic() > deadline:
                if others := kept_nbytes(directory):
                    hint = f"partitions of other datasets or sessions (dshuffle-partition-*) take {others} bytes there"
                    raise OSError(f"{error}; {hint}") from error
                raise
            if remove_unused(directory, label) or remove_unused(directory, label, of_session=True):
                logger.warning("dshuffle: kept partitions in %s were removed to make room for a new one", directory)
            time.sleep(0.1)  # another worker of this machine may be removing some


class KeptPartitions:
    """Kept partitions that this worker reads, for itself and for others, while a session reads its first partitions."""

    def __init__(self) -> None:
        self._open: dict[str, KeptPartition] = {}
        self._readers: dict[str, set[str]] = {}  # the sessions that read a partition

    async def open(self, worker: Worker, spec: SessionSpec, executor: Executor) -> None:
        """Open those that a session counts on. If one cannot be used any more, its rows come from the dataset."""
        if spec.former is None or not spec.former.kept:
            return
        here = [name for address, name in spec.former.holders.values() if address == worker.address]
        new = [name for name in here if name not in self._open]
        opened = await made_in_thread(executor, _opened, worker, spec, new, close=_close_all)
        for name, partition in opened.items():
            if name in self._open:  # another session has opened it meanwhile
                partition.close()
            else:
                self._open[name] = partition
        for name in self._open.keys() & set(here):
            self._readers.setdefault(name, set()).add(spec.session_id)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    async def rows(self, name: str, sample_ids: NDArray[np.int64], executor: Executor | None) -> RowsReply:
        """Rows of a partition, and which of the samples it has."""
        read = self._open[name].read
        rows, checksums, present = await asyncio.get_running_loop().run_in_executor(executor, read, sample_ids)
        return RowsReply(rows, checksums, present=present)

    def close(self, session_id: str) -> None:
        """Let go of the partitions of a session, which has read them."""
        for name, readers in list(self._readers.items()):
            readers.discard(session_id)
            if not readers:
                del self._readers[name]
                self._open.pop(name).close()


def _opened(worker: Worker, spec: SessionSpec, names: Iterable[str]) -> dict[str, KeptPartition]:
    found, limit = {}, worker.memory_manager.memory_limit
    assert spec.options.cache_directory is not None
    for name in names:
        try:
            found[name] = KeptPartition(os.path.join(spec.options.cache_directory, name), spec.dataset.layout, limit)
        except DShuffleError as error:
            logger.warning("dshuffle: %s", error)
    return found


def _close_all(partitions: dict[str, KeptPartition]) -> None:
    for partition in partitions.values():
        partition.close()


def kept_here(worker: Worker, spec: SessionSpec, rank: int, epoch: int) -> SessionSpec:
    """The session of a worker that takes a rank, with the partition that the lost worker may have left on this disk."""
    if spec.kept_as is None or spec.former is not None or spec.options.cache_directory is None:
        return spec
    wanted = spec.kept_as, spec.shuffle.history, rank, epoch
    for one in Listed.all_in(spec.options.cache_directory, spec.dataset.identity):
        if (one.label.shuffle, one.label.history, one.label.rank, one.label.epoch) == wanted:
            return spec.with_former(Former(epoch, {rank: (worker.address, one.name)}, kept=True))
    return spec
