"""Partitions that stay on a local disk when their session has ended, for a later session on the same machine.

Each partition has a folder with its rows and an index. The index names the dataset, the way of shuffling, the rank and
the epoch, and has the sample, slot and checksum of every row. It is replaced after each epoch, while the next rows
arrive in other slots. So if a process is killed, the index is that of the last epoch, or of the one before it. Some or
all rows of the latter may have been overwritten. Every row is compared with its checksum when it is read.

Others may share the directory, so only folders of this user count that nobody else can enter. Their owner and mode are
checked whenever a file in them is opened.

A process holds a lock on the rows that it uses. A folder without a lock may be read by any session, and removed by the
next session on the same dataset.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import CacheBudgetError, ExchangeError
from dshuffle.exchange.cache_partition import EMPTY, CachePartition, Index, RowFile, does_not_fit
from dshuffle.exchange.endpoints import JobQueue
from dshuffle.planning import WorkerHistory
from dshuffle.planning.types import sorted_positions
from dshuffle.private_files import check_folder, open_private_file, reserve
from dshuffle.rows import ByteMatrix, Checksums, RowLayout, checksum_rows

logger = logging.getLogger(__name__)

PREFIX = "dshuffle-partition-"
"""Beginning of the names of the folders."""

UNFINISHED = "dshuffle-new-"
"""The same, until the folder has a lock."""

UNREADABLE = (CacheBudgetError, OSError, ValueError, OverflowError, msgspec.MsgspecError)
"""Errors of a folder that is damaged."""

FORMAT = b"dshuffle 4 "
"""Beginning of an index: a line with this and the label as JSON, then a record for each row. Others are ignored."""

_RECORD = np.dtype([("sample_id", "<i8"), ("slot", "<i8"), ("checksum", "<u4")])


@dataclass(frozen=True, slots=True)
class KeptLabel:
    """What a kept partition is of."""

    dataset: str
    shuffle: str  # Digest of what decides who trains on what, except the workers.
    session: str  # The session that fills it.
    row_nbytes: int  # row_nbytes, n_slots: Shape of the file of rows.
    n_slots: int
    history: WorkerHistory  # history, rank, epoch: Workers of the session, rank, and epoch (-1 until there are rows).
    rank: int
    epoch: int = -1

    @classmethod
    def of(cls, line: bytes) -> Self:
        """The label in the first line of an index. Raises ValueError if it is none of this release."""
        if not line.startswith(FORMAT):
            raise ValueError("another release of dshuffle wrote it")
        return msgspec.json.decode(line.removeprefix(FORMAT), type=cls)


class PartitionFolder:
    """The folder of a partition, as the session that fills it uses it."""

    # directory: folder on a local disk in which to make it; created if it does not exist.
    # label: what the partition is of.

    def __init__(self, directory: str, label: KeptLabel) -> None:
        os.makedirs(directory, exist_ok=True)
        self._directory, self._label = directory, label
        self.path = new = tempfile.mkdtemp(prefix=UNFINISHED, dir=directory)
        # Closed with the session. The mode does not depend on the user's umask.
        file = os.open(os.path.join(new, "rows"), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._lock = os.fdopen(file, "w+b")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(label.epoch, EMPTY, np.empty(0, np.uint32))
            self.path = os.path.join(directory, PREFIX + os.path.basename(new).removeprefix(UNFINISHED))
            os.rename(new, self.path)  # only now others see it: they would remove a folder without a lock
        except OSError:  # such as a disk that is full
            _removed(new, self._lock)
            raise
        # A session may end while a thread still makes its folder, which nobody closes then.
        self._remove = weakref.finalize(self, _removed, self.path, self._lock)

    def open_rows(self) -> BinaryIO:
        """Open the file of rows, with all of its disk space reserved."""
        file = _open_own(self.path, "rows")
        reserve(file, max(1, self._label.n_slots * self._label.row_nbytes), self._directory)
        return file

    def write(self, epoch: int, index: Index, checksums: Checksums) -> None:
        """Replace the index by that of another epoch, then remove the folders of earlier sessions that nobody uses."""
        self._write(epoch, index, checksums[index.slots])
        self._remove.detach()
        remove_unused(self._directory, self._label)

    def _write(self, epoch: int, index: Index, checksums: Checksums) -> None:
        records = np.empty(len(checksums), _RECORD)
        records["sample_id"], records["slot"], records["checksum"] = index.sample_ids, index.slots, checksums
        label = msgspec.json.encode(dataclasses.replace(self._label, epoch=epoch))
        new = os.path.join(self.path, "index.new")
        with open(new, "wb") as file:
            file.writelines([FORMAT, label, b"\n", records.tobytes()])
        os.replace(new, os.path.join(self.path, "index"))

    def close(self) -> None:
        """Leave the partition to later sessions. It is removed if it does not have any rows yet."""
        self._remove()
        self._lock.close()


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
        with contextlib.ExitStack() as on_error:
            if label is not None:
                self._folder, rows = _room_for(directory, label)
                on_error.callback(self._folder.close)
            self.file: RowFile | None = RowFile(layout, n_slots, directory, memory_limit, file=rows)
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
        if self.file is not None:
            self.file.close()
        self.file = None
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
    """Make the folder and the file of a kept partition. On a full disk, partitions of earlier sessions are removed."""
    deadline = time.monotonic() + ROOM_WITHIN
    while True:
        folder: PartitionFolder | None = None
        try:
            folder = PartitionFolder(directory, label)
            return folder, folder.open_rows()
        except OSError as error:
            if folder is not None:
                folder.close()
            if time.monotonic() > deadline:
                raise does_not_fit(directory, error) from error
        if remove_unused(directory, label) or remove_unused(directory, label, of_session=True):
            logger.warning("dshuffle: kept partitions in %s were removed to make room for a new one", directory)
        time.sleep(0.1)  # another worker of this machine may be removing some


class KeptPartition:
    """A partition of a session that has ended, as another session reads it. It is not removed meanwhile."""

    # memory_limit: memory limit of the process in bytes, as for :class:`~dshuffle.exchange.cache_partition.RowFile`.

    def __init__(self, path: str, layout: RowLayout, memory_limit: int | None = None) -> None:
        self._layout = layout
        with contextlib.ExitStack() as on_error:
            try:
                self._lock = on_error.enter_context(_locked(path, fcntl.LOCK_SH))
                with _open_own(path, "index") as file:
                    label, records = KeptLabel.of(file.readline()), np.frombuffer(file.read(), _RECORD)
                self._index = Index(records["sample_id"].astype(np.int64), records["slot"].astype(np.int64))
                self._checksums = records["checksum"].astype(np.uint32)
                if label.row_nbytes != layout.nbytes:
                    raise ValueError(f"its rows have {label.row_nbytes} bytes, and not {layout.nbytes}")
                with _open_own(path, "rows") as file:
                    self._file = RowFile(layout, label.n_slots, path, memory_limit, file=file)
            except UNREADABLE as error:
                raise ExchangeError(
                    f"the kept partition {path} is damaged, or another session uses it "
                    f"({type(error).__name__}: {error})"
                ) from error
            on_error.pop_all()

    def read(self, sample_ids: NDArray[np.int64]) -> tuple[ByteMatrix, Checksums]:
        """Read rows of samples. A row that is missing or damaged gets a wrong checksum."""
        rows, checksums = self._layout.empty(len(sample_ids)), np.zeros(len(sample_ids), np.uint32)
        positions = sorted_positions(self._index.sample_ids, sample_ids)
        if len(self._index.sample_ids):
            slots, checksums = self._index.slots[positions], self._checksums[positions]
            self._file.will_need(slots)
            self._file.read(slots, rows)
        computed = checksum_rows(rows, sample_ids)
        return rows, np.where((positions >= 0) & (computed == checksums), computed, ~computed)

    def close(self) -> None:
        """Let other sessions remove the partition."""
        self._file.close()
        self._lock.close()


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """The folder of a partition that was kept in a directory: its name, and what the partition is of."""

    name: str
    label: KeptLabel

    @classmethod
    def all_in(cls, directory: str, dataset: str) -> list[Self]:
        """The partitions of a dataset that have rows and that nobody fills. Whatever else is there is ignored."""
        return [
            cls(name, label)
            for name, label in _labels(directory)
            if label is not None and label.dataset == dataset and label.epoch >= 0
        ]


def remove_unused(directory: str, label: KeptLabel, *, of_session: bool = False) -> int:
    """Remove unused partitions: of other sessions on the same dataset, and those that cannot be read."""
    # Those of other ranks of the same session stay, because some of its workers may have closed already; unless
    # ``of_session``, when a worker cannot go on without the room that lost workers have taken.
    removed = 0
    for name, kept in _labels(directory):
        is_other = kept is None or kept.session != label.session or kept.rank == label.rank
        if (is_other or of_session) and (kept is None or kept.dataset == label.dataset):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError), _locked(path, fcntl.LOCK_EX):
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
    return removed


def _labels(directory: str) -> Iterator[tuple[str, KeptLabel | None]]:
    """The folders in a directory that nobody fills, and their labels; None if they cannot be read."""
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    for name in names:
        if name.startswith(PREFIX):
            path, label = os.path.join(directory, name), None
            try:
                with _locked(path, fcntl.LOCK_SH), _open_own(path, "index") as file:
                    label = KeptLabel.of(file.readline())
            except BlockingIOError:  # a session fills it
                continue
            except UNREADABLE as error:
                logger.debug("dshuffle: the kept partition %s cannot be read: %s", path, error)
            yield name, label


def _removed(path: str, lock: BinaryIO) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _locked(path: str, how: int) -> BinaryIO:
    """Open the file of rows of a kept partition, and lock it until it is closed."""
    rows = _open_own(path, "rows")
    try:
        fcntl.flock(rows, how | fcntl.LOCK_NB)
    except OSError:
        rows.close()
        raise
    return rows


def _open_own(path: str, name: str) -> BinaryIO:
    """Open a file in the folder of a partition. Raises OSError unless both are this user's alone."""
    check_folder(path)
    return os.fdopen(open_private_file(os.path.join(path, name), os.O_RDWR), "r+b")
