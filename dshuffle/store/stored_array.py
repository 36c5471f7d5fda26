"""One stored array: read bands of rows or single chunks, and find the chunk that made a read fail."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from zarr import Array

from dshuffle.errors import CorruptChunk, DatasetError
from dshuffle.store.backends.chunk_cache import ChunkCache
from dshuffle.store.direct_read import DirectArray


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Dtype, sample shape and chunking of an array.

    Parameters
    ----------
    dtype
        Item type, as read.
    shape
        Shape of one sample.
    chunk_rows
        Samples in a chunk (the inner chunk, if the array is sharded).
    shard_rows
        Samples in a shard (a file or object of many chunks); ``None`` if each chunk is a file or object.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk_rows: int
    shard_rows: int | None = None


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a store.

    A **band** is the unit of reading: ``chunk_rows`` consecutive rows across all other axes. It is one chunk, or
    several chunks side by side if the array is chunked along other axes too.
    """

    url: str
    name: str
    array: Array[Any]
    info: ArrayInfo
    direct: DirectArray | None

    @classmethod
    def of(cls, url: str, name: str, array: Array[Any], cache: ChunkCache | None = None) -> StoredArray:
        """Wrap a Zarr array after checking that rows can be read from it.

        Raises
        ------
        DatasetError
            If the array has no axis, or items of variable length.
        """
        if array.ndim == 0:
            raise DatasetError(
                f"array {name!r} of {url} has no axis; the first axis of every array must be the samples"
            )
        dtype = array.dtype
        if dtype.hasobject or dtype.kind in "OT":
            raise DatasetError(
                f"array {name!r} of {url} has items of variable length ({dtype}); use a dtype of fixed size, such as "
                "fixed-length strings or integer codes"
            )
        shard_rows = None if array.shards is None else array.shards[0]
        info = ArrayInfo(dtype, array.shape[1:], array.chunks[0], shard_rows)
        return cls(url, name, array, info, DirectArray.of(array, cache))

    @property
    def batch_nbytes(self) -> int:
        """Bytes of small objects to request in one call; 0 to request them one by one."""
        return int(getattr(self.array.store, "batch_nbytes", 0))

    @property
    def row_nbytes(self) -> int:
        """Bytes of one sample."""
        return self.info.dtype.itemsize * math.prod(self.info.shape)

    @property
    def band_nbytes(self) -> int:
        """Decoded bytes of a band, counting whole chunks even where they extend beyond the array."""
        wide = (math.ceil(size / chunk) * chunk for size, chunk in zip(self._shape[1:], self._chunks[1:], strict=True))
        return self.info.chunk_rows * math.prod(wide) * self.info.dtype.itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Decoded bytes of one chunk."""
        return math.prod(self._chunks) * self.info.dtype.itemsize

    @property
    def chunk_grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(math.ceil(size / chunk) for size, chunk in zip(self._shape, self._chunks, strict=True))

    async def read_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Read rows ``start`` to ``stop`` as a contiguous ``(n_rows, row_nbytes)`` matrix of bytes.

        Raises
        ------
        CorruptChunk
            If a chunk cannot be decoded. The chunks are read again, one at a time, to find out which.
        """
        try:
            answer = await self.array.async_array.getitem((slice(start, stop),))
        except (DatasetError, MemoryError):
            raise
        except Exception as exc:
            await self._blame(start, stop, exc)
        # Arrays from other programs may be stored in Fortran order.
        rows = np.ascontiguousarray(np.asarray(answer), dtype=self.info.dtype)
        return rows.reshape(len(rows), -1).view(np.uint8)

    async def check_chunk(self, index: tuple[int, ...]) -> int:
        """Read and decode one chunk; return its size in bytes, without any part beyond the array's end.

        Raises
        ------
        CorruptChunk
            If the chunk is missing, truncated or fails its checksum.
        """
        box = tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, self._chunks, strict=True))
        try:
            chunk = await self.array.async_array.getitem(box)
        except (DatasetError, MemoryError):
            raise
        except Exception as exc:
            raise self.corrupt(index, exc) from exc
        return int(np.asarray(chunk).nbytes)

    def corrupt(self, index: tuple[int, ...], error: Exception) -> CorruptChunk:
        """Build the error that names a chunk, its store key and its samples."""
        rows = range(self._shape[0])[index[0] * self.info.chunk_rows : (index[0] + 1) * self.info.chunk_rows]
        return CorruptChunk(
            f"chunk {index} of array {self.name!r} of {self.url} (store key {self._key(index)!r}; "
            f"samples {rows[0]} to {rows[-1]}) is missing, truncated or corrupted: "
            f"{type(error).__name__}: {error}"
        )

    def chunks_of(self, start: int, stop: int) -> Iterator[tuple[int, ...]]:
        """Indices of the chunks that hold rows ``start`` to ``stop``."""
        rows = range(start // self.info.chunk_rows, math.ceil(stop / self.info.chunk_rows))
        return itertools.product(rows, *map(range, self.chunk_grid[1:]))

    async def _blame(self, start: int, stop: int, error: Exception) -> NoReturn:
        for index in self.chunks_of(start, stop):
            await self.check_chunk(index)
        raise CorruptChunk(
            f"samples {start} to {stop - 1} of array {self.name!r} of {self.url} could not be read, although each of "
            f"their chunks could be read in a second attempt: {type(error).__name__}: {error}"
        ) from error

    def _key(self, index: tuple[int, ...]) -> str:
        stored = self.array.shards or self._chunks
        outer = tuple(i * chunk // size for i, chunk, size in zip(index, self._chunks, stored, strict=True))
        return f"{self.array.path}/{self.array.metadata.encode_chunk_key(outer)}"

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def _chunks(self) -> tuple[int, ...]:
        return self.array.chunks
