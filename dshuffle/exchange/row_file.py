"""Rows in a file on a local disk, mapped into memory: for partitions that are larger than the memory of a worker.

Disk space is reserved at once, so a full disk is noticed before the first row arrives. The system counts the pages that
a process has touched as its memory, although it could write them back and reuse them, so Dask would pause or kill the
worker. To avoid this, a thread returns these pages when the process has grown too large. They stay in the page cache as
long as there is room.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import psutil
from numpy.typing import NDArray

from dshuffle.errors import CacheBudgetError
from dshuffle.kernels import kernel
from dshuffle.private_files import unnamed_file
from dshuffle.rows import ByteMatrix, RowLayout

INTERVAL = 0.02
"""Seconds between looks at the memory of the process."""

FRACTION = 0.5
"""Fraction of the memory limit at which pages are given back."""

MARGIN = 64 * 2**20
"""Least number of bytes that the process may grow by before pages are given back."""


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise.restype = ctypes.c_int
_pwrite = ctypes.CDLL(None).pwrite64
_pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_pwrite.restype = ctypes.c_ssize_t
_pread = ctypes.CDLL(None).pread64
_pread.argtypes = _pwrite.argtypes
_pread.restype = ctypes.c_ssize_t
_PAGE, _WILL_NEED = mmap.PAGESIZE, int(mmap.MADV_WILLNEED)

GAP = 32 * 2**10
"""Rows at most this many bytes apart are read ahead in one request. Reading them takes about as long as another one."""

_LONG_RUN = 4 * 2**20
_MOST_READ = 64 * 2**20

# Numba cannot cache the code of functions that call C functions.


@kernel(cache=False)
def _read_ahead(start, row_nbytes, slots):  # type: ignore[no-untyped-def]
    """Call madvise for the rows of a matrix that starts at an address, once for each run of ascending close slots."""
    i = 0
    while i < slots.size:
        end = i + 1
        while end < slots.size and 0 < (slots[end] - slots[end - 1]) * row_nbytes <= row_nbytes + GAP:
            end += 1
        first = start + slots[i] * row_nbytes
        page = first // _PAGE * _PAGE
        _madvise(page, start + (slots[end - 1] + 1) * row_nbytes - page, _WILL_NEED)
        i = end


@kernel(cache=False)
def _read_rows(file, rows, row_nbytes, slots):  # type: ignore[no-untyped-def]
    """Read rows to an address, once for each run of consecutive slots; the place of a row that failed, or -1."""
    most = max(1, _MOST_READ // max(1, row_nbytes))
    i = 0
    while i < slots.size:
        end = i + 1
        while end < slots.size and end - i < most and slots[end] == slots[end - 1] + 1:
            end += 1
        nbytes = (end - i) * row_nbytes
        if _pread(file, rows + i * row_nbytes, nbytes, slots[i] * row_nbytes) != nbytes:
            return i
        i = end
    return -1


@kernel(cache=False)
def _write_rows(file, rows, row_nbytes, slots):  # type: ignore[no-untyped-def]
    """Write the rows at an address to their slots in a file; the place of a row that could not be written, or -1."""
    for i in range(slots.size):
        if _pwrite(file, rows + i * row_nbytes, row_nbytes, slots[i] * row_nbytes) != row_nbytes:
            return i
    return -1


def does_not_fit(directory: str, error: OSError) -> CacheBudgetError:
    """The error of a folder that cannot hold a partition."""
    return CacheBudgetError(
        f"a partition does not fit into cache_directory={directory!r}: {error}. Use another folder, more workers, or a "
        "lower cache_fraction"
    )


class RowFile:
    """A matrix of rows in a file.

    Parameters
    ----------
    directory
        Folder on a local disk; created if it does not exist.
    memory_limit
        Memory limit of the process in bytes. None or 0 if there is none; then no pages are given back.
    file
        An open file in this folder that has room for the rows, which is closed; None to make one without a name.
    """

    def __init__(
        self,
        layout: RowLayout,
        n_rows: int,
        directory: str,
        memory_limit: int | None = None,
        *,
        file: BinaryIO | None = None,
    ) -> None:
        nbytes = max(1, n_rows * layout.nbytes)
        try:
            os.makedirs(directory, exist_ok=True)
            with unnamed_file(directory, nbytes) if file is None else file as opened:
                self._map = mmap.mmap(opened.fileno(), nbytes)  # it has a descriptor of its own
                self._file = os.dup(opened.fileno())
                self._close_file = weakref.finalize(self, os.close, self._file)
        except OSError as error:
            raise does_not_fit(directory, error) from error
        self._map.madvise(mmap.MADV_RANDOM)  # rows are read one by one: what is beside them is rarely needed
        self.rows: ByteMatrix = np.frombuffer(self._map, np.uint8)[: n_rows * layout.nbytes].reshape(n_rows, -1)
        self._lock = threading.Lock()
        self._users = 0
        self._freed = False
        self._closed = threading.Event()
        # These calls compile, which must not happen within an exchange.
        self.will_need(np.empty(0, np.int64))
        self.write(np.empty(0, np.int64), self.rows[:0])
        self.read(np.empty(0, np.int64), self.rows[:0])
        self._process = psutil.Process()
        self._most: int | None = None
        if memory_limit:
            self._most = max(int(FRACTION * memory_limit), self._process.memory_info().rss + MARGIN)
            watched = weakref.ref(self), self._closed
            threading.Thread(target=_watch, args=watched, name="dshuffle-pages", daemon=True).start()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the rows until the body has ended, also if the file is closed meanwhile."""
        with self._lock:
            if self._freed:
                raise OSError("the partition on the disk has been closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
            self._free_if_unused()

    def release(self) -> None:
        """Give the pages back that the process has touched. Their contents stay in the file."""
        with self.in_use():
            self._map.madvise(mmap.MADV_DONTNEED)

    def will_need(self, slots: NDArray[np.int64]) -> None:
        """Let the system read some rows ahead, many at a time. Without this, rows are read one after the other."""
        with self.in_use():
            # A copy can be written, so that numba compiles for one type only.
            _read_ahead(self.rows.ctypes.data, self.rows.shape[1], slots.copy())

    def read(self, slots: NDArray[np.int64], out: ByteMatrix) -> None:
        """Copy rows into a contiguous buffer. Reading takes much less time than touching mapped pages one by one."""
        with self.in_use():
            failed = _read_rows(self._file, out.ctypes.data, out.shape[1], slots.copy())
        if failed >= 0:
            raise OSError(f"the row in slot {int(slots[failed])} of a partition on the disk could not be read")

    def write(self, slots: NDArray[np.int64], rows: ByteMatrix) -> None:
        """Write contiguous rows to their slots. What was in the slots before is not read, if rows fill whole pages."""
        with self.in_use():
            if rows.shape[1] % _PAGE:
                self.will_need(slots)  # a page is read before a part of it is written
            failed = _write_rows(self._file, rows.ctypes.data, rows.shape[1], slots.copy())
        if failed >= 0:
            raise OSError(f"a row could not be written to slot {int(slots[failed])} of a partition on the disk")

    def drop_pages(self, slots: NDArray[np.int64]) -> None:
        """Drop long runs of free slots from the page cache. ``slots`` ascend.

        Writing single pages takes much longer where larger pieces have been read into the page cache.
        """
        nbytes = self.rows.shape[1]
        ends = np.append(np.flatnonzero(np.diff(slots) != 1) + 1, len(slots))
        n_rows = np.diff(ends, prepend=0)
        with self.in_use():
            for run in np.flatnonzero(n_rows * nbytes >= _LONG_RUN).tolist():
                first, count = int(slots[ends[run] - n_rows[run]]), int(n_rows[run])
                os.posix_fadvise(self._file, first * nbytes, count * nbytes, os.POSIX_FADV_DONTNEED)

    def relieve(self) -> None:
        """Give pages back if the process has grown too large. Called by whoever touches many rows."""
        if self._most is not None and self._process.memory_info().rss > self._most:
            self.release()

    def close(self) -> None:
        """Free the descriptors, the map and the room on the disk, at once or when the last user has ended. Idempotent.

        Arrays of its rows that somebody still has stay valid, and keep the map.
        """
        self._closed.set()
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        with self._lock:
            if self._users or self._freed or not self._closed.is_set():
                return
            self._freed = True
        self.rows = self.rows[:0].copy()
        self._close_file()
        with contextlib.suppress(BufferError):  # then the last array of the rows takes the map with it
            self._map.close()
        del self._map


def _watch(opened: weakref.ref[RowFile], closed: threading.Event) -> None:
    """Give pages back until the file is closed."""
    while not closed.wait(INTERVAL):
        if (file := opened()) is None:
            return
        with contextlib.suppress(OSError):  # it has just been closed
            file.relieve()
        del file
