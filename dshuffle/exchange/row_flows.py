"""Flows of single rows: rows that a participant sends, and rows that a cache partition receives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import numpy as np

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


class ArrivingRows:
    """The rows that a rank receives in a run: a :class:`~dshuffle.exchange.endpoints.RowSink`.

    Parameters
    ----------
    cache
        Cache partition that receives the rows.
    sample_ids, slots
        ``(m,)`` sample and reserved slot of each item.
    read_store
        Function that reads samples from the store into slots.
    read_former
        Function that reads samples from former partitions into slots. It returns the places of the samples that are
        left. None if there are no former partitions.
    """

    def __init__(
        self,
        cache: CachePartition,
        sample_ids: Samples,
        slots: Samples,
        read_store: Callable[[Samples, Samples, Stop], None],
        read_former: Callable[[Samples, Samples, Stop], Awaitable[Samples]] | None = None,
    ) -> None:
        self._cache = cache
        self._sample_ids = sample_ids
        self._slots = slots
        self._read_store = read_store
        self._read_former = read_former
        self._read = np.zeros(0 if read_former is None else len(sample_ids), np.bool_)  # from former partitions

    @property
    def intact(self) -> bool:
        """Rows do not depend on each other, so this is always true."""
        return True

    def unpack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Verify rows and copy them into their slots."""
        self._cache.unpack(self._sample_ids[first:last], self._slots[first:last], rows, checksums)

    async def read_former(self, first: int, last: int, stop: Stop) -> None:
        """Read rows from former partitions into their slots, as far as these have them."""
        if self._read_former is not None:
            left = await self._read_former(self._sample_ids[first:last], self._slots[first:last], stop)
            self._read[first:last] = True
            self._read[first + left] = False

    def read_store(self, first: int, last: int, stop: Stop) -> None:
        """Read rows from the store into their slots."""
        sample_ids, slots = self._sample_ids[first:last], self._slots[first:last]
        if self._read_former is not None:
            left = ~self._read[first:last]
            sample_ids, slots = sample_ids[left], slots[left]
        self._read_store(sample_ids, slots, stop)
