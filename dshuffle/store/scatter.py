"""Kernels that copy rows out of decoded chunks to their places."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(nogil=True, cache=True)
def scatter_rows(block, ids, start, target, places):  # type: ignore[no-untyped-def]
    """Copy the rows ``ids`` of a block that begins at row ``start`` to ``target``, from the bytes ``places`` on."""
    # Fancy indexing would first copy the selected rows, and cannot write to a range of bytes of packed rows. The two
    # slices matter: without them the inner loop is not vectorised and is five times slower.
    width = block.shape[1]
    for i in range(ids.size):
        source = block[ids[i] - start]
        row = target[places[i] : places[i] + width]
        for b in range(width):
            row[b] = source[b]


@numba.njit(nogil=True, cache=True)
def scatter_patches(block, ids, start, target, places, begins, offsets, nbytes):  # type: ignore[no-untyped-def]
    """Copy patches of the rows of a block to ``target``: runs of bytes that follow each other there."""
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


@numba.njit(nogil=True, cache=True)
def scatter_columns(columns, begins, widths, offsets, ids, start, target, places):  # type: ignore[no-untyped-def]
    """Copy the rows ``ids`` of several blocks, which follow each other in ``columns``, to ``target``.

    Block k begins at item ``begins[k]`` and has rows of ``widths[k]`` items. Row i of it gets to item
    ``places[i] + offsets[k]``. All items are of one dtype: bytes, or words of several bytes.
    """
    # Row after row: narrow rows of several blocks share cache lines of the target.
    for i in range(ids.size):
        row = ids[i] - start
        for k in range(begins.size):
            width = widths[k]
            at, to = np.uint64(begins[k] + row * width), np.uint64(places[i] + offsets[k])
            for b in range(np.uint64(width)):
                target[to + b] = columns[at + b]
