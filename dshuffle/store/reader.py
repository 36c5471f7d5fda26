"""Reading rows chunk by chunk: every chunk is fetched and decoded once, many at a time, within a byte budget.

All I/O runs on zarr's own event loop, whatever thread calls. A loop for every call is no faster (1,250 and
1,300 MB/s for 4 MiB chunks on a local disk, 470 MB/s for both with 256 KiB), and fsspec's network file
systems are bound to the loop of their first use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray
from zarr.core.sync import sync

from dshuffle.errors import DatasetError
from dshuffle.rows import ByteMatrix
from dshuffle.store.chunks import StoredArray

#: Bytes in flight at a time, by default.
MEMORY_BUDGET = 64 << 20

# Neighbouring bands are read in one call until they make this many bytes: zarr's cost for a call (about 0.3
# ms) is then shared by many small chunks, and the inner chunks of a small shard come in one request.
_SPAN_NBYTES = 4 << 20
# However small they are, no more reads than this run at a time.
_MAX_IN_FLIGHT = 64
# Below this, copying on zarr's loop takes less time than handing the copy to a thread.
_THREAD_NBYTES = 1 << 20

Job = tuple[int, Callable[[], Awaitable[None]]]


@dataclass(frozen=True, slots=True)
class Sink:
    """Where the rows of one array go: the bytes from ``offset`` of some rows of a byte matrix."""

    source: StoredArray
    matrix: ByteMatrix
    offset: int


def read_rows(
    sinks: Iterable[Sink],
    ids: NDArray[np.int64],
    slots: NDArray[np.int64],
    *,
    memory_budget: int,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Scatter row ``ids[i]`` of every sink's source to row ``slots[i]`` of its matrix."""
    order = np.argsort(ids)
    ids, slots = ids[order], slots[order]
    span_nbytes = min(_SPAN_NBYTES, memory_budget // 8)
    jobs = (job for sink in sinks for job in _jobs(sink, ids, slots, span_nbytes))
    sync(run_bounded(jobs if stop is None else _until(stop, jobs), memory_budget))


def _until(stop: Callable[[], bool], jobs: Iterable[Job]) -> Iterator[Job]:
    for job in jobs:
        if stop():
            raise DatasetError("reading was given up: nobody needs these samples any more")
        yield job


def cost(decoded_nbytes: int) -> int:
    """Bytes in flight for chunks of a decoded size: those fetched and those decoded stand side by side."""
    return 2 * decoded_nbytes


async def run_bounded(jobs: Iterable[Job], budget: int) -> None:
    """Run ``(cost, start)`` jobs, as many at a time as the budget allows; a larger one runs alone.

    After a failure no further job starts, those under way are waited for (they write to the caller's memory),
    and the first error is raised.
    """
    running: dict[asyncio.Future[None], int] = {}
    try:
        for nbytes, start in jobs:
            while running and (sum(running.values()) + nbytes > budget or len(running) >= _MAX_IN_FLIGHT):
                await _collect(running)
            running[asyncio.ensure_future(start())] = nbytes
        while running:
            await _collect(running)
    finally:
        await asyncio.gather(*running, return_exceptions=True)


async def _collect(running: dict[asyncio.Future[None], int]) -> None:
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        await task
        del running[task]


def _jobs(sink: Sink, ids: NDArray[np.int64], slots: NDArray[np.int64], span_nbytes: int) -> Iterator[Job]:
    source, chunk_rows = sink.source, sink.source.info.chunk_rows
    if source.row_nbytes == 0 or ids.size == 0:
        return

    def job(start: int, stop: int, first: int, last: int) -> Callable[[], Awaitable[None]]:
        return lambda: _read_span(sink, start, stop, ids[first:last], slots[first:last])

    for start, stop, first, last in spans(ids, chunk_rows, max(1, span_nbytes // source.band_nbytes)):
        n_bands = (stop - start) // chunk_rows
        yield cost(n_bands * source.band_nbytes), job(start, stop, first, last)


def spans(ids: NDArray[np.int64], chunk_rows: int, max_bands: int) -> list[tuple[int, int, int, int]]:
    """Group sorted ids by what is read in one call.

    Returns
    -------
    list of (start, stop, first, last)
        Rows ``start`` to ``stop``, at most ``max_bands`` neighbouring bands of which each is wanted, serve
        ``ids[first:last]``.

    Examples
    --------
    >>> spans(np.array([0, 1, 4, 9, 9]), chunk_rows=2, max_bands=4)
    [(0, 2, 0, 2), (4, 6, 2, 3), (8, 10, 3, 5)]
    >>> spans(np.array([0, 3, 5]), chunk_rows=2, max_bands=2)
    [(0, 4, 0, 2), (4, 6, 2, 3)]
    """
    bands = ids // chunk_rows
    firsts = np.flatnonzero(np.diff(bands, prepend=-1))
    bands = bands[firsts]
    at = np.arange(bands.size)
    gap = np.diff(bands, prepend=-2) != 1
    since_gap = at - np.maximum.accumulate(np.where(gap, at, 0))
    begins = np.flatnonzero(since_gap % max_bands == 0)
    ends = np.append(begins[1:], bands.size)
    return list(
        zip(
            (bands[begins] * chunk_rows).tolist(),
            ((bands[ends - 1] + 1) * chunk_rows).tolist(),
            firsts[begins].tolist(),
            np.append(firsts, ids.size)[ends].tolist(),
            strict=True,
        )
    )


async def _read_span(sink: Sink, start: int, stop: int, ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
    block = await sink.source.read_rows(start, stop)
    arguments = block, ids, start, sink.matrix, sink.offset, slots
    if ids.size * block.shape[1] < _THREAD_NBYTES:
        _scatter(*arguments)
    else:
        await asyncio.to_thread(_scatter, *arguments)


@numba.njit(nogil=True, cache=True)
def _scatter(block, ids, start, matrix, offset, slots):  # type: ignore[no-untyped-def]
    # Fancy indexing would first make a copy of the rows picked, and knows no view of some bytes of a packed
    # row. The two slices matter: without them the inner loop is not vectorised, and five times slower.
    width = block.shape[1]
    for i in range(ids.size):
        source = block[ids[i] - start]
        target = matrix[slots[i], offset : offset + width]
        for b in range(width):
            target[b] = source[b]
