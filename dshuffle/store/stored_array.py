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

from dshuffle.encodings import Encoding
from dshuffle.errors import CorruptChunk, DatasetError
from dshuffle.store.backends.chunk_cache import ChunkCache
from dshuffle.store.direct_read import DirectArray
from dshuffle.store.sample_arrays import dimensions


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Dtype, sample shape and chunking of an array.

    Parameters
    ----------
    dtype
        Item type of the values.
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

    A **band** is the unit of reading: ``chunk_rows`` consecutive samples across all other axes. It is one chunk, or
    several chunks side by side if the array is chunked along other axes too.

    Parameters
    ----------
    url, name, array
        The array, and where it is.
    info
        What users see of it.
    direct
        Reader of its chunks without zarr's codec pipeline, if that is possible.
    axis
        Axis of the samples.
    encoding
        How stored numbers become values; None if they are the values.
    """

    url: str
    name: str
    array: Array[Any]
    info: ArrayInfo
    direct: DirectArray | None
    axis: int = 0
    encoding: Encoding | None = None

    @classmethod
    def of(
        cls,
        url: str,
        name: str,
        array: Array[Any],
        cache: ChunkCache | None = None,
        *,
        axis: int = 0,
        encoding: Encoding | None = None,
    ) -> StoredArray:
        """Wrap a Zarr array of items of fixed size."""
        dtype = array.dtype if encoding is None else np.dtype(encoding.dtype)
        shape = array.shape[:axis] + array.shape[axis + 1 :]
        info = ArrayInfo(dtype, shape, array.chunks[axis], None if array.shards is None else array.shards[axis])
        return cls(url, name, array, info, DirectArray.of(array, cache) if axis == 0 else None, axis, encoding)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored numbers."""
        return self.array.dtype

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return self.array.shape[self.axis]

    @property
    def batch_nbytes(self) -> int:
        """Bytes of small objects to request in one call; 0 to request them one by one."""
        return int(getattr(self.array.store, "batch_nbytes", 0))

    @property
    def row_nbytes(self) -> int:
        """Bytes of one sample."""
        return self.dtype.itemsize * math.prod(self.info.shape)

    @property
    def band_nbytes(self) -> int:
        """Decoded bytes of a band, counting whole chunks even where they extend beyond the array."""
        sizes = zip(self._shape, self._chunks, strict=True)
        wide = [math.ceil(size / chunk) * chunk for size, chunk in sizes]
        wide[self.axis] = self.info.chunk_rows
        return math.prod(wide) * self.dtype.itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Decoded bytes of one chunk."""
        return math.prod(self._chunks) * self.dtype.itemsize

    @property
    def chunk_grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(math.ceil(size / chunk) for size, chunk in zip(self._shape, self._chunks, strict=True))

    @property
    def dims(self) -> tuple[str | None, ...]:
        """Names of the dimensions of a sample, as far as they have names."""
        names = dimensions(self.array) or (None,) * len(self._shape)
        return names[: self.axis] + names[self.axis + 1 :]

    @property
    def chunks_across(self) -> tuple[int, ...]:
        """Shape of a chunk along the axes of a sample."""
        return self._chunks[: self.axis] + self._chunks[self.axis + 1 :]

    async def read_rows(self, start: int, stop: int, box: tuple[slice, ...] = ()) -> NDArray[np.uint8]:
        """Read the stored numbers of samples, or of a box of them, as a contiguous matrix with the bytes of one a row.

        Raises
        ------
        CorruptChunk
            If a chunk cannot be decoded. The chunks are read again, one at a time, to find out which.
        """
        try:
            across = box or (slice(None),) * len(self.info.shape)
            answer = await self.array.async_array.getitem(
                (*across[: self.axis], slice(start, stop), *across[self.axis :])
            )
        except (DatasetError, MemoryError):
            raise
        except Exception as exc:
            await self._blame(start, stop, exc)
        # Arrays from other programs may be stored in Fortran order.
        rows = np.ascontiguousarray(np.moveaxis(np.asarray(answer), self.axis, 0), dtype=self.dtype)
        return rows.reshape(len(rows), -1).view(np.uint8)

    def values(self, rows: NDArray[np.uint8], shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """The values of rows that :meth:`read_rows` has read: ``(n, *shape of one sample)``, or of another shape."""
        stored = rows.reshape(-1).view(self.dtype).reshape(len(rows), *(self.info.shape if shape is None else shape))
        return stored if self.encoding is None else self.encoding.decode(stored, self.name)

    async def read_chunk(self, index: tuple[int, ...]) -> NDArray[Any]:
        """Read one chunk with zarr, without any part beyond the array's end.

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
        return np.asarray(chunk)

    def corrupt(self, index: tuple[int, ...], error: Exception) -> CorruptChunk:
        """Build the error that names a chunk, its store key and its samples."""
        first = index[self.axis] * self.info.chunk_rows
        rows = range(self.n_samples)[first : first + self.info.chunk_rows]
        return CorruptChunk(
            f"chunk {index} of array {self.name!r} of {self.url} (store key {self._key(index)!r}; "
            f"samples {rows[0]} to {rows[-1]}) is missing, truncated or corrupted: "
            f"{type(error).__name__}: {error}"
        )

    def chunks_of(self, start: int, stop: int) -> Iterator[tuple[int, ...]]:
        """Indices of the chunks that hold rows ``start`` to ``stop``."""
        grid = [range(size) for size in self.chunk_grid]
        grid[self.axis] = range(start // self.info.chunk_rows, math.ceil(stop / self.info.chunk_rows))
        return itertools.product(*grid)

    async def _blame(self, start: int, stop: int, error: Exception) -> NoReturn:
        for index in self.chunks_of(start, stop):
            await self.read_chunk(index)
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
