"""Verification: read every chunk of a dataset to find all that are missing or corrupted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from zarr.core.sync import sync

from dshuffle.errors import CorruptChunk
from dshuffle.store import reader
from dshuffle.store.dataset import Dataset
from dshuffle.store.open import as_dataset
from dshuffle.store.places import Place
from dshuffle.store.stored_array import StoredArray


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of :func:`verify_dataset`.

    Parameters
    ----------
    n_chunks
        Number of chunks read, over all arrays.
    bytes
        Decoded bytes of the valid chunks.
    bad
        One message for each chunk that is missing, truncated or corrupted.
    """

    n_chunks: int
    bytes: int
    bad: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every chunk could be read."""
        return not self.bad


def verify_dataset(
    dataset: Dataset | Place,
    *,
    progress: Callable[[int, int], None] | None = None,
    memory_budget: int = reader.MEMORY_BUDGET,
) -> VerifyReport:
    """Read every chunk and report those that cannot be decoded.

    A flipped bit is found only if the chunks carry a checksum, as those of :func:`create_dataset` do, or if the
    compressor detects it.

    Parameters
    ----------
    dataset
        Dataset to verify, or its URL or another place that :func:`open_dataset` opens.
    progress
        Called as ``progress(chunks done, total chunks)`` after each chunk, from another thread.
    memory_budget
        Bytes of chunks in flight at a time.

    Raises
    ------
    DatasetError
        If the store cannot be reached. This does not mean that chunks are corrupted.

    Examples
    --------
    >>> import numpy as np
    >>> from dshuffle.store import create_dataset
    >>> dataset = create_dataset("memory://doc-verify", {"x": np.arange(10)}, chunk_rows=4, overwrite=True)
    >>> verify_dataset(dataset)
    VerifyReport(n_chunks=3, bytes=80, bad=())
    """
    sources = as_dataset(dataset)._sources.values()
    total = sum(math.prod(source.chunk_grid) for source in sources)
    sizes: list[int] = []
    bad: list[tuple[str, tuple[int, ...], str]] = []

    async def check(source: StoredArray, index: tuple[int, ...]) -> None:
        try:
            chunk = await source.read_chunk(index)
            sizes.append(chunk.nbytes)
        except CorruptChunk as exc:
            bad.append((source.name, index, str(exc)))
        if progress is not None:
            progress(len(sizes) + len(bad), total)

    def job(source: StoredArray, index: tuple[int, ...]) -> Callable[[], Awaitable[None]]:
        return lambda: check(source, index)

    def jobs() -> Iterator[reader.Job]:
        for source in sources:
            for index in itertools.product(*map(range, source.chunk_grid)):
                yield reader.cost(source.chunk_nbytes), job(source, index)

    sync(reader.run_bounded(jobs(), memory_budget))
    return VerifyReport(n_chunks=total, bytes=sum(sizes), bad=tuple(message for _, _, message in sorted(bad)))
