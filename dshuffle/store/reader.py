"""Read rows chunk by chunk. Each chunk is fetched and decoded once, many at a time, within a byte budget.

All I/O runs on zarr's own event loop, whichever thread calls. A separate loop for each call is not faster: 1,250 and
1,300 MB/s for 4 MiB chunks on a local disk, and 470 MB/s for both with 256 KiB. In addition, fsspec's network file
systems are bound to the loop of their first use.

A few rows are copied by NumPy, so that whoever looks at a dataset, or opens a session with it, does not load numba.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zarr.core.sync import sync

from dshuffle.errors import DatasetError
from dshuffle.kernels import kernel, worth_a_kernel
from dshuffle.rows import ByteMatrix
from dshuffle.store.patient_store import unpacked
from dshuffle.store.stored_array import StoredArray
from dshuffle.store.view import Box, Cut

#: Default number of bytes in flight at a time.
MEMORY_BUDGET = 64 << 20

# Consecutive bands are read in one call up to this many bytes, where that helps: the chunks of a shard then come in
# one request, and many small chunks share zarr's cost per call (about 0.3 ms).
_SPAN_NBYTES = 4 << 20
# Largest number of concurrent reads, however small they are.
_MAX_IN_FLIGHT = 64
# Small local files are read together in one thread up to this size.
_FILES_NBYTES = 1 << 20

# Arrays with shorter rows are read together, if they can: those of a table may have hundreds.
_NARROW_NBYTES = 64

Indices = NDArray[np.int64]
Job = tuple[int, Callable[[], Awaitable[None]]]


@dataclass(frozen=True)
class Sink:
    """Target of one array's rows in one call: the bytes from ``offset`` in the rows of a contiguous byte matrix.

    A row of the matrix gets the items at the distances ``window`` from a sample, one after the other. Items are stored
    rows, or patches of them.
    """

    source: StoredArray
    matrix: ByteMatrix
    offset: int
    window: tuple[int, ...]
    cut: Cut

    @property
    def band_items(self) -> int:
        """Number of items in a band."""
        return self.source.info.chunk_rows * self.cut.n_patches

    @property
    def is_narrow(self) -> bool:
        """Whether the array may be read together with others: a column of a table."""
        is_plain = self.source.decoders is not None and not self.source.info.shard_rows
        is_whole = self.cut.n_patches == 1 and self.cut.sizes == self.source.info.shape  # one patch may be a part
        return is_plain and self.window == (0,) and is_whole and self.source.row_nbytes < _NARROW_NBYTES

    @functools.cached_property
    def target(self) -> NDArray[np.uint8]:
        """The bytes of the matrix from the first one of this array on."""
        return self.matrix.reshape(-1)[self.offset :]

    @functools.cached_property
    def runs(self) -> tuple[Indices, Indices, int]:
        """Where the bytes of items are in a stored row."""
        return self.cut.runs(self.source.dtype.itemsize)

    def places(self, ids: Indices, slots: Indices) -> tuple[Indices, Indices]:
        """Items in ascending order, and the byte of the matrix at which each begins; ``ids`` are ascending."""
        places = slots * self.matrix.shape[1]
        if self.window == (0,):
            return ids, places
        item_nbytes = self.source.dtype.itemsize * self.cut.n_items
        ids = (ids[:, None] + np.array(self.window) * self.cut.n_patches).reshape(-1)
        places = (places[:, None] + np.arange(len(self.window)) * item_nbytes).reshape(-1)
        order = np.argsort(ids)
        return ids[order], places[order]

    def fill(self, block: NDArray[np.uint8], items: Indices, places: Indices, box: Box | None = None) -> None:
        """Copy items, counted from the first one, out of a block of rows, or of a box of these rows."""
        runs = self.runs if box is None else self.cut.runs(self.source.dtype.itemsize, box)
        scatter(block, items, self.target, places, *runs)


def read_rows(
    sinks: list[Sink],
    ids: Indices,
    slots: Indices,
    *,
    memory_budget: int,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Copy row ``ids[i]`` of every sink's source to row ``slots[i]`` of its matrix."""
    order = np.argsort(ids)
    ids, slots = ids[order], slots[order]
    span_nbytes = min(_SPAN_NBYTES, memory_budget // 8)
    if worth_a_kernel(ids.size * sum(sink.source.row_nbytes for sink in sinks)):  # the parts may be too small for it
        _ = scatter_kernel.dispatcher

    def jobs() -> Iterator[Job]:
        for group in _groups(sinks, span_nbytes):
            for job in _jobs(group, ids, slots, span_nbytes):
                if stop is not None and stop():
                    raise DatasetError("reading was cancelled: these samples are no longer needed")
                yield job

    sync(run_bounded(jobs(), memory_budget))


def cost(decoded_nbytes: int) -> int:
    """Return the bytes in flight for chunks of a decoded size: the fetched and the decoded bytes together."""
    return 2 * decoded_nbytes


async def run_bounded(jobs: Iterable[Job], budget: int) -> None:
    """Run ``(cost, start)`` jobs, as many at a time as the budget allows. A job larger than the budget runs alone.

    After a failure no more jobs start. Running jobs are awaited, because they write to the caller's memory. Then the
    first error is raised.
    """
    running: set[asyncio.Task[None]] = set()
    errors: list[BaseException] = []
    ended = asyncio.Event()
    n_running = in_flight = 0

    async def run(nbytes: int, start: Callable[[], Awaitable[None]]) -> None:
        nonlocal n_running, in_flight
        try:
            await start()
        except BaseException as exc:
            errors.append(exc)
        finally:
            n_running -= 1
            in_flight -= nbytes
            ended.set()

    try:
        for nbytes, start in jobs:
            while n_running and (in_flight + nbytes > budget or n_running >= _MAX_IN_FLIGHT):
                # asyncio.wait would inspect all running jobs each time one ends.
                ended.clear()
                await ended.wait()
            if errors:
                break
            n_running += 1
            in_flight += nbytes
            task = asyncio.ensure_future(run(nbytes, start))
            running.add(task)
            task.add_done_callback(running.discard)
    finally:
        await asyncio.gather(*running)
    if errors:
        raise errors[0]


def _groups(sinks: Iterable[Sink], span_nbytes: int) -> Iterator[list[Sink]]:
    """Group narrow arrays with the same chunks, such as the columns of a table."""
    groups: dict[tuple[int, int], list[Sink]] = {}
    for sink in sinks:
        if not sink.is_narrow:
            yield [sink]
            continue
        key = id(sink.matrix), sink.source.info.chunk_rows
        group = groups.setdefault(key, [])
        group.append(sink)
        if len(group) * sink.source.band_nbytes >= span_nbytes:
            yield groups.pop(key)
    yield from groups.values()


def _jobs(group: list[Sink], ids: Indices, slots: Indices, span_nbytes: int) -> Iterator[Job]:
    sink, source, band_items = group[0], group[0].source, group[0].band_items
    if source.row_nbytes == 0 or ids.size == 0:
        return
    ids, places = sink.places(ids, slots)
    shard_bands = (source.info.shard_rows or 0) // source.info.chunk_rows
    nbytes = sum(each.source.band_nbytes for each in group)
    is_own = source.decoders is not None
    if is_own and not shard_bands:
        span_nbytes = min(_FILES_NBYTES, span_nbytes) if source.store.root else 0
    for first, last in spans(ids // band_items, max(1, span_nbytes // nbytes), shard_bands, gaps=is_own):
        items, starts = ids[first:last], places[first:last]
        if is_own:
            bands = items // band_items
            chunks = bands[np.diff(bands, prepend=-1) != 0].tolist()
            yield cost(len(chunks) * nbytes), partial(_read_chunks, group, chunks, items, starts)
            continue
        begin, end = (int(item) // band_items * source.info.chunk_rows for item in (items[0], items[-1] + band_items))
        for box, which in sink.cut.boxes(items):
            size = (end - begin) * source.dtype.itemsize * math.prod(side.stop - side.start for side in box)
            yield cost(size), partial(_read_box, sink, begin, end, items[which], starts[which], box)


def spans(bands: Indices, max_bands: int, shard_bands: int = 0, *, gaps: bool = False) -> list[tuple[int, int]]:
    """Group samples with these ascending bands into spans that are read in one call: first and last, exclusive.

    With ``shard_bands`` a span stays within one shard. With ``gaps``, bands without samples may lie within a span, and
    do not count.
    """
    firsts = np.flatnonzero(np.diff(bands, prepend=-1))
    distinct = bands[firsts]
    at = np.arange(distinct.size)
    gap = np.diff(distinct, prepend=-2) != 1 if not gaps else at == 0
    if shard_bands:
        gap |= np.diff(distinct // shard_bands, prepend=-1) != 0
    since_gap = at - np.maximum.accumulate(np.where(gap, at, 0))
    begins = firsts[since_gap % max_bands == 0].tolist()
    return list(zip(begins, [*begins[1:], bands.size], strict=True))


async def _read_box(sink: Sink, begin: int, end: int, ids: Indices, places: Indices, box: Box) -> None:
    """Read a box of rows with zarr, and copy items out of it."""
    block = await sink.source.read_rows(begin, end, box)
    nbytes = ids.size * sink.cut.n_items * sink.source.dtype.itemsize
    await unpacked(nbytes, partial(sink.fill, block, ids - begin * sink.cut.n_patches, places, box))


async def _read_chunks(group: list[Sink], chunks: list[int], ids: Indices, places: Indices) -> None:
    """Read chunks of all arrays of a group, and copy rows out of them."""
    use, source = partial(_unpack, group, chunks, ids, places), group[0].source
    nbytes = len(chunks) * sum(sink.source.info.chunk_rows * sink.source.row_nbytes for sink in group)
    if source.info.shard_rows:
        await source.read_shard(chunks, use, nbytes)
    else:
        await source.store.read([(sink.source.key(chunk), None) for chunk in chunks for sink in group], use, nbytes)


def _unpack(group: list[Sink], chunks: list[int], ids: Indices, places: Indices, contents: list[Any]) -> None:
    """Copy rows out of the stored bytes of chunks: those of all arrays of a group for each chunk."""
    band_items, remaining = group[0].band_items, iter(contents)
    bounds = np.searchsorted(ids, np.array([*chunks, chunks[-1] + 1]) * band_items).tolist()
    for chunk, begin, end in zip(chunks, bounds[:-1], bounds[1:], strict=True):
        blocks = [sink.source.decode(chunk, next(remaining)) for sink in group]
        items, starts = ids[begin:end] - chunk * band_items, places[begin:end]
        if len(group) > 1 and worth_a_kernel(items.size * sum(block.shape[1] for block in blocks)):
            _fill_together(group, blocks, items, starts)
            continue
        for sink, block in zip(group, blocks, strict=True):
            sink.fill(block, items, starts)


def _fill_together(sinks: list[Sink], blocks: list[NDArray[np.uint8]], items: Indices, places: Indices) -> None:
    """Copy rows of arrays that get side by side, row after row: they share cache lines of the target."""
    widths, offsets = np.array([(block.shape[1], sink.offset) for sink, block in zip(sinks, blocks, strict=True)]).T
    begins = np.cumsum([0, *(block.size for block in blocks[:-1])])
    # The kernel copies words of up to 8 bytes, of which everything is a multiple.
    word = math.gcd(8, sinks[0].matrix.shape[1], *widths.tolist(), *offsets.tolist())
    columns, target = np.concatenate(blocks, axis=None), sinks[0].matrix.reshape(-1)
    columns_kernel(
        columns.view(f"u{word}"), begins // word, widths // word, offsets // word,
        items, target.view(f"u{word}"), places // word,
    )  # fmt: skip


@kernel(*(f"(u{n}[::1], i8[::1], i8[::1], i8[::1], i8[::1], u{n}[::1], i8[::1])" for n in (1, 2, 4, 8)))
def columns_kernel(columns, begins, widths, offsets, items, target, places):  # type: ignore[no-untyped-def]
    """Copy rows of several blocks that follow each other; row i of block k gets to ``places[i] + offsets[k]``."""
    for i in range(items.size):
        for k in range(begins.size):
            width = widths[k]
            at, to = np.uint64(begins[k] + items[i] * width), np.uint64(places[i] + offsets[k])
            for b in range(np.uint64(width)):
                target[to + b] = columns[at + b]


def scatter(
    block: NDArray[np.uint8],
    items: Indices,
    target: NDArray[np.uint8],
    places: Indices,
    begins: Indices,
    offsets: Indices,
    nbytes: int,
) -> None:
    """Copy items of the rows of a block to ``target``, from the bytes ``places`` on.

    Every row of the block has ``begins.size`` items: each begins there, and has ``nbytes`` at each of the offsets.
    """
    if worth_a_kernel(items.size * offsets.size * nbytes):
        scatter_kernel(block, items, target, places, begins, offsets, nbytes)
        return
    row, patch = np.divmod(items, begins.size)
    each = (offsets[:, None] + np.arange(nbytes)).reshape(-1)
    target[places[:, None] + np.arange(each.size)] = block[row[:, None], begins[patch][:, None] + each]


@kernel(
    "(u1[:,::1], i8[::1], u1[::1], i8[::1], i8[::1], i8[::1], i8)",
    "(Array(u1, 2, 'C', True), i8[::1], u1[::1], i8[::1], i8[::1], i8[::1], i8)",
)
def scatter_kernel(block, items, target, places, begins, offsets, nbytes):  # type: ignore[no-untyped-def]
    """The same for many rows."""
    # Fancy indexing would first copy the selected rows, and cannot write to a range of bytes of packed rows. The two
    # slices matter: without them the inner loop is not vectorised and is five times slower.
    n_patches = begins.size
    for i in range(items.size):
        source, begin, place = block[items[i] // n_patches], begins[items[i] % n_patches], places[i]
        for offset in offsets:
            run = source[begin + offset : begin + offset + nbytes]
            row = target[place : place + nbytes]
            for b in range(nbytes):
                row[b] = run[b]
            place += nbytes
