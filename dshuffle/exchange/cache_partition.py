"""The cache partition: the rows that one worker holds, in slots of one contiguous byte matrix.

Rows of the next epoch arrive in free slots while the worker trains on the current epoch, so rows that training reads
are never overwritten. A commit moves no bytes. It replaces the index (sample -> slot), which frees the slots of evicted
rows. The cost is memory for the incoming rows.

References
----------
Nguyen et al. (2022), section III: a worker needs memory for (1 + Q) N / M rows; see docs/papers.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import psutil
from numpy.typing import NDArray

from dshuffle.errors import CacheBudgetError, ChecksumMismatch, ExchangeError
from dshuffle.kernels import kernel
from dshuffle.planning.types import NO_SAMPLES, sorted_positions
from dshuffle.private_files import unnamed_file
from dshuffle.rows import ByteMatrix, Checksums, RowLayout, checksum_rows, gather_rows, scatter_verified

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
_MOST_MOVED = 64 * 2**20

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
def _move_rows(file, rows, row_nbytes, slots, writes):  # type: ignore[no-untyped-def]
    """Read rows to an address, or write them, once for each run of consecutive slots; the place of the first error."""
    most = max(1, _MOST_MOVED // max(1, row_nbytes))
    i = 0
    while i < slots.size:
        end = i + 1
        while end < slots.size and end - i < most and slots[end] == slots[end - 1] + 1:
            end += 1
        at, nbytes, to = rows + i * row_nbytes, (end - i) * row_nbytes, slots[i] * row_nbytes
        moved = _pwrite(file, at, nbytes, to) if writes else _pread(file, at, nbytes, to)
        if moved != nbytes:
            return i
        i = end
    return -1


def does_not_fit(directory: str, error: OSError) -> CacheBudgetError:
    """The error of a folder that cannot hold a partition."""
    return CacheBudgetError(
        f"a partition does not fit into cache_directory={directory!r}: {error}. Use another folder, more workers, or a "
        "lower cache_fraction"
    )


class RowFile:
    """A matrix of rows in a file."""

    # directory: folder on a local disk; created if it does not exist.
    # memory_limit: memory limit of the process in bytes. None or 0 if there is none; then no pages are given back.
    # file: an open file in this folder that has room for the rows, which is closed; None to make one without a name.

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
        self._closed = threading.Event()
        self.will_need(NO_SAMPLES)  # these calls compile, which must not happen within an exchange
        self.read(NO_SAMPLES, self.rows[:0])
        self._most: int | None = None
        if memory_limit:
            self._most = max(int(FRACTION * memory_limit), psutil.Process().memory_info().rss + MARGIN)
            watched = weakref.ref(self), self._closed
            threading.Thread(target=_watch, args=watched, name="dshuffle-pages", daemon=True).start()

    def release(self) -> None:
        """Give the pages back that the process has touched. Their contents stay in the file."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def will_need(self, slots: NDArray[np.int64]) -> None:
        """Let the system read some rows ahead, many at a time. Without this, rows are read one after the other."""
        # A copy can be written, so that numba compiles for one type only.
        _read_ahead(self.rows.ctypes.data, self.rows.shape[1], slots.copy())

    def read(self, slots: NDArray[np.int64], out: ByteMatrix) -> None:
        """Copy rows into a contiguous buffer. Reading takes much less time than touching mapped pages one by one."""
        self._move(slots, out, writes=False)

    def write(self, slots: NDArray[np.int64], rows: ByteMatrix) -> None:
        """Write contiguous rows to their slots. What was in the slots before is not read, if rows fill whole pages."""
        if rows.shape[1] % _PAGE:
            self.will_need(slots)  # a page is read before a part of it is written
        self._move(slots, rows, writes=True)

    def _move(self, slots: NDArray[np.int64], rows: ByteMatrix, *, writes: bool) -> None:
        failed = _move_rows(self._file, rows.ctypes.data, rows.shape[1], slots.copy(), writes)
        if failed >= 0:
            what = "written" if writes else "read"
            raise OSError(f"the row in slot {int(slots[failed])} of a partition on the disk could not be {what}")

    def drop_pages(self, slots: NDArray[np.int64]) -> None:
        """Drop long runs of free slots from the page cache. ``slots`` ascend."""
        # Writing single pages takes much longer where larger pieces have been read into the page cache.
        nbytes = self.rows.shape[1]
        ends = np.append(np.flatnonzero(np.diff(slots) != 1) + 1, len(slots))
        n_rows = np.diff(ends, prepend=0)
        for run in np.flatnonzero(n_rows * nbytes >= _LONG_RUN).tolist():
            first, count = int(slots[ends[run] - n_rows[run]]), int(n_rows[run])
            os.posix_fadvise(self._file, first * nbytes, count * nbytes, os.POSIX_FADV_DONTNEED)

    def relieve(self) -> None:
        """Give pages back if the process has grown too large. Called by whoever touches many rows."""
        if self._most is not None and psutil.Process().memory_info().rss > self._most:
            self.release()

    def close(self) -> None:
        """Look at the memory no more. Descriptors, map and room on the disk are free once nobody has the file."""
        self._closed.set()


