"""The cache partition: the rows that one worker holds, in slots of one contiguous byte matrix.

Rows of the next epoch arrive in free slots while the worker trains on the current epoch, so rows that training reads
are never overwritten. A commit moves no bytes. It replaces the index (sample -> slot), which frees the slots of evicted
rows. The cost is memory for the incoming rows.

References
----------
Nguyen et al. (2022), section III: a worker needs memory for (1 + Q) N / M rows; see docs/papers.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import CacheBudgetError, ChecksumMismatch, ExchangeError
from dshuffle.exchange.row_file import RowFile
from dshuffle.kernels import kernel
from dshuffle.planning.sorted_ids import sorted_positions
from dshuffle.rows import ByteMatrix, Checksums, RowLayout, checksum_rows, gather_rows, scatter_verified

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


EMPTY = Index(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Swap:
    """The state that a commit installs: the next index and its free slots."""

    index: Index
    free: NDArray[np.int64]


class CachePartition:
    """Rows in a fixed number of slots, checked against a byte budget before allocation.

    Parameters
    ----------
    capacity
        Maximum number of rows held between epochs.
    incoming
        Maximum number of rows that arrive in one exchange.
    budget
        Maximum size of this partition in memory, in bytes; ``None`` for no limit.
    file
        File for the rows, with as many as there are slots; ``None`` to keep them in memory.
    """

    def __init__(
        self,
        layout: RowLayout,
        *,
        capacity: int,
        incoming: int,
        budget: int | None = None,
        file: RowFile | None = None,
    ) -> None:
        n_slots = capacity + incoming
        needed = self.nbytes_for(layout, n_slots, on_disk=file is not None)
        if budget is not None and needed > budget:
            raise CacheBudgetError(
                f"a cache partition with {capacity} rows and room for {incoming} incoming rows, {layout.nbytes} bytes "
                f"each, needs {needed} bytes; memory_limit allows {budget}. Raise memory_limit or use more workers."
            )
        self.layout = layout
        self._file = file
        self.rows: ByteMatrix = layout.empty(n_slots) if file is None else file.rows
        self.checksums: Checksums = np.zeros(n_slots, dtype=np.uint32)
        self.index = EMPTY
        self._incoming = EMPTY
        self._free: NDArray[np.int64] = np.arange(n_slots, dtype=np.int64)

    @staticmethod
    def nbytes_for(layout: RowLayout, n_slots: int, *, on_disk: bool = False) -> int:
        """Return the size of ``n_slots`` slots in memory, in bytes, including the index."""
        return n_slots * (SLOT_OVERHEAD if on_disk else layout.nbytes + SLOT_OVERHEAD)

    @property
    def on_disk(self) -> bool:
        """Whether rows are in a file."""
        return self._file is not None

    @property
    def file(self) -> RowFile | None:
        """The file that rows are in; None if they are in memory."""
        return self._file

    def relieve(self) -> None:
        """Give memory back, if rows are on a disk and the process has grown too large."""
        if self._file is not None:
            self._file.relieve()

    def close(self) -> None:
        """Free the rows, or leave them to the tasks that still use them. The partition is empty then. Idempotent."""
        self.rows, self.checksums = self.layout.empty(0), self.checksums[:0].copy()
        self.index = self._incoming = EMPTY
        if self._file is not None:
            self._file.close()

    @property
    def n_slots(self) -> int:
        """Total number of slots."""
        return len(self.rows)

    @property
    def n_free(self) -> int:
        """Number of slots that hold no row."""
        return len(self._free)

    def reserve(self, sample_ids: NDArray[np.int64], positions: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Reserve a free slot for each sample of one exchange, replacing any earlier reservation.

        Parameters
        ----------
        sample_ids
            ``(k,)`` samples, each once.
        positions
            ``(k,)`` positions of the samples in the order in which they will be read. Slots ascend in this order.

        Returns
        -------
        ndarray of int64
            ``(k,)`` slots.
        """
        if len(sample_ids) > len(self._free):
            raise ExchangeError(f"{len(sample_ids)} incoming rows do not fit into {len(self._free)} free slots")
        slots = self._free[: len(sample_ids)]
        if self._file is not None:
            self._file.drop_pages(slots)
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

    def corrupted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Verify all held rows, and return the samples and the slots of the corrupted ones."""
        index = self.index
        wrong = checksum_rows(self.rows, index.sample_ids, index.slots) != self.checksums[index.slots]
        return index.sample_ids[wrong], index.slots[wrong]

    def pack(self, sample_ids: NDArray[np.int64], rows: ByteMatrix, checksums: Checksums) -> None:
        """Gather rows and checksums of held samples into contiguous buffers."""
        slots = self.index.find(sample_ids)
        if self._file is None:
            gather_rows(self.rows, slots, rows)
        else:
            self._file.will_need(slots)
            self._file.read(slots, rows)
        np.take(self.checksums, slots, out=checksums, mode="clip")

    def unpack(
        self,
        sample_ids: NDArray[np.int64],
        slots: NDArray[np.int64],
        rows: ByteMatrix,
        checksums: Checksums,
    ) -> None:
        """Verify arrived rows and copy them into their reserved slots."""
        if rows.shape != (len(slots), self.layout.nbytes) or checksums.shape != (len(slots),):
            raise ExchangeError(
                f"a message has rows {rows.shape} and checksums {checksums.shape}; "
                f"{len(slots)} rows of {self.layout.nbytes} bytes were expected"
            )
        if self._file is None:
            wrong = scatter_verified(self.rows, slots, rows, sample_ids, checksums)
        else:
            failing = np.flatnonzero(checksum_rows(rows, sample_ids) != checksums)
            wrong = int(failing[0]) if len(failing) else -1
            if wrong < 0:
                self._file.write(slots, rows)
        if wrong >= 0:
            raise ChecksumMismatch(f"the row of sample {int(sample_ids[wrong])} arrived corrupted")
        self.checksums[slots] = checksums

    def prepare(self, held: NDArray[np.int64]) -> Swap:
        """Build the state after a commit that keeps ``held`` (sorted), a subset of the held and incoming samples."""
        slots = np.empty(len(held), dtype=np.int64)
        free = np.ones(self.n_slots, dtype=np.bool_)
        incoming, index = self._incoming, self.index  # rows on a disk may move to other slots
        missing = _merge(incoming.sample_ids, incoming.slots, index.sample_ids, index.slots, held, slots, free)
        if missing >= 0:
            raise ExchangeError(f"sample {int(held[missing])} must be kept, but is neither held nor incoming")
        return Swap(Index(held, slots), np.flatnonzero(free))

    def commit(self, swap: Swap) -> None:
        """Install a prepared state in constant time, so that it can run on an event loop."""
        self.index, self._free, self._incoming = swap.index, swap.free, EMPTY


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
