"""Rows of a Dask array in any order, without a session: what `permute` and `take` do on a worker.

This module does not load dask.array, which a worker does not need for an exchange in memory, and calls no kernels
unless there are many rows. Dask sends functions by the name of their module, so each function of a task has to be here
and not beside the code that only a client calls (`row_gather.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from distributed import get_worker
from numpy.typing import NDArray

from dshuffle.planning.types import group_by
from dshuffle.process_exit import end_without_last_collections
from dshuffle.rows import ByteMatrix, scatter_rows

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

    Row ``positions[k]`` of the output is row ``sources[k]`` of the part. The sources are in ascending order.
    """

    positions: NDArray[np.uint32]
    sources: NDArray[np.uint32]


def requested(parts: list[Ranges], indices: NDArray[np.int64]) -> list[OutputRows]:
    """Which rows of the output come from each part, if row k of the output is row ``indices[k]`` of the input."""
    positions, offsets = group_by(indices, max(last for ranges in parts for _, last in ranges))
    outputs = []
    for ranges in parts:
        counts = np.concatenate([np.diff(offsets[first : last + 1]) for first, last in ranges])
        own = np.concatenate([positions[offsets[first] : offsets[last]] for first, last in ranges])
        outputs.append(OutputRows(own.astype(np.uint32), np.repeat(np.arange(len(counts), dtype=np.uint32), counts)))
    return outputs


def _as_rows(chunk: NDArray[Any]) -> ByteMatrix:
    width = chunk.itemsize * math.prod(chunk.shape[1:])
    return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).reshape(len(chunk), width)


def split_rows(
    output: OutputRows, chunks: list[NDArray[Any]], *, dtype: np.dtype[Any], starts: NDArray[np.int64], cuts: list[int]
) -> list[Piece]:
    """Pack the rows of a part, one piece per group of output chunks."""
    with contextlib.suppress(ValueError):  # this is no task
        if get_worker().nanny:  # it has a process of its own, whose end numba would delay
            end_without_last_collections()
    # When Dask merges chunks, their byte order becomes native even if the dtype says otherwise. Any other cast fails.
    inputs = [_as_rows(chunk.astype(dtype, casting="equiv", copy=False)) for chunk in chunks]
    bounds = list(itertools.accumulate(map(len, inputs), initial=0))
    targets = np.searchsorted(starts, output.positions, side="right") - 1
    # Ascending within each target, so that rows from the same chunk are contiguous.
    order, offsets = group_by(targets, len(starts) - 1)
    pieces = []
    for first, last in itertools.pairwise(cuts):
        own = offsets[first : last + 1] - offsets[first]
        chosen = order[offsets[first] : offsets[last]]
        places = output.positions[chosen] - np.repeat(starts[first:last], np.diff(own)).astype(np.uint32)
        sources = output.sources[chosen].astype(np.int64)
        rows = np.empty((len(chosen), inputs[0].shape[1]), np.uint8)
        for begin, end in itertools.pairwise(own.tolist()):
            within = np.searchsorted(sources[begin:end], bounds) + begin
            for chunk, start, (low, high) in zip(inputs, bounds, itertools.pairwise(within.tolist()), strict=False):
                # In ascending order, NumPy is as fast as a kernel, and numba takes half a second to load.
                np.take(chunk, sources[low:high] - start, axis=0, out=rows[low:high], mode="clip")
        pieces.append(Piece(own, places, rows))
    return pieces


def merge_pieces(
    dtype: np.dtype[Any], shape: tuple[int, ...], chunk_rows: Sequence[int], pieces: list[Piece]
) -> list[NDArray[Any]]:
    """Merge the pieces of all parts into the chunks of one group."""
    chunks = []
    for number, n_rows in enumerate(chunk_rows):
        chunk = np.empty((n_rows, *shape), dtype)
        for offsets, places, arrived in pieces:
            piece = slice(offsets[number], offsets[number + 1])
            scatter_rows(_as_rows(chunk), places[piece], arrived[piece])
        chunks.append(chunk)
    return chunks
