"""Rows of a Dask array or dataset in any order, without a session: what `permute` and `take` do on a worker.

This module loads neither dask.array nor Zarr, which a worker does not need for an exchange in memory, and calls no
kernels unless there are many rows. Dask sends functions by the name of their module, so each function of a task has to
be here and not beside the code that only a client calls (`row_gather.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from distributed import get_worker
from numpy.typing import NDArray

from dshuffle.planning.exchange_epochs import row_permutation
from dshuffle.planning.types import group_by
from dshuffle.process_exit import end_without_last_collections
from dshuffle.rows import ByteMatrix, RowLayout, scatter_rows

if TYPE_CHECKING:
    from dshuffle.store import Dataset

ARRAY = "array"
"""Name of a Dask array in a row layout."""

Ranges = list[tuple[int, int]]


class Piece(NamedTuple):
    """Rows sent from one part of the input to one group of output chunks.

    ``rows[offsets[k] : offsets[k + 1]]`` go to rows ``places[offsets[k] : offsets[k + 1]]`` of the group's chunk k.
    """

    offsets: NDArray[np.int64]
    places: NDArray[np.uint32]
    rows: ByteMatrix


class OutputRows(NamedTuple):
    """The rows of the output that come from one part of the input.

    Row ``positions[k]`` of the output is row ``sources[k]`` of the part. The sources are in ascending order. Without
    them, it is row k of the part.
    """

    positions: NDArray[np.uint32]
    sources: NDArray[np.uint32] | None = None


def destinations(seed: int, parts: list[Ranges]) -> list[OutputRows]:
    """Where the rows of each part go in a random permutation."""
    n_rows = max(last for ranges in parts for _, last in ranges)
    destinations = np.empty(n_rows, dtype=np.uint32)
    destinations[row_permutation(n_rows, seed)] = np.arange(n_rows, dtype=np.uint32)
    return [OutputRows(np.concatenate([destinations[first:last] for first, last in ranges])) for ranges in parts]


def requested(parts: list[Ranges], indices: NDArray[np.int64]) -> list[OutputRows]:
    """Which rows of the output come from each part, if row k of the output is row ``indices[k]`` of the input."""
    n_rows = max(last for ranges in parts for _, last in ranges)
    positions, offsets = group_by(indices, n_rows)
    outputs = []
    for ranges in parts:
        begins = itertools.accumulate((last - first for first, last in ranges), initial=0)
        sources = [
            np.repeat(np.arange(begin, begin + last - first), np.diff(offsets[first : last + 1]))
            for begin, (first, last) in zip(begins, ranges, strict=False)
        ]
        own = [positions[offsets[first] : offsets[last]] for first, last in ranges]
        outputs.append(OutputRows(np.concatenate(own).astype(np.uint32), np.concatenate(sources).astype(np.uint32)))
    return outputs


def split_rows(
    output: OutputRows,
    source: list[NDArray[Any]] | Dataset,
    *,
    ranges: Ranges,
    layout: RowLayout,
    starts: NDArray[np.int64],
    cuts: list[int],
) -> list[Piece]:
    """Pack the rows of a part, one piece per group of output chunks."""
    with contextlib.suppress(ValueError):  # this is no task
        if get_worker().nanny:  # it has a process of its own, whose end numba would delay
            end_without_last_collections()
    positions: NDArray[Any] = output.positions
    sources: NDArray[Any] | None = output.sources
    if isinstance(source, list):
        chunks = [_as_rows(chunk, layout) for chunk in source]
    else:
        [(first, last)] = ranges
        ids = np.arange(last - first)
        if sources is not None:
            ids, sources = np.unique(sources, return_inverse=True)
        chunks = [layout.empty(len(ids))]
        source.read_into(chunks[0], np.arange(len(ids)), first + ids.astype(np.int64))
    bounds = list(itertools.accumulate((len(chunk) for chunk in chunks), initial=0))
    targets = np.searchsorted(starts, positions, side="right") - 1
    # Ascending within each target, so that rows from the same chunk are contiguous.
    order, offsets = group_by(targets, len(starts) - 1)
    pieces = []
    for first, last in itertools.pairwise(cuts):
        own = offsets[first : last + 1] - offsets[first]
        chosen = order[offsets[first] : offsets[last]]
        places = positions[chosen] - np.repeat(starts[first:last], np.diff(own)).astype(np.uint32)
        rows = layout.empty(len(chosen))
        if sources is not None:
            chosen = sources[chosen].astype(np.int64)
        for begin, end in itertools.pairwise(own.tolist()):
            within = np.searchsorted(chosen[begin:end], bounds) + begin
            for chunk, start, (low, high) in zip(chunks, bounds, itertools.pairwise(within.tolist()), strict=False):
                # In ascending order, NumPy is as fast as a kernel, and numba takes half a second to load.
                np.take(chunk, chosen[low:high] - start, axis=0, out=rows[low:high], mode="clip")
        pieces.append(Piece(own, places, rows))
    return pieces


def _as_rows(chunk: NDArray[Any], layout: RowLayout) -> ByteMatrix:
    # When Dask merges chunks, their byte order becomes native even if the dtype says otherwise. Any other cast fails.
    chunk = chunk.astype(layout.dtype[ARRAY].base, casting="equiv", copy=False)
    return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).reshape(len(chunk), layout.nbytes)


def merge_pieces(layout: RowLayout, chunk_rows: Sequence[int], pieces: list[Piece]) -> list[ByteMatrix]:
    """Merge the pieces of all parts into the chunks of one group."""
    chunks = []
    for number, n_rows in enumerate(chunk_rows):
        rows = layout.empty(n_rows)
        for offsets, places, arrived in pieces:
            piece = slice(offsets[number], offsets[number + 1])
            scatter_rows(rows, places[piece], arrived[piece])
        chunks.append(rows)
    return chunks


def column_of(layout: RowLayout, name: str, number: int, chunks: list[ByteMatrix]) -> NDArray[Any]:
    """Take one array out of the rows of a chunk."""
    stored, encoding = layout.column(chunks[number], name), layout.encoding(name)
    # A dataset with several arrays needs a copy here: a view would keep the bytes of the other arrays in memory.
    return np.ascontiguousarray(stored) if encoding is None else encoding.decode(stored, name)
