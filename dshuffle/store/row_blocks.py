"""Blocks of consecutive stored rows, so that several processes can read a dataset together, and each chunk once.

Every process that opens the dataset finds the same blocks. A block consists of whole chunks of a few arrays. Arrays
whose chunks hold many more rows than those of others, such as labels, are in blocks of their own. Rows are stored rows
here, or the patches that they are divided into: a sample that is a window consists of several of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.rows import ByteMatrix, Checksums, checksum_rows, gather_rows
from dshuffle.store.dataset import Dataset
from dshuffle.store.reader import View, scatter

LARGEST_BLOCK, SMALLEST_BLOCK = 8 << 20, 256 << 10
"""Bytes of the rows of a block, if chunks are small enough."""

BLOCKS_PER_READER = 8
"""Blocks that each reader has at least, if they are not too small. Rows are sent while others are read."""

Samples = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows of a block: ``(k,)`` their numbers, ascending, and their bytes and checksums."""

    items: Samples
    rows: ByteMatrix
    checksums: Checksums

    def gather(self, items: Samples) -> tuple[ByteMatrix, Checksums]:
        """Rows and checksums of some of these rows."""
        places = np.searchsorted(self.items, items)
        rows = np.empty((len(places), self.rows.shape[1]), np.uint8)
        gather_rows(self.rows, places, rows)
        return rows, self.checksums[places]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Arrays that are read together: ``rows`` as a dataset of all rows, ``samples`` as a part of the dataset's rows.

    Blocks have ``step`` rows and are numbered from ``first`` on. ``window`` are the distances of the rows of a sample
    from its anchor. ``columns`` say where each array begins in a row of ``rows``, its bytes there, and where it begins
    in a row of the dataset. ``is_single``: whether each chunk is a row.
    """

    rows: Dataset
    samples: Dataset
    step: int
    first: int
    n_blocks: int
    window: tuple[int, ...]
    columns: tuple[tuple[int, int, int], ...]
    is_single: bool


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Rows of one block that a process needs: which of its samples, which part of each, and the number of each row."""

    group: Group
    block: int
    places: Samples
    parts: Samples
    items: Samples


