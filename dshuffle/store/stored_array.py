"""One stored array: how its chunks become rows, and which chunk made a read fail."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import google_crc32c
import numpy as np
import zarr
import zarr.core.codec_pipeline
from numcodecs import Zstd
from numcodecs.blosc import Blosc
from numpy.typing import NDArray
from zarr import Array
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.array_spec import ArraySpec

from dshuffle.encodings import Encoding
from dshuffle.errors import CorruptChunk, DatasetError
from dshuffle.store.patient_store import PROTOTYPE, AbsentChunk, PatientStore
from dshuffle.store.sample_arrays import dimensions

Decoder = Callable[[Any], Any]


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
    decoders
        Functions that turn the stored bytes of a chunk into those of its rows; None if only zarr can do that.
    encoding
        How stored numbers become values; None if they are the values.
    """

    url: str
    name: str
    array: Array[Any]
    info: ArrayInfo
    decoders: tuple[Decoder, ...] | None
    axis: int = 0
    encoding: Encoding | None = None

    @classmethod
    def of(
        cls, url: str, name: str, array: Array[Any], *, axis: int = 0, encoding: Encoding | None = None
    ) -> StoredArray:
        """Wrap a Zarr array of items of fixed size."""
        dtype = array.dtype if encoding is None else np.dtype(encoding.dtype)
        shape = array.shape[:axis] + array.shape[axis + 1 :]
        info = ArrayInfo(dtype, shape, array.chunks[axis], None if array.shards is None else array.shards[axis])
        decoders = _decoders(array) if axis == 0 else None
        if decoders is None:
            _fuse(array)
        return cls(url, name, array, info, decoders, axis, encoding)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored numbers."""
        return self.array.dtype

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return self.array.shape[self.axis]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one sample."""
        return self.dtype.itemsize * math.prod(self.info.shape)

    @property
    def band_nbytes(self) -> int:
        """Decoded bytes of a band, counting whole chunks even where they extend beyond the array."""
        sizes = zip(self.array.shape, self.array.chunks, strict=True)
        wide = [math.ceil(size / chunk) * chunk for size, chunk in sizes]
        wide[self.axis] = self.info.chunk_rows
        return math.prod(wide) * self.dtype.itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Decoded bytes of one chunk."""
        return math.prod(self.array.chunks) * self.dtype.itemsize

    @property
    def chunk_grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(math.ceil(size / chunk) for size, chunk in zip(self.array.shape, self.array.chunks, strict=True))

    @property
    def dims(self) -> tuple[str | None, ...]:
        """Names of the dimensions of a sample, as far as they have names."""
        names = dimensions(self.array) or (None,) * len(self.array.shape)
        return names[: self.axis] + names[self.axis + 1 :]

    @property
    def chunks_across(self) -> tuple[int, ...]:
        """Shape of a chunk along the axes of a sample."""
        return self.array.chunks[: self.axis] + self.array.chunks[self.axis + 1 :]

    async def read_rows(self, start: int, stop: int, box: tuple[slice, ...] = ()) -> NDArray[np.uint8]:
        """Read the stored numbers of samples, or of a box of them, as a contiguous matrix of bytes, one a row."""
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
        """Read one chunk with zarr, without any part beyond the array's end."""
        box = tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, self.array.chunks, strict=True))
        with self._named(index):
            return np.asarray(await self.array.async_array.getitem(box))

    def key(self, chunk: int) -> str:
        """Key of the object that holds a chunk of an array that has decoders."""
        return self._key(self._index(chunk))

    async def fetch(self, chunks: list[int]) -> list[Any]:
        """Fetch the stored bytes of one such chunk, or of ascending chunks of a shard; None for absent chunks."""
        with self._named(self._index(chunks[0])):
            if self.array.shards is not None:
                return await self._fetch_from_shard(self.array.shards[0] // self.info.chunk_rows, chunks)
            return [await self._get(chunks[0], None)]

    async def _get(self, chunk: int, byte_range: ByteRequest | None) -> NDArray[np.uint8] | None:
        answer = await self.array.store.get(self.key(chunk), PROTOTYPE, byte_range)
        return None if answer is None else np.asarray(answer.as_array_like()).view(np.uint8)

    async def _fetch_from_shard(self, n_chunks: int, chunks: list[int]) -> list[Any]:
        size = 16 * n_chunks + 4
        at = chunks[0] // n_chunks * n_chunks
        is_whole = len(chunks) == min(n_chunks, self.chunk_grid[0] - at)
        data = await self._get(chunks[0], None if is_whole else SuffixByteRequest(size))
        if data is None:
            return [None] * len(chunks)
        if data.size < size:
            raise ValueError("the shard is too short to contain its index")
        index = checked(data[-size:]).view("<u8").reshape(n_chunks, 2)[np.array(chunks) - at]
        present = index[index[:, 0] != _ABSENT]
        if not present.size:
            return [None] * len(chunks)
        begin, end = int(present[:, 0].min()), int(present.sum(axis=1).max())
        if is_whole:
            begin = 0
        elif end - begin > 2 * int(present[:, 1].sum()):  # what lies between would cost more than requests
            wanted = [None if a == _ABSENT else RangeByteRequest(a, a + n) for a, n in index.tolist()]
            return [None if each is None else await self._get(chunks[0], each) for each in wanted]
        else:
            data = await self._get(chunks[0], RangeByteRequest(begin, end))
            if data is None:
                raise ValueError("the shard was deleted after its index was read")
        return [None if a == _ABSENT else data[a - begin : a - begin + n] for a, n in index.tolist()]

    def decode(self, chunk: int, data: Any) -> NDArray[np.uint8]:
        """Turn the stored bytes of such a chunk, None if it is absent, into a matrix of rows."""
        assert self.decoders is not None
        store = self.array.store
        try:  # a context manager would take 4 µs a chunk
            if data is None:
                if isinstance(store, PatientStore) and store.absent_is_error and not self.array.shards:
                    raise AbsentChunk(f"{self.key(chunk)} is missing from the store")
                data = np.full(math.prod(self.array.chunks), self.array.fill_value or 0, self.dtype).view(np.uint8)
            else:
                for decoder in self.decoders:
                    data = decoder(data)
            rows = np.frombuffer(data, np.uint8)
            if rows.size != self.chunk_nbytes:
                raise ValueError(f"the chunk has {rows.size} bytes instead of {self.chunk_nbytes}")
        except MemoryError:
            raise
        except Exception as exc:  # decompressors have exceptions of their own
            raise self._corrupt(self._index(chunk), exc) from exc
        return rows.reshape(-1, self.row_nbytes)

    @contextlib.contextmanager
    def _named(self, index: tuple[int, ...]) -> Iterator[None]:
        try:
            yield
        except (DatasetError, MemoryError):
            raise
        except Exception as exc:
            raise self._corrupt(index, exc) from exc

    def _corrupt(self, index: tuple[int, ...], error: Exception) -> CorruptChunk:
        """Build the error that names a chunk, its store key and its samples."""
        first = index[self.axis] * self.info.chunk_rows
        rows = range(self.n_samples)[first : first + self.info.chunk_rows]
        return CorruptChunk(
            f"chunk {index} of array {self.name!r} of {self.url} (store key {self._key(index)!r}; "
            f"samples {rows[0]} to {rows[-1]}) is missing, truncated or corrupted: "
            f"{type(error).__name__}: {error}"
        )

    async def _blame(self, start: int, stop: int, error: Exception) -> NoReturn:
        grid = [range(size) for size in self.chunk_grid]
        grid[self.axis] = range(start // self.info.chunk_rows, math.ceil(stop / self.info.chunk_rows))
        for index in itertools.product(*grid):
            await self.read_chunk(index)
        raise CorruptChunk(
            f"samples {start} to {stop - 1} of array {self.name!r} of {self.url} could not be read, although each of "
            f"their chunks could be read in a second attempt: {type(error).__name__}: {error}"
        ) from error

    def _index(self, chunk: int) -> tuple[int, ...]:
        return (chunk, *[0] * len(self.info.shape))

    def _key(self, index: tuple[int, ...]) -> str:
        stored = self.array.shards or self.array.chunks
        outer = tuple(i * chunk // size for i, chunk, size in zip(index, self.array.chunks, stored, strict=True))
        return f"{self.array.path}/{self.array.metadata.encode_chunk_key(outer)}"


def checked(data: Any) -> Any:
    """Return bytes without the CRC-32C at their end, which must be right."""
    stored = np.frombuffer(data, np.uint8)
    if google_crc32c.value(stored[:-4]) != int.from_bytes(stored[-4:], "little"):
        raise ValueError("the checksum does not match the bytes")
    return stored[:-4]


_DECODERS: dict[str, Decoder] = {
    "blosc": Blosc().decode,
    "crc32c": checked,
    "zstd": Zstd().decode,
}
"""What undoes a codec. Decompressors need none of the parameters of compression."""

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_ABSENT = np.iinfo(np.uint64).max
"""Position and length of an absent chunk in the index of a shard."""


def _decoders(array: Array[Any]) -> tuple[Decoder, ...] | None:
    """Return what turns stored chunks of whole rows into rows, for the formats that most datasets have.

    Zarr's own pipeline takes two to five times as long for chunks of 16 to 64 KiB.
    """
    dtype, metadata = array.dtype, array.metadata
    across = array.shape[1:]
    if (
        dtype.kind not in "biufc"
        or not array.size
        or not array.chunks[1:] == (array.shards or array.chunks)[1:] == across
    ):
        return None
    if metadata.zarr_format == 2:
        compressor = metadata.compressor
        if metadata.order != "C" or metadata.filters or getattr(compressor, "codec_id", "zstd") not in _DECODERS:
            return None
        return () if compressor is None else (compressor.decode,)
    codecs: Any = [codec.to_dict() for codec in metadata.codecs]
    if array.shards:
        sharding = codecs[0]["configuration"]
        is_known = (
            list(sharding["index_codecs"]) == [_LITTLE, {"name": "crc32c"}] and sharding["index_location"] == "end"
        )
        if len(codecs) > 1 or not is_known:
            return None
        codecs = sharding["codecs"]
    serializer, *compressors = codecs
    is_little = serializer == _LITTLE or (serializer == {"name": "bytes"} and dtype.itemsize == 1)
    if not is_little or any(each["name"] not in _DECODERS for each in compressors):
        return None
    return tuple(_DECODERS[each["name"]] for each in reversed(compressors))


def _fuse(array: Array[Any]) -> None:
    """Let an array be read by zarr's fused pipeline, where there is one, and the user has chosen none."""
    pipelines: Any = zarr.core.codec_pipeline
    stored, metadata = array.async_array, array.metadata
    if type(stored.codec_pipeline) is pipelines.BatchedCodecPipeline and hasattr(pipelines, "FusedCodecPipeline"):
        spec = ArraySpec(array.shards or array.chunks, metadata.dtype, metadata.fill_value, stored.config, PROTOTYPE)
        pipeline = pipelines.FusedCodecPipeline.from_codecs(stored.codec_pipeline).evolve_from_array_spec(spec)
        object.__setattr__(stored, "codec_pipeline", pipeline)