def _watch(opened: weakref.ref[RowFile], closed: threading.Event) -> None:
    """Give pages back until the file is closed."""
    while not closed.wait(INTERVAL):
        if (file := opened()) is None:
            return
        file.relieve()
        del file


# Bytes per slot besides the row: a checksum (4), two index entries (8 + 8) and a free-list entry (8).
SLOT_OVERHEAD = 28

CHECKED_ROWS = 1 << 14
"""Rows whose checksums are computed in one call."""


@dataclass(frozen=True, slots=True)
class Index:
    """The slot of each held sample, as two parallel arrays sorted by sample."""

    sample_ids: NDArray[np.int64]
    slots: NDArray[np.int64]

    def find(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each sample."""
        slots = self.search(sample_ids)
        if len(slots) and slots.min() < 0:
            sample = int(sample_ids[int(np.argmin(slots))])
            raise ExchangeError(f"sample {sample} is not in this cache partition ({len(self.sample_ids)} samples)")
        return slots

    def search(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each sample, or -1 if the sample is not held."""
        if not len(self.sample_ids):
            return np.full(len(sample_ids), -1, dtype=np.int64)
        positions = sorted_positions(self.sample_ids, sample_ids)
        return np.where(positions >= 0, self.slots[positions], -1)


EMPTY = Index(NO_SAMPLES, NO_SAMPLES)


@dataclass(frozen=True, slots=True)
class Swap:
    """The state that a commit installs: the next index and its free slots."""

    index: Index
    free: NDArray[np.int64]


class CachePartition:
    """Rows in a fixed number of slots."""

    # capacity: maximum number of rows held between epochs.
    # incoming: maximum number of rows that arrive in one exchange.
    # file: file for the rows, with as many as there are slots; ``None`` to keep them in memory.

    def __init__(
        self,
        layout: RowLayout,
        *,
        capacity: int,
        incoming: int,
        file: RowFile | None = None,
    ) -> None:
        n_slots = capacity + incoming
        self.layout = layout
        self.file = file
        self.rows: ByteMatrix = layout.empty(n_slots) if file is None else file.rows
        self.checksums: Checksums = np.zeros(n_slots, dtype=np.uint32)
        self.index = EMPTY
        self.free: NDArray[np.int64] = np.arange(n_slots, dtype=np.int64)
        """Slots that hold no row."""
        self._incoming = EMPTY

    @staticmethod
    def nbytes_for(layout: RowLayout, n_slots: int, *, on_disk: bool = False) -> int:
        """Return the size of ``n_slots`` slots in memory, in bytes, including the index."""
        return n_slots * (SLOT_OVERHEAD if on_disk else layout.nbytes + SLOT_OVERHEAD)

    def relieve(self) -> None:
        """Give memory back, if rows are on a disk and the process has grown too large."""
        if self.file is not None:
            self.file.relieve()

    def close(self) -> None:
        """Free the rows, or leave them to the tasks that still use them."""
        # The partition is empty then. Idempotent.
        self.rows, self.checksums = self.layout.empty(0), self.checksums[:0].copy()
        self.index = self._incoming = EMPTY
        if self.file is not None:
            self.file.close()
        self.file = None

    def reserve(self, sample_ids: NDArray[np.int64], positions: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Reserve a free slot for each sample of one exchange, replacing any earlier reservation."""
        # sample_ids: ``(k,)`` samples, each once.
        # positions: ``(k,)`` positions of the samples in the order in which they will be read. Slots ascend in this
        # order.
        if len(sample_ids) > len(self.free):
            raise ExchangeError(f"{len(sample_ids)} incoming rows do not fit into {len(self.free)} free slots")
        slots = self.free[: len(sample_ids)]
        if self.file is not None:
            self.file.drop_pages(slots)
        if positions is not None:
            ascending, slots = slots, np.empty_like(slots)
            slots[np.argsort(positions)] = ascending
        order = np.argsort(sample_ids, kind="stable")
        self._incoming = Index(sample_ids[order], slots[order])
        return slots

    def add_checksums(self, sample_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Compute the checksums of rows that were just read from the store; they are sent along with the rows."""
        for first in range(0, len(slots), CHECKED_ROWS):
            part = slice(first, first + CHECKED_ROWS)
            self.checksums[slots[part]] = checksum_rows(self.rows, sample_ids[part], slots[part])
            self.relieve()

    def pack(self, sample_ids: NDArray[np.int64], rows: ByteMatrix, checksums: Checksums) -> None:
        """Gather rows and checksums of held samples into contiguous buffers."""
        slots = self.index.find(sample_ids)
        if self.file is None:
            gather_rows(self.rows, slots, rows)
        else:
            self.file.will_need(slots)
            self.file.read(slots, rows)
        np.take(self.checksums, slots, out=checksums, mode="clip")

    def check_shape(self, n_rows: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Refuse a message that does not have the length that it should have."""
        if rows.shape != (n_rows, self.layout.nbytes) or checksums.shape != (n_rows,):
            raise ExchangeError(
                f"a message has rows {rows.shape} and checksums {checksums.shape}; "
                f"{n_rows} rows of {self.layout.nbytes} bytes were expected"
            )

    def unpack(
        self,
        sample_ids: NDArray[np.int64],
        slots: NDArray[np.int64],
        rows: ByteMatrix,
        checksums: Checksums,
    ) -> None:
        """Verify arrived rows and copy them into their reserved slots."""
        self.check_shape(len(slots), rows, checksums)
        if self.file is None:
            wrong = scatter_verified(self.rows, slots, rows, sample_ids, checksums)
        else:
            failing = np.flatnonzero(checksum_rows(rows, sample_ids) != checksums)
            wrong = int(failing[0]) if len(failing) else -1
            if wrong < 0:
                self.file.write(slots, rows)
        if wrong >= 0:
            raise ChecksumMismatch(f"the row of sample {int(sample_ids[wrong])} arrived corrupted")
        self.checksums[slots] = checksums

    def prepare(self, held: NDArray[np.int64]) -> Swap:
        """Build the state after a commit that keeps ``held`` (sorted), a subset of the held and incoming samples."""
        slots = np.empty(len(held), dtype=np.int64)
        free = np.ones(len(self.rows), dtype=np.bool_)
        incoming, index = self._incoming, self.index  # rows on a disk may move to other slots
        missing = _merge(incoming.sample_ids, incoming.slots, index.sample_ids, index.slots, held, slots, free)
        if missing >= 0:
            raise ExchangeError(f"sample {int(held[missing])} must be kept, but is neither held nor incoming")
        return Swap(Index(held, slots), np.flatnonzero(free))

    def commit(self, swap: Swap) -> None:
        """Install a prepared state in constant time, so that it can run on an event loop."""
        self.index, self.free, self._incoming = swap.index, swap.free, EMPTY


@kernel("(i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], b1[::1])")
def _merge(ids_a, slots_a, ids_b, slots_b, held, slots, free):  # type: ignore[no-untyped-def]
    """Find ascending ``held`` in two ascending indices in one pass; return the position of a missing id, or -1."""
    a, b = 0, 0
    for i in range(held.size):
        sample = held[i]
        while a < ids_a.size and ids_a[a] < sample:
            a += 1
        while b < ids_b.size and ids_b[b] < sample:
            b += 1
        if a < ids_a.size and ids_a[a] == sample:
            slots[i] = slots_a[a]
        elif b < ids_b.size and ids_b[b] == sample:
            slots[i] = slots_b[b]
        else:
            return i
        free[slots[i]] = False
    return -1