class RowBlocks:
    """The blocks of a dataset for ``n_readers`` processes that read it together.

    ``chunk_rows`` rows always go to one process together. If they are whole chunks, they form a block, or several.
    """

    def __init__(self, dataset: Dataset, n_readers: int, chunk_rows: int = 1) -> None:
        self.dataset, self.n_readers, self._view = dataset, n_readers, dataset._view
        self.groups: list[Group] = []
        self.n_blocks = 0
        for names, unit in _grouped(dataset):
            self.groups.append(self._group(names, unit, chunk_rows))
            self.n_blocks += self.groups[-1].n_blocks
        self.is_whole = len(self.groups) == 1 and not self._view.offsets
        """Whether the rows of blocks are rows of the dataset, with the same checksums."""

    def _group(self, names: list[str], unit: int, chunk_rows: int) -> Group:
        view, samples = self._view, self.dataset._only(names)
        rows = samples._seen_as(View(view.n_rows, patched=view.patched))
        stored = sum(source.row_nbytes for source in self.dataset._sources.values()) * view.n_rows
        target = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, stored // (BLOCKS_PER_READER * self.n_readers)))
        if any(info.shard_rows for info in rows.arrays.values()):  # the index of a shard is read with every block
            target = LARGEST_BLOCK
        row_nbytes = max(1, rows.layout.nbytes * view.n_patches)
        step = max(1, target // row_nbytes // unit) * unit
        if view.is_whole and chunk_rows > 1 and chunk_rows % unit == 0:
            step = chunk_rows if chunk_rows * row_nbytes <= LARGEST_BLOCK else math.gcd(chunk_rows, step)
        inner: Any = rows.layout.dtype.fields
        outer: Any = self.dataset.layout.dtype.fields
        return Group(
            rows=rows,
            samples=samples,
            step=step * view.n_patches,
            first=self.n_blocks,
            n_blocks=-(-view.n_rows // step),
            window=view.window(names[0]),
            columns=tuple((inner[name][1], inner[name][0].itemsize, outer[name][1]) for name in names),
            is_single=all(info.chunk_rows == 1 for info in rows.arrays.values()),
        )

    def group_of(self, block: int) -> Group:
        """The arrays of a block."""
        return next(group for group in self.groups if block < group.first + group.n_blocks)

    def nbytes(self, block: int) -> int:
        """Bytes of the rows of a block."""
        group = self.group_of(block)
        return min(group.step, self._view.n_items) * (group.rows.layout.nbytes + 4)

    def first_item(self, block: int) -> int:
        """Number of the first row of a block; messages count from it."""
        group = self.group_of(block)
        return (block - group.first) * group.step

    def read(self, block: int, stop: Callable[[], bool]) -> Block:
        """Read the rows of a block that samples consist of."""
        group, first, view = self.group_of(block), self.first_item(block), self._view
        last = min(first + group.step, view.n_items)
        items = np.arange(first, last)
        if (ids := view.ids) is not None:
            offsets = [view.before + distance * view.n_patches for distance in group.window]
            parts = [ids[slice(*np.searchsorted(ids, [first - offset, last - offset]))] + offset for offset in offsets]
            items = np.unique(np.concatenate(parts))
        rows = group.rows.layout.empty(len(items))
        group.rows.read_into(rows, np.arange(len(items)), items, memory_budget=2 * LARGEST_BLOCK, stop=stop)
        return Block(items, rows, checksum_rows(rows, self._numbers(items)))

    def requests(self, samples: Samples, *, alone: bool) -> tuple[list[Request], list[tuple[Group, Samples]]]:
        """What a process needs for its ``(m,)`` samples: rows of blocks, and what it reads itself if it is alone."""
        requests: list[Request] = []
        direct: list[tuple[Group, Samples]] = []
        view, anchors = self._view, self._view.items(samples)
        for group in self.groups:
            n = len(group.window)
            items = (anchors[:, None] + np.array(group.window, np.int64) * view.n_patches).reshape(-1)
            numbers = items // group.step
            order = np.argsort(numbers, kind="stable")
            counts = np.bincount(numbers, minlength=group.n_blocks)
            is_own = np.zeros(group.n_blocks, np.bool_)
            if alone and not view.offsets:
                bounds = np.minimum(np.arange(group.n_blocks + 1) * group.step, view.n_items)
                sizes = np.diff(bounds if view.ids is None else np.searchsorted(view.ids, bounds))
                is_own = (counts > 0) & (group.is_single | (counts == sizes))
            if is_own.any():
                direct.append((group, order[np.repeat(is_own, counts)]))
            ends = np.cumsum(counts)
            for block in np.flatnonzero((counts > 0) & ~is_own).tolist():
                which = order[ends[block] - counts[block] : ends[block]]
                requests.append(Request(group, group.first + block, which // n, which % n, items[which]))
        return requests, direct

    def is_intact(self, request: Request, rows: ByteMatrix, checksums: Checksums) -> bool:
        """Whether rows that were requested have the length and the checksums that they should have."""
        shape = len(request.items), request.group.rows.layout.nbytes
        return rows.shape == shape and np.array_equal(checksum_rows(rows, self._numbers(request.items)), checksums)

    def place(self, request: Request, rows: ByteMatrix, target: ByteMatrix, slots: Samples) -> None:
        """Copy requested rows to their parts of rows of the dataset; ``slots`` are those of ``request.places``."""
        items, none = np.arange(len(rows)), np.zeros(1, np.int64)
        for begin, nbytes, to in request.group.columns:
            places = slots * target.shape[1] + to + request.parts * nbytes
            scatter(rows, items, target.reshape(-1), places, none + begin, none, nbytes)

    def _numbers(self, items: Samples) -> Samples:
        """What checksums depend on beside the bytes: samples, if blocks have whole rows."""
        ids = self._view.ids
        return np.searchsorted(ids, items) if self.is_whole and ids is not None else items


def _grouped(dataset: Dataset) -> list[tuple[list[str], int]]:
    """Names of arrays whose chunks fit together, and the rows of their smallest blocks."""
    view = dataset._view
    groups: list[tuple[list[str], int, int]] = []
    for source in sorted(dataset._sources.values(), key=lambda source: (-source.row_nbytes, source.name)):
        size, rows = source.row_nbytes, min(source.info.chunk_rows, view.n_rows)
        for at, (names, unit, nbytes) in enumerate(groups):
            larger = max(unit, rows)
            fits = larger % min(unit, rows) == 0 and view.window(names[0]) == view.window(source.name)
            small = larger * (nbytes + size) <= LARGEST_BLOCK or (larger == unit and 8 * size <= nbytes)
            if fits and small:
                groups[at] = [*names, source.name], larger, nbytes + size
                break
        else:
            groups.append(([source.name], rows, size))
    return [(names, unit) for names, unit, _ in groups]
