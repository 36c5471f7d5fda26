"""Copy rows out of decoded chunks to their places.

A few rows are copied by NumPy, so that whoever looks at a dataset, or opens a session with it, does not load numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.kernels import kernel, worth_a_kernel

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
