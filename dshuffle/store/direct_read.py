"""Read chunks without zarr's codec pipeline if their decoded bytes are consecutive rows.

For a chunk of 256 KiB zarr's codec pipeline takes as long as fetching it, and longer for one of 64 KiB. The pipeline
is not needed if chunks span all axes except the first and the codecs turn bytes into bytes. The stored object is then
checked and decompressed here, and its rows are copied directly to their target. All other arrays go through zarr.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zarr import Array
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, default_buffer_prototype

from dshuffle.store.backends.chunk_cache import ChunkCache
from dshuffle.store.chunk_format import ChunkFormat, checked

Bytes = NDArray[np.uint8]
#: Shard -> task that reads the index of this shard; one dictionary per call of the reader.
Indexes = dict[int, "asyncio.Task[NDArray[np.uint64] | None]"]

_ABSENT = np.iinfo(np.uint64).max


@dataclass(frozen=True, slots=True)
class DirectArray:
    """An array whose chunks can be read without zarr's codec pipeline.

    Parameters
    ----------
    array
        The array.
    store
        Store that chunks are fetched from.
    cached
        Whether the store caches answers.
    chunk_format
        How stored bytes become rows.
    chunk_nbytes
        Decoded bytes of a chunk.
    """

    array: Array[Any]
    store: Store
    cached: bool
    chunk_format: ChunkFormat
    chunk_nbytes: int

    @classmethod
    def of(cls, array: Array[Any], cache: ChunkCache | None = None) -> DirectArray | None:
        """Return a direct reader for an array, or ``None`` if only zarr can read it."""
        chunk_format = ChunkFormat.of(array)
        if chunk_format is None:
            return None
        nbytes = math.prod(array.chunks) * array.dtype.itemsize
        return cls(array, cache or array.store, cache is not None, chunk_format, nbytes)

    @property
    def shard_chunks(self) -> int:
        """Number of chunks in a shard; 0 if the array is not sharded."""
        return self.chunk_format.shard_chunks

    @property
    def decompresses(self) -> bool:
        """Whether decoding does more than verify checksums."""
        return any(decoder is not checked for decoder in self.chunk_format.decoders)

    async def fetch(self, chunks: list[int], indexes: Indexes) -> list[Bytes] | None:
        """Fetch the stored bytes of some chunks.

        Parameters
        ----------
        chunks
            Ascending chunk numbers. For a sharded array, consecutive chunks of one shard.
        indexes
            Indexes of the shards read so far in this call of the reader, so that no index is fetched twice.

        Returns
        -------
        list of (nbytes,) uint8 arrays, or None
            ``None`` if a chunk is missing, so that its rows have the fill value.

        Raises
        ------
        ValueError
            If the index of a shard is damaged.
        """
        if self.shard_chunks:
            return await self._fetch_from_shard(chunks[0], chunks[-1] + 1, indexes)
        if len(chunks) == 1:
            stored = [await self._get(chunks[0], None)]
        else:
            requests = [(self._key(chunk), None) for chunk in chunks]
            answers = await self.store.get_partial_values(default_buffer_prototype(), requests)
            stored = [None if answer is None else _bytes(answer) for answer in answers]
        present = [data for data in stored if data is not None]
        return present if len(present) == len(chunks) else None

    async def read_chunk(self, chunk: int) -> Bytes | None:
        """Read and decode one chunk; ``None`` if it is missing."""
        stored = await self.fetch([chunk], {})
        return None if stored is None else self.decode(stored[0])

    async def _fetch_from_shard(self, first: int, last: int, indexes: Indexes) -> list[Bytes] | None:
        shard, first = divmod(first, self.shard_chunks)
        last -= shard * self.shard_chunks
        in_array = math.ceil(self.array.shape[0] / self.array.chunks[0]) - shard * self.shard_chunks
        if first == 0 and last == min(self.shard_chunks, in_array):
            # The whole shard is wanted: one request fetches it with its index.
            data = await self._get(shard, None)
            if data is None:
                return None
            size = self._index_nbytes
            index = self._index(data[:size] if self.chunk_format.index_first else data[-size:])
            places = _places(index[:last])
            return None if places is None else [data[start:stop] for start, stop in places]
        if shard not in indexes:
            indexes[shard] = asyncio.ensure_future(self._fetch_index(shard))
        whole_index = await indexes[shard]
        places = None if whole_index is None else _places(whole_index[first:last])
        if places is None:
            return None
        begin, end = min(start for start, _ in places), max(stop for _, stop in places)
        if end - begin > 2 * sum(stop - start for start, stop in places):
            # Zarr does not guarantee that consecutive chunks are adjacent in the shard.
            return [await self._part(shard, start, stop) for start, stop in places]
        data = await self._part(shard, begin, end)
        return [data[start - begin : stop - begin] for start, stop in places]

    def decode(self, stored: Bytes) -> Bytes:
        """Decode a chunk into the bytes of its rows.

        Decompressors may raise other exceptions too.

        Raises
        ------
        ValueError
            If the bytes fail their checksum, or are too many or too few.
        """
        data: Any = stored
        for decoder in self.chunk_format.decoders:
            data = decoder(data)
        rows = np.frombuffer(data, dtype=np.uint8)
        if rows.size != self.chunk_nbytes:
            raise ValueError(f"the chunk has {rows.size} bytes instead of {self.chunk_nbytes}")
        return rows

    @property
    def _index_nbytes(self) -> int:
        return 16 * self.shard_chunks + 4

    def _index(self, data: Bytes) -> NDArray[np.uint64]:
        if data.size != self._index_nbytes:
            raise ValueError("the shard is too short to contain its index")
        return np.frombuffer(checked(data), dtype="<u8").reshape(self.shard_chunks, 2)

    async def _fetch_index(self, shard: int) -> NDArray[np.uint64] | None:
        size = self._index_nbytes
        first = self.chunk_format.index_first
        data = await self._get(shard, RangeByteRequest(0, size) if first else SuffixByteRequest(size))
        return None if data is None else self._index(data)

    async def _part(self, shard: int, start: int, stop: int) -> Bytes:
        data = await self._get(shard, RangeByteRequest(start, stop))
        if data is None:
            raise ValueError("the shard was deleted after its index was read")
        return data

    async def _get(self, outer: int, byte_range: ByteRequest | None) -> Bytes | None:
        answer = await self.store.get(self._key(outer), default_buffer_prototype(), byte_range)
        return None if answer is None else _bytes(answer)

    def _key(self, outer: int) -> str:
        index = (outer, *[0] * (self.array.ndim - 1))
        return f"{self.array.path}/{self.array.metadata.encode_chunk_key(index)}"


def _bytes(answer: Buffer) -> Bytes:
    return np.asarray(answer.as_array_like()).view(np.uint8)


def _places(entries: NDArray[np.uint64]) -> list[tuple[int, int]] | None:
    """Return the start and end of each chunk in its shard, or ``None`` if a chunk is missing."""
    if (entries == _ABSENT).any():
        return None
    return [(start, start + size) for start, size in entries.tolist()]
