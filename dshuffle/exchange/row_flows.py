"""Flows of single rows: rows that a participant sends, and rows that a cache partition receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.planning.types import Samples
from dshuffle.rows import ByteMatrix, Checksums

Stop = Callable[[], bool]


class RowHolder(Protocol):
    """Holder of rows by sample: a cache partition or the server."""

    def pack(self, sample_ids: Samples, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy rows and checksums of samples into buffers. Raises ExchangeError if a sample is missing."""


class LeavingRows:
    """The rows that a participant sends in a run: a :class:`~dshuffle.exchange.endpoints.RowSource`.

    Parameters
    ----------
    holder
        Holder of the rows.
    sample_ids
        ``(m,)`` sample of each item.
    """

    def __init__(self, holder: RowHolder, sample_ids: Samples) -> None:
        self._holder = holder
        self._sample_ids = sample_ids

    def pack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy the rows of items ``first`` to ``last - 1`` into buffers."""
        self._holder.pack(self._sample_ids[first:last], rows, checksums)


class Bring(Protocol):
    """Brings samples into reserved slots, from wherever they are."""

    async def __call__(
        self,
        sample_ids: Samples,
        slots: Samples,
        stop: Stop,
        *,
        done: NDArray[np.bool_],
        progress: Callable[[int], None],
        recovers: bool,
    ) -> None:
        """Bring those that are not ``done``, and note them there."""


class ArrivingRows:
    """The rows that a rank receives in a run: a :class:`~dshuffle.exchange.endpoints.RowSink`.

    Parameters
    ----------
    cache
        Cache partition that receives the rows.
    sample_ids, slots
        ``(m,)`` sample and reserved slot of each item.
    bring
        Brings samples into slots.
    """

    intact = True  # rows do not depend on each other

    def __init__(self, cache: CachePartition, sample_ids: Samples, slots: Samples, bring: Bring) -> None:
        self.n_loading = 0
        self._cache = cache
        self._sample_ids = sample_ids
        self._slots = slots
        self._bring = bring
        self._brought: dict[int, NDArray[np.bool_]] = {}  # of loads that have failed, by their first item

    def unpack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Verify rows and copy them into their slots."""
        self._cache.unpack(self._sample_ids[first:last], self._slots[first:last], rows, checksums)

    async def load(self, first: int, last: int, stop: Stop, *, recovers: bool) -> None:
        """Bring rows into their slots; those that an earlier attempt has brought stay there."""
        done = self._brought.setdefault(first, np.zeros(last - first, np.bool_))
        n_loaded = int(np.count_nonzero(done))

        def progress(n_rows: int) -> None:
            nonlocal n_loaded
            n_loaded += n_rows
            self.n_loading += n_rows

        self.n_loading += n_loaded
        try:
            sample_ids, slots = self._sample_ids[first:last], self._slots[first:last]
            await self._bring(sample_ids, slots, stop, done=done, progress=progress, recovers=recovers)
        finally:
            self.n_loading -= n_loaded
        del self._brought[first]
