"""Rows by bucket, in files on a local disk: between the two passes of a shuffle.

By default the files do not have names, and vanish when their process ends. In a folder of their own they stay, with a
note of how far the first pass has come. A later process with the same task then continues.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import time
from collections.abc import Mapping
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DatasetError
from dshuffle.private_files import reserve, unnamed_file

SAVE_EVERY = 15.0
"""Seconds between notes of how far the first pass has come. Each waits until the disk has the rows."""


class SampleType(Protocol):
    """What the samples of an array are."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Items of a sample."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample."""


class ArrayBuckets:
    """The rows of one array in a file, by bucket.

    Parameters
    ----------
    file
        The file, with room for all rows.
    bucket_rows, filled
        Number of rows in a bucket (the last one may have fewer), and ``(buckets,)`` how many each has so far.
    dtype, shape
        Items and shape of one sample.
    """

    def __init__(
        self,
        file: BinaryIO,
        bucket_rows: int,
        filled: NDArray[np.int64],
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
    ) -> None:
        self.file, self.filled = file, filled
        self._dtype = dtype
        self._shape = shape
        self._row_nbytes = dtype.itemsize * math.prod(shape)
        self._bucket_rows = bucket_rows

    def add(self, values: NDArray[Any], buckets: NDArray[np.int64]) -> None:
        """Append rows to their buckets, which are ascending. Rows of one bucket stay in their order."""
        distinct, firsts = np.unique(buckets, return_index=True)
        values = np.ascontiguousarray(values)
        for bucket, first, last in zip(distinct.tolist(), firsts, [*firsts[1:], len(buckets)], strict=True):
            place = bucket * self._bucket_rows + int(self.filled[bucket])
            self._write(values[first:last], place)
            self.filled[bucket] += last - first

    def read(self, bucket: int) -> NDArray[Any]:
        """Read the rows of a bucket, in the order in which they were added."""
        rows = np.empty((int(self.filled[bucket]), *self._shape), self._dtype)
        place, target = bucket * self._bucket_rows * self._row_nbytes, _bytes(rows)
        done = 0
        while done < len(target):
            count = os.preadv(self.file.fileno(), [target[done:]], place + done)
            if not count:
                raise DatasetError(f"bucket {bucket} of a shuffle is truncated")
            done += count
        return rows

    def _write(self, rows: NDArray[Any], place: int) -> None:
        source, offset, done = _bytes(rows), place * self._row_nbytes, 0
        while done < len(source):
            done += os.pwrite(self.file.fileno(), source[done:], offset + done)


class Buckets:
    """The rows of a dataset, by bucket.

    Parameters
    ----------
    folder
        Folder on a local disk.
    arrays
        The arrays of the dataset.
    n_rows, bucket_rows
        Number of rows in all, and in a bucket.
    key
        Name of what is being done, to continue what another process has begun; None to leave nothing behind.

    Raises
    ------
    DatasetError
        If the folder cannot be used, the disk does not have enough room, or another process is doing the same.
    """

    def __init__(
        self, folder: str, arrays: Mapping[str, SampleType], n_rows: int, bucket_rows: int, key: str | None
    ) -> None:
        self.n_pieces = 0
        self._own = None if key is None else os.path.join(folder, f"dshuffle-buckets-{key}")
        self._lock: BinaryIO | None = None
        self._saved = time.monotonic()
        self._arrays: dict[str, ArrayBuckets] = {}
        n_buckets = -(-n_rows // bucket_rows)
        try:
            filled = self._begun(list(arrays), n_buckets)
            for number, (name, info) in enumerate(arrays.items()):
                file = self._opened(folder, number, n_rows * info.dtype.itemsize * math.prod(info.shape))
                self._arrays[name] = ArrayBuckets(file, bucket_rows, filled[number], info.dtype, info.shape)
        except OSError as error:
            self.close()
            raise DatasetError(
                f"the temporary folder {folder!r} cannot hold the dataset: {error}. Choose another folder "
                "(temporary=, --temporary)"
            ) from error

    def __getitem__(self, name: str) -> ArrayBuckets:
        return self._arrays[name]

    def piece_done(self, *, last: bool = False) -> None:
        """Count a piece of the dataset whose rows are in their buckets, and note it from time to time."""
        self.n_pieces += not last
        if self._own is None or not (last or time.monotonic() - self._saved > SAVE_EVERY):
            return
        for array in self._arrays.values():
            os.fdatasync(array.file.fileno())
        note = os.path.join(self._own, "note.npy")
        counts = np.array([array.filled for array in self._arrays.values()])
        with open(note + ".new", "wb") as file:
            np.save(file, np.append(counts.ravel(), self.n_pieces))
            file.flush()
            os.fsync(file.fileno())
        os.replace(note + ".new", note)
        self._saved = time.monotonic()

    def remove(self) -> None:
        """Remove the files: all is done."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def close(self) -> None:
        """Close the files. Those with names stay."""
        for array in self._arrays.values():
            array.file.close()
        if self._lock is not None:
            self._lock.close()

    def _begun(self, names: list[str], n_buckets: int) -> NDArray[np.int64]:
        """Rows in the buckets of each array so far; sets the number of pieces that are done."""
        nothing = np.zeros((len(names), n_buckets), np.int64)
        if self._own is None:
            return nothing
        if not os.path.isdir(os.path.dirname(self._own)):
            raise FileNotFoundError("there is no such folder")
        os.makedirs(self._own, exist_ok=True)
        self._lock = open(os.path.join(self._own, "lock"), "wb")  # noqa: SIM115  # held until the end
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"another process uses {self._own!r} for the same shuffle") from error
        try:
            note = np.load(os.path.join(self._own, "note.npy"))
        except (FileNotFoundError, ValueError, EOFError):
            return nothing
        if note.shape != (nothing.size + 1,) or note.dtype != np.int64:
            return nothing
        self.n_pieces = int(note[-1])
        return np.ascontiguousarray(note[:-1].reshape(nothing.shape))

    def _opened(self, folder: str, number: int, nbytes: int) -> BinaryIO:
        if self._own is None:
            return unnamed_file(folder, nbytes)
        path = os.path.join(self._own, f"{number}.rows")
        fresh = not os.path.exists(path)
        if fresh and self.n_pieces:
            raise FileNotFoundError(f"{path} is missing; remove {self._own!r} to start again")
        file = cast(BinaryIO, open(path, "w+b" if fresh else "r+b", buffering=0))  # noqa: SIM115  # closed with the others
        reserve(file, nbytes, folder)
        return file


def _bytes(rows: NDArray[Any]) -> memoryview:
    flat: Any = rows.reshape(-1).view(np.uint8)
    return memoryview(flat)
