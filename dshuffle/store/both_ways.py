"""Compare the two ways to read a chunk: with zarr, and with dshuffle's own reader.

A dataset compares one chunk of each array in every process that reads it, before the first read. A table may have
hundreds of columns with the same metadata; eight of them are compared. Verification compares all chunks. A difference
is an error: other chunks may differ for the same reason.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zarr import AsyncArray
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import StorePath

from dshuffle.errors import CorruptChunk, DatasetError, ReadersDiffer
from dshuffle.store.reader import cost, run_bounded
from dshuffle.store.stored_array import StoredArray

#: Number of arrays with the same metadata document of which a chunk is compared.
_ALIKE = 8


class FirstReads:
    """Comparison of one chunk of each array of a dataset, in one process.

    Parameters
    ----------
    store
        Store to read from, without a meter: like metadata, these chunks do not count as traffic.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._compared: dict[str, set[str]] = {}  # metadata document -> names of arrays
        self._lock = threading.Lock()

    def compare(self, chunks: Iterable[tuple[StoredArray, int]], memory_budget: int) -> None:
        """Compare a chunk of each array of which no chunk was compared before, of at most eight arrays of a kind.

        Parameters
        ----------
        chunks
            Arrays, each with the number of a chunk that is about to be read.
        memory_budget
            Bytes of chunks in flight at a time.

        Raises
        ------
        ReadersDiffer
            If the two ways differ.
        DatasetError
            If the store cannot be reached.
        """
        with self._lock:
            jobs = []
            n_chosen: Counter[str] = Counter()
            for source, chunk in chunks:
                if source.direct is None:
                    continue
                kind = source.direct.chunk_format.document
                compared = self._compared.setdefault(kind, set())
                if source.name not in compared and len(compared) + n_chosen[kind] < _ALIKE:
                    n_chosen[kind] += 1
                    jobs.append((2 * cost(source.chunk_nbytes), self._job(source, chunk, compared)))
            if jobs:
                sync(run_bounded(jobs, memory_budget))

    def _job(self, source: StoredArray, chunk: int, compared: set[str]) -> Callable[[], Awaitable[None]]:
        async def read_both() -> None:
            bare = _on(self._store, source)
            index = (chunk, *[0] * len(source.info.shape))
            try:
                expected = await bare.read_chunk(index)
            except CorruptChunk:
                return  # the read that follows reports it, or reads the chunk once its store has recovered
            if await compare(bare, index, expected):
                compared.add(source.name)

        return read_both


async def compare(source: StoredArray, index: tuple[int, ...], expected: NDArray[Any]) -> bool:
    """Compare a chunk that zarr has read with what dshuffle's own reader gets.

    Returns
    -------
    bool
        Whether there was something to compare. A chunk that is missing from the store is always read with zarr.

    Raises
    ------
    ReadersDiffer
        If the own reader cannot read the chunk, or gets other bytes.
    DatasetError
        If the store cannot be reached.
    """
    assert source.direct is not None
    try:
        rows = await source.direct.read_chunk(index[0])
    except (DatasetError, MemoryError):
        raise
    except Exception as error:  # decompressors have exceptions of their own
        raise _difference(source, index, f"only zarr can read it ({type(error).__name__}: {error})") from error
    if rows is None:
        return False
    stored = np.ascontiguousarray(expected, source.dtype).reshape(-1).view(np.uint8)
    if not np.array_equal(rows[: stored.size], stored):
        raise _difference(source, index, "the bytes differ")
    return True


def _on(store: Store, source: StoredArray) -> StoredArray:
    """Return the same array on another store."""
    assert source.direct is not None
    stored = source.array.async_array
    array = type(source.array)(AsyncArray(stored.metadata, StorePath(store, stored.path)))
    return dataclasses.replace(source, array=array, direct=dataclasses.replace(source.direct, store=store))


def _difference(source: StoredArray, index: tuple[int, ...], reason: str) -> ReadersDiffer:
    return ReadersDiffer(
        f"chunk {index} of array {source.name!r} of {source.url} is read differently by zarr and by dshuffle: "
        f"{reason}. Please report this, with the metadata of the array. Use a copy of the dataset meanwhile: "
        "create_dataset(url, read_sources([...]))"
    )
