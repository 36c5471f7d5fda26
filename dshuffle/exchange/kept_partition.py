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

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import CacheBudgetError, ExchangeError
from dshuffle.exchange.cache_partition import EMPTY, Index, RowFile
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
        new = tempfile.mkdtemp(prefix=UNFINISHED, dir=directory)
        self.path = os.path.join(directory, PREFIX + os.path.basename(new).removeprefix(UNFINISHED))
        # Closed with the session. The mode does not depend on the user's umask.
        file = os.open(os.path.join(new, "rows"), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._lock = os.fdopen(file, "w+b")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(new, self.path)  # only now others see it: they would remove a folder without a lock
        except OSError:
            _removed(new, self._lock)
            raise
        # A session may end while a thread still makes its folder, which nobody closes then.
        self._remove = weakref.finalize(self, _removed, self.path, self._lock)
        try:
            self._write(label.epoch, EMPTY, np.empty(0, np.uint32))
        except OSError:  # the disk is full
            self.close()
            raise

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
        new = os.path.join(self.path, "index.new")
        with open(new, "wb") as file:
            file.writelines(
                [FORMAT, msgspec.json.encode(dataclasses.replace(self._label, epoch=epoch)), b"\n", records.tobytes()]
            )
        os.replace(new, os.path.join(self.path, "index"))

    def close(self) -> None:
        """Leave the partition to later sessions. It is removed if it does not have any rows yet."""
        self._remove()
        self._lock.close()


class KeptPartition:
    """A partition of a session that has ended, as another session reads it. It is not removed meanwhile."""

    # memory_limit: memory limit of the process in bytes, as for :class:`~dshuffle.exchange.cache_partition.RowFile`.

    def __init__(self, path: str, layout: RowLayout, memory_limit: int | None = None) -> None:
        try:
            self._lock = _locked(path, fcntl.LOCK_SH)
        except OSError as error:
            raise ExchangeError(
                f"the kept partition {path} cannot be used, or another session uses it ({error})"
            ) from error
        with contextlib.ExitStack() as on_error:
            on_error.push(self._lock)
            try:
                with _open_own(path, "index") as file:
                    label, records = KeptLabel.of(file.readline()), np.frombuffer(file.read(), _RECORD)
                self._index = Index(records["sample_id"].astype(np.int64), records["slot"].astype(np.int64))
                self._checksums: Checksums = records["checksum"].astype(np.uint32)
                self._check(label, layout)
                with _open_own(path, "rows") as file:
                    self._file = RowFile(layout, label.n_slots, path, memory_limit, file=file)
            except UNREADABLE as error:
                raise ExchangeError(
                    f"the kept partition {path} is damaged ({type(error).__name__}: {error})"
                ) from error
            on_error.pop_all()
        self._layout = layout

    def read(self, sample_ids: NDArray[np.int64]) -> tuple[ByteMatrix, Checksums, NDArray[np.bool_]]:
        """Read rows of samples."""
        rows = self._layout.empty(len(sample_ids))
        if not len(self._index.sample_ids):
            return rows, np.zeros(len(sample_ids), np.uint32), np.zeros(len(sample_ids), np.bool_)
        positions = sorted_positions(self._index.sample_ids, sample_ids)
        slots = self._index.slots[positions]
        self._file.will_need(slots)
        self._file.read(slots, rows)
        checksums = self._checksums[positions]
        intact = positions >= 0
        intact &= checksum_rows(rows, sample_ids) == checksums
        return rows, checksums, intact

    def close(self) -> None:
        """Let other sessions remove the partition."""
        self._file.close()
        self._lock.close()

    def _check(self, label: KeptLabel, layout: RowLayout) -> None:
        """Refuse an index that does not describe rows."""
        ids, slots = self._index.sample_ids, self._index.slots
        if label.row_nbytes != layout.nbytes:
            raise ValueError(f"its rows have {label.row_nbytes} bytes, and not {layout.nbytes}")
        if np.any(ids[1:] <= ids[:-1]):
            raise ValueError("its index is not one of rows")
        if len(slots) and not 0 <= slots.min() <= slots.max() < label.n_slots:
            raise ValueError("its index has slots that do not exist")


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """The folder of a partition that was kept in a directory: its name, and what the partition is of."""

    name: str
    label: KeptLabel

    @classmethod
    def all_in(cls, directory: str, dataset: str) -> list[Self]:
        """The partitions of a dataset that have rows and that nobody fills. Whatever else is there is ignored."""
        labels = [(name, label) for name, label in _labels(directory) if label is not None]
        return [cls(name, label) for name, label in labels if label.dataset == dataset and label.epoch >= 0]


def remove_unused(directory: str, label: KeptLabel, *, of_session: bool = False) -> int:
    """Remove unused partitions: of other sessions on the same dataset, and those that cannot be read."""
    # Those of other ranks of the same session stay, because some of its workers may have closed already; unless
    # ``of_session``, when a worker cannot go on without the room that lost workers have taken.
    removed = 0
    for name, kept in _labels(directory):
        is_wanted = kept is not None and kept.session == label.session and kept.rank != label.rank
        is_wanted &= not of_session
        if kept is None or (kept.dataset == label.dataset and not is_wanted):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError), _locked(path, fcntl.LOCK_EX):
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
    return removed


def _labels(directory: str) -> Iterator[tuple[str, KeptLabel | None]]:
    """The folders in a directory that nobody fills, and their labels; None if they cannot be read."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith(PREFIX))
    except OSError:
        return
    for name in names:
        path = os.path.join(directory, name)
        try:
            _locked(path, fcntl.LOCK_SH).close()
        except BlockingIOError:  # a session fills it
            continue
        except OSError as error:  # it is not of this user, or has just been removed
            logger.debug("dshuffle: the kept partition %s is not used: %s", path, error)
            continue
        try:
            with _open_own(path, "index") as file:
                label = KeptLabel.of(file.readline())
        except UNREADABLE as error:
            logger.debug("dshuffle: the kept partition %s cannot be read: %s", path, error)
            label = None
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
