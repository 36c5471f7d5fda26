"""One stored array: how its chunks become rows, and which chunk made a read fail."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import google_crc32c
import numpy as np
import zarr.core.codec_pipeline
from numcodecs import Zstd
from numcodecs.blosc import Blosc
from numpy.typing import NDArray
from zarr import Array
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.array_spec import ArraySpec

from dshuffle.encodings import Encoding
from dshuffle.errors import CorruptChunk, DatasetError
from dshuffle.store.metadata import dimensions
from dshuffle.store.patient_store import PROTOTYPE, PatientStore

Decoder = Callable[[Any], Any]
T = TypeVar("T")


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
    several chunks side by side if the array is chunked along other axes too. ``decoders`` turn the stored bytes of a
    chunk into those of its rows; they are None if only zarr can do that.
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
        info = ArrayInfo(dtype, shape, array.chunks[axis], array.shards[axis] if array.shards else None)
        decoders = _decoders(array) if axis == 0 else None
        if decoders is None:
            _fuse(array)
        return cls(url, name, array, info, decoders, axis, encoding)

    @property
    def store(self) -> PatientStore:
        """The store of the array."""
        store = self.array.store
        assert isinstance(store, PatientStore)
        return store

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored numbers."""
        return self.array.dtype

    @property
    def row_nbytes(self) -> int:
        """Bytes of one sample."""
        return self.dtype.itemsize * math.prod(self.info.shape)

    @property
    def band_nbytes(self) -> int:
        """Decoded bytes of a band, counting whole chunks even where they extend beyond the array."""
        return self.chunk_nbytes * math.prod(self.chunk_grid) // self.chunk_grid[self.axis]

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
        names = dimensions(self.array) or (None,) * self.array.ndim
        return names[: self.axis] + names[self.axis + 1 :]

    @property
    def chunks_across(self) -> tuple[int, ...]:
        """Shape of a chunk along the axes of a sample."""
        return self.array.chunks[: self.axis] + self.array.chunks[self.axis + 1 :]

    def values(self, rows: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[Any]:
        """The values of rows of bytes, of which each becomes a sample of this shape."""
        stored = rows.reshape(-1).view(self.dtype).reshape(len(rows), *shape)
        return stored if self.encoding is None else self.encoding.decode(stored, self.name)

    async def read_rows(self, start: int, stop: int, box: tuple[slice, ...]) -> NDArray[np.uint8]:
        """Read a box of the stored numbers of samples with zarr, as a contiguous matrix of bytes, one row a sample."""
        answer = await self.read_box((*box[: self.axis], slice(start, stop), *box[self.axis :]))
        # Arrays from other programs may be stored in Fortran order.
        rows = np.ascontiguousarray(np.moveaxis(answer, self.axis, 0), dtype=self.dtype)
        return rows.reshape(len(rows), -1).view(np.uint8)

    async def read_box(self, box: tuple[slice, ...]) -> NDArray[Any]:
        """Read a box of stored numbers with zarr."""
        with self._named(tuple(side.start // chunk for side, chunk in zip(box, self.array.chunks, strict=True)), box):
            return np.asarray(await self.array.async_array.getitem(box))

    def key(self, chunk: int) -> str:
        """Key of the object that holds a chunk of an array that has decoders."""
        return self._key(self._index(chunk))

    async def read_shard(self, chunks: list[int], use: Callable[[list[Any]], None], nbytes: int) -> None:
        """Read ascending chunks of one shard, and use their stored bytes, which make ``nbytes``; None if absent."""
        n_chunks, key = (self.info.shard_rows or 0) // self.info.chunk_rows, self.key(chunks[0])
        size, first = 16 * n_chunks + 4, chunks[0] // n_chunks * n_chunks

        def find(data: Any) -> list[tuple[int, int] | None]:
            """Where the chunks are in a shard that ends with these bytes."""
            with self._named(self._index(chunks[0])):
                if data is None:
                    if self.store.absent_is_error:
                        raise FileNotFoundError(f"{key} is missing from the store")
                    return [None] * len(chunks)
                if len(data) < size:
                    raise ValueError("the shard is too short to contain its index")
                index = checked(data[-size:]).view("<u8").reshape(n_chunks, 2)[np.array(chunks) - first]
                return [None if begin == _ABSENT else (begin, begin + n) for begin, n in index.tolist()]

        def use_all(contents: list[Any]) -> None:
            found, [data] = find(contents[0]), contents
            use([where and memoryview(data)[slice(*where)] for where in found])

        if len(chunks) == min(n_chunks, self.chunk_grid[0] - first):
            return await self.store.read([(key, None)], use_all, nbytes)
        found = await self.store.read([(key, SuffixByteRequest(size))], lambda contents: find(contents[0]))
        present = [where for where in found if where]
        if not present:
            return use(found)
        begin, end = min(a for a, _ in present), max(b for _, b in present)
        asked = [(begin, end)]
        if end - begin > 2 * sum(b - a for a, b in present):  # what lies between would cost more than requests
            asked = present

        def use_present(contents: list[Any]) -> None:
            parts = iter(contents)
            if asked is not present:
                parts = iter([memoryview(contents[0])[a - begin : b - begin] for a, b in present])
            use([where and next(parts) for where in found])

        with self._named(self._index(chunks[0])):
            await self.store.read([(key, RangeByteRequest(a, b)) for a, b in asked], use_present, nbytes)

    def decode(self, chunk: int, data: Any) -> NDArray[np.uint8]:
        """Turn the stored bytes of such a chunk, None if it is absent, into a matrix of rows."""
        assert self.decoders is not None
        try:  # a context manager would take 4 µs a chunk
            if data is None:
                if self.store.absent_is_error and not self.array.shards:
                    raise FileNotFoundError(f"{self.key(chunk)} is missing from the store")
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
    def _named(self, index: tuple[int, ...], box: tuple[slice, ...] | None = None) -> Iterator[None]:
        try:
            yield
        except (DatasetError, MemoryError):
            raise
        except Exception as exc:
            raise self._corrupt(index, exc, box) from exc

    def _corrupt(self, index: tuple[int, ...], error: Exception, box: tuple[slice, ...] | None = None) -> CorruptChunk:
        """Build the error that names a chunk, its store key and its samples, or the samples of a box of chunks."""
        n_rows, chunk_rows = self.array.shape[self.axis], self.info.chunk_rows
        first = index[self.axis] * chunk_rows
        last = min(n_rows, first + chunk_rows if box is None else box[self.axis].stop) - 1
        samples = f"samples {first} to {last}"
        is_one = box is None or all(
            side.stop - side.start <= chunk for side, chunk in zip(box, self.array.chunks, strict=True)
        )
        what = f"chunk {index} of" if is_one else f"one of the chunks with {samples} of"
        where = f" (store key {self._key(index)!r}; {samples})" if is_one else ""
        return CorruptChunk(
            f"{what} array {self.name!r} of {self.url}{where} is missing, truncated or corrupted: "
            f"{type(error).__name__}: {error}"
        )

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


_DECODERS: dict[str, Decoder] = {"blosc": Blosc().decode, "crc32c": checked, "zstd": Zstd().decode}
"""What undoes a codec. Decompressors need none of the parameters of compression."""

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_ABSENT = np.iinfo(np.uint64).max
"""Position and length of an absent chunk in the index of a shard."""


def _decoders(array: Array[Any]) -> tuple[Decoder, ...] | None:
    """Return what turns stored chunks of whole rows into rows, for the formats that most datasets have.

    Zarr's own pipeline takes two to five times as long for chunks of 16 to 64 KiB.
    """
    dtype, metadata, stored = array.dtype, array.metadata, array.shards or array.chunks
    if dtype.kind not in "biufc" or not array.size or not array.chunks[1:] == stored[1:] == array.shape[1:]:
        return None
    if metadata.zarr_format == 2:
        compressor = metadata.compressor
        if metadata.order != "C" or metadata.filters or getattr(compressor, "codec_id", "zstd") not in _DECODERS:
            return None
        return () if compressor is None else (compressor.decode,)
    codecs: Any = [codec.to_dict() for codec in metadata.codecs]
    if array.shards:
        sharding = codecs[0]["configuration"]
        index = list(sharding["index_codecs"]), sharding["index_location"]
        if len(codecs) > 1 or index != ([_LITTLE, {"name": "crc32c"}], "end"):
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
