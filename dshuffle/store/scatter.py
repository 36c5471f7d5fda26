"""Where the rows of arrays go when they are read, and how they are copied there out of decoded chunks.

A few rows are copied by NumPy, so that whoever looks at a dataset, or opens a session with it, does not load numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.kernels import kernel, worth_a_kernel
from dshuffle.rows import ByteMatrix
from dshuffle.store.stored_array import StoredArray
from dshuffle.store.view import Box, Cut

_WHOLE = np.zeros(1, np.int64)
"""A row is one patch of one run of bytes."""


def load_numba(nbytes: int) -> None:
    """Load numba for a call that will copy so many bytes, in parts of which each would not be worth it."""
    if worth_a_kernel(nbytes):
        _ = scatter_patches_kernel.dispatcher


def scatter_rows(
    block: NDArray[np.uint8], ids: NDArray[np.int64], start: int, target: NDArray[np.uint8], places: NDArray[np.int64]
) -> None:
    """Copy the rows ``ids`` of a block that begins at row ``start`` to ``target``, from the bytes ``places`` on."""
    scatter_patches(block, ids, start, target, places, _WHOLE, _WHOLE, block.shape[1])


def scatter_patches(
    block: NDArray[np.uint8],
    ids: NDArray[np.int64],
    start: int,
    target: NDArray[np.uint8],
    places: NDArray[np.int64],
    begins: NDArray[np.int64],
    offsets: NDArray[np.int64],
    nbytes: int,
) -> None:
    """Copy patches of the rows of a block to ``target``, from the bytes ``places`` on.

    Patch ``ids[i] - start`` begins in its row at ``begins``, in turn, and has ``nbytes`` at each of the offsets.
    """
    if worth_a_kernel(ids.size * offsets.size * nbytes):
        scatter_patches_kernel(block, ids, start, target, places, begins, offsets, nbytes)
        return
    row, patch = np.divmod(ids - start, begins.size)
    items = (offsets[:, None] + np.arange(nbytes)).reshape(-1)
    target[places[:, None] + np.arange(items.size)] = block[row[:, None], begins[patch][:, None] + items]


@kernel(
    "(u1[:,::1], i8[::1], i8, u1[::1], i8[::1], i8[::1], i8[::1], i8)",
    "(Array(u1, 2, 'C', True), i8[::1], i8, u1[::1], i8[::1], i8[::1], i8[::1], i8)",
)
def scatter_patches_kernel(block, ids, start, target, places, begins, offsets, nbytes):  # type: ignore[no-untyped-def]
    """The same for many rows."""
    # Fancy indexing would first copy the selected rows, and cannot write to a range of bytes of packed rows. The two
    # slices matter: without them the inner loop is not vectorised and is five times slower.
    n_patches = begins.size
    for i in range(ids.size):
        item = ids[i] - start
        source, begin, place = block[item // n_patches], begins[item % n_patches], places[i]
        for offset in offsets:
            run = source[begin + offset : begin + offset + nbytes]
            row = target[place : place + nbytes]
            for b in range(nbytes):
                row[b] = run[b]
            place += nbytes


def scatter_columns(
    columns: NDArray[Any],
    begins: NDArray[np.int64],
    widths: NDArray[np.int64],
    offsets: NDArray[np.int64],
    ids: NDArray[np.int64],
    start: int,
    target: NDArray[Any],
    places: NDArray[np.int64],
) -> None:
    """Copy the rows ``ids`` of several blocks, which follow each other in ``columns``, to ``target``.

    Block k begins at item ``begins[k]`` and has rows of ``widths[k]`` items. Row i of it gets to item
    ``places[i] + offsets[k]``. All items are of one dtype: bytes, or words of several bytes.
    """
    if worth_a_kernel(ids.size * int(widths.sum())):
        scatter_columns_kernel(columns, begins, widths, offsets, ids, start, target, places)
        return
    for begin, width, offset in zip(begins, widths, offsets, strict=True):
        items = np.arange(width)
        target[(places + offset)[:, None] + items] = columns[(begin + (ids - start) * width)[:, None] + items]


@kernel(
    "(u1[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8, u1[::1], i8[::1])",
    "(u2[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8, u2[::1], i8[::1])",
    "(u4[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8, u4[::1], i8[::1])",
    "(u8[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8, u8[::1], i8[::1])",
)
def scatter_columns_kernel(columns, begins, widths, offsets, ids, start, target, places):  # type: ignore[no-untyped-def]
    """The same for many rows."""
    # Row after row: narrow rows of several blocks share cache lines of the target.
    for i in range(ids.size):
        row = ids[i] - start
        for k in range(begins.size):
            width = widths[k]
            at, to = np.uint64(begins[k] + row * width), np.uint64(places[i] + offsets[k])
            for b in range(np.uint64(width)):
                target[to + b] = columns[at + b]


@dataclass(frozen=True, slots=True)
class Sink:
    """Target of one array's rows in one call: the bytes from ``offset`` in the rows of a contiguous byte matrix.

    With ``window``, a row of the matrix gets the stored rows at these distances from a sample, one after the other.
    With ``cut``, it gets patches of them. Stored rows and patches are both called items here.
    """

    source: StoredArray
    matrix: ByteMatrix
    offset: int
    window: tuple[int, ...] = (0,)
    cut: Cut | None = None

    @property
    def n_patches(self) -> int:
        """Number of items in a stored row."""
        return 1 if self.cut is None else self.cut.n_patches

    @property
    def band_items(self) -> int:
        """Number of items in a band."""
        return self.source.info.chunk_rows * self.n_patches

    @property
    def item_nbytes(self) -> int:
        """Bytes of an item."""
        return self.source.row_nbytes if self.cut is None else self.source.dtype.itemsize * self.cut.n_items

    def places(self, ids: NDArray[np.int64], slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Items in ascending order, and the byte of the matrix at which each begins; ``ids`` are ascending."""
        places = slots * self.matrix.shape[1] + self.offset
        if self.window == (0,):
            return ids, places
        ids = (ids[:, None] + np.array(self.window) * self.n_patches).reshape(-1)
        places = (places[:, None] + np.arange(len(self.window)) * self.item_nbytes).reshape(-1)
        order = np.argsort(ids)
        return ids[order], places[order]

    def fill(
        self,
        block: NDArray[np.uint8],
        ids: NDArray[np.int64],
        start: int,
        places: NDArray[np.int64],
        box: Box | None = None,
    ) -> None:
        """Copy items out of a block of rows, or of a box of these rows. The block begins with item ``start``."""
        target = self.matrix.reshape(-1)
        if self.cut is None:
            scatter_rows(block, ids, start, target, places)
            return
        offsets, nbytes, begins = self.cut.runs(self.source.dtype.itemsize, box or self.cut.whole)
        scatter_patches(block, ids, start, target, places, begins, offsets, nbytes)
