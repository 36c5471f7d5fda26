"""Read rows chunk by chunk. Each chunk is fetched and decoded once, many at a time, within a byte budget.

All I/O runs on zarr's own event loop, whichever thread calls. A separate loop for each call is not faster: 1,250 and
1,300 MB/s for 4 MiB chunks on a local disk, and 470 MB/s for both with 256 KiB. In addition, fsspec's network file
systems are bound to the loop of their first use.

A few rows are copied by NumPy, so that whoever looks at a dataset, or opens a session with it, does not load numba.

The samples of a dataset are a view: the rows of its stored arrays, windows or patches of rows, or some of these.
Windows are samples made of several consecutive rows, such as steps of time. Patches are boxes of a row, such as regions
of a map or tiles of an image. Samples are numbered before the selection. Every row has ``n_patches`` of these numbers:
its items. Patch p of row r is item ``r * n_patches + p``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import zarr.core.codec_pipeline
from numcodecs import Zstd
from numcodecs.blosc import Blosc
from numpy.typing import ArrayLike, NDArray
from zarr import Array
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.array_spec import ArraySpec
from zarr.core.sync import sync

from dshuffle.checks import as_indices, as_integer
from dshuffle.encodings import Encoding
from dshuffle.errors import CorruptChunk, DatasetError, InvalidParameter
from dshuffle.kernels import kernel, worth_a_kernel
from dshuffle.rows import ByteMatrix
from dshuffle.store.metadata import digest_of, dimensions
from dshuffle.store.places import PROTOTYPE, PatientStore

#: Default number of bytes in flight at a time.
MEMORY_BUDGET = 64 << 20

# Consecutive bands are read in one call up to this many bytes, where that helps: the chunks of a shard then come in
# one request, and many small chunks share zarr's cost per call (about 0.3 ms).
_SPAN_NBYTES = 4 << 20
# Largest number of concurrent reads, however small they are.
_MAX_IN_FLIGHT = 64
# Small local files are read together in one thread up to this size.
_FILES_NBYTES = 1 << 20

# Arrays with shorter rows are read together, if they can: those of a table may have hundreds.
_NARROW_NBYTES = 64

Decoder = Callable[[Any], Any]
Indices = NDArray[np.int64]
Job = tuple[int, Callable[[], Awaitable[None]]]


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
    def chunk_nbytes(self) -> int:
        """Decoded bytes of one chunk."""
        return math.prod(self.array.chunks) * self.dtype.itemsize

    @property
    def band_nbytes(self) -> int:
        """Decoded bytes of a band, counting whole chunks even where they extend beyond the array."""
        return self.chunk_nbytes * math.prod(self.chunk_grid) // self.chunk_grid[self.axis]

    @property
    def chunk_grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(math.ceil(size / chunk) for size, chunk in zip(self.array.shape, self.array.chunks, strict=True))

    @property
    def dims(self) -> tuple[str | None, ...]:
        """Names of the dimensions of a sample, as far as they have names."""
        return self._across(dimensions(self.array) or (None,) * self.array.ndim)

    @property
    def chunks_across(self) -> tuple[int, ...]:
        """Shape of a chunk along the axes of a sample."""
        return self._across(self.array.chunks)

    def _across(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return values[: self.axis] + values[self.axis + 1 :]

    def values(self, rows: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[Any]:
        """The values of rows of bytes, of which each becomes a sample of this shape."""
        stored = rows.reshape(-1).view(self.dtype).reshape(len(rows), *shape)
        return stored if self.encoding is None else self.encoding.decode(stored, self.name)

    async def read_box(self, box: tuple[slice, ...]) -> NDArray[Any]:
        """Read a box of stored numbers with zarr."""
        with self._named(box):
            return np.asarray(await self.array.async_array.getitem(box))

    def key(self, chunk: int) -> str:
        """Key of the object that holds a chunk of an array that has decoders."""
        return self._key((chunk, *[0] * len(self.info.shape)))

    async def read_shard(self, chunks: list[int], use: Callable[[list[Any]], None]) -> None:
        """Read ascending chunks of one shard, and use their stored bytes; None if absent."""
        n_chunks, key = (self.info.shard_rows or 0) // self.info.chunk_rows, self.key(chunks[0])
        size = 16 * n_chunks + 4
        [data] = await self.store.read([(key, SuffixByteRequest(size))])
        found: list[tuple[int, int] | None] = [None] * len(chunks)
        with self._named(self._box(chunks[0])):
            if data is not None:
                index = _verified(data[-size:]).view("<i8").reshape(n_chunks, 2)[np.array(chunks) % n_chunks]
                found = [None if begin == -1 else (begin, begin + n) for begin, n in index.tolist()]
        if not (present := [where for where in found if where]):
            return use(found)
        first, last = min(present)[0], max(present)[1]
        # Otherwise what lies between would cost more than requests.
        is_one = last - first <= 2 * sum(end - begin for begin, end in present)

        def use_present(contents: list[Any]) -> None:
            if is_one:
                contents = [memoryview(contents[0])[begin - first : end - first] for begin, end in present]
            parts = iter(contents)
            use([where and next(parts) for where in found])

        asked = [(first, last)] if is_one else present
        await self.store.read([(key, RangeByteRequest(*each)) for each in asked], use_present)

    def decode(self, chunk: int, data: Any) -> NDArray[np.uint8]:
        """Turn the stored bytes of such a chunk, None if it is absent, into a matrix of rows."""
        assert self.decoders is not None
        try:  # a context manager would take 4 µs a chunk
            if data is None:
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
            raise self._corrupt(self._box(chunk), exc) from exc
        return rows.reshape(-1, self.row_nbytes)

    @contextlib.contextmanager
    def _named(self, box: tuple[slice, ...]) -> Iterator[None]:
        try:
            yield
        except (DatasetError, MemoryError):
            raise
        except Exception as exc:
            raise self._corrupt(box, exc) from exc

    def _corrupt(self, box: tuple[slice, ...], error: Exception) -> CorruptChunk:
        """Build the error that names a chunk, its store key and its samples, or the samples of a box of chunks."""
        sides = list(zip(box, self.array.chunks, strict=True))
        index, side = tuple(side.start // chunk for side, chunk in sides), box[self.axis]
        samples = f"samples {side.start} to {min(self.array.shape[self.axis], side.stop) - 1}"
        is_one = all(side.stop - side.start <= chunk for side, chunk in sides)
        what = f"chunk {index} of" if is_one else f"one of the chunks with {samples} of"
        where = f" (store key {self._key(index)!r}; {samples})" if is_one else ""
        return CorruptChunk(
            f"{what} array {self.name!r} of {self.url}{where} is missing, truncated or corrupted: "
            f"{type(error).__name__}: {error}"
        )

    def _box(self, chunk: int) -> tuple[slice, ...]:
        rows = self.info.chunk_rows
        return (slice(chunk * rows, (chunk + 1) * rows), *(slice(0, size) for size in self.array.shape[1:]))

    def _key(self, index: tuple[int, ...]) -> str:
        stored = self.array.shards or self.array.chunks
        outer = tuple(i * chunk // size for i, chunk, size in zip(index, self.array.chunks, stored, strict=True))
        return f"{self.array.path}/{self.array.metadata.encode_chunk_key(outer)}"


def _verified(data: Any) -> Any:
    """Return bytes without the CRC-32C at their end, which must be right."""
    stored = np.frombuffer(data, np.uint8)
    if google_crc32c.value(stored[:-4]) != int.from_bytes(stored[-4:], "little"):
        raise ValueError("the checksum does not match the bytes")
    return stored[:-4]


_DECODERS: dict[str, Decoder] = {"blosc": Blosc().decode, "crc32c": _verified, "zstd": Zstd().decode}
"""What undoes a codec. Decompressors need none of the parameters of compression."""

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def _decoders(array: Array[Any]) -> tuple[Decoder, ...] | None:
    """Return what turns stored chunks of whole rows into rows, for the formats that most datasets have.

    Zarr's own pipeline takes two to five times as long for chunks of 16 to 64 KiB.
    """
    metadata, stored = array.metadata, array.shards or array.chunks
    if array.dtype.kind not in "biufc" or not array.size or not array.chunks[1:] == stored[1:] == array.shape[1:]:
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
    # Items of one byte have no order.
    if _LITTLE | serializer != _LITTLE or any(each["name"] not in _DECODERS for each in compressors):
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


@dataclass(frozen=True)
class Sink:
    """Target of one array's rows in one call: the bytes from ``offset`` in the rows of a contiguous byte matrix.

    A row of the matrix gets the items at the distances ``window`` from a sample, one after the other. Items are stored
    rows, or patches of them, into which ``cut`` divides rows.
    """

    source: StoredArray
    matrix: ByteMatrix
    offset: int
    window: tuple[int, ...]
    cut: Cut

    @property
    def is_narrow(self) -> bool:
        """Whether the array may be read together with others: a column of a table."""
        is_plain = self.source.decoders is not None and not self.source.info.shard_rows
        is_whole = self.cut.n_patches == 1 and self.cut.sizes == self.source.info.shape  # one patch may be a part
        return is_plain and self.window == (0,) and is_whole and self.source.row_nbytes < _NARROW_NBYTES

    def places(self, ids: Indices, slots: Indices) -> tuple[Indices, Indices]:
        """Items in ascending order, and the byte of the matrix at which each begins; ``ids`` are ascending."""
        places = slots * self.matrix.shape[1] + self.offset
        if self.window == (0,):
            return ids, places
        item_nbytes = self.source.dtype.itemsize * self.cut.n_items
        ids = (ids[:, None] + np.array(self.window) * self.cut.n_patches).reshape(-1)
        places = (places[:, None] + np.arange(len(self.window)) * item_nbytes).reshape(-1)
        order = np.argsort(ids)
        return ids[order], places[order]


def read_rows(
    sinks: list[Sink],
    ids: Indices,
    slots: Indices,
    *,
    memory_budget: int,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Copy row ``ids[i]`` of every sink's source to row ``slots[i]`` of its matrix."""
    order = np.argsort(ids)
    ids, slots = ids[order], slots[order]
    span_nbytes = min(_SPAN_NBYTES, memory_budget // 8)
    if worth_a_kernel(ids.size * sum(sink.source.row_nbytes for sink in sinks)):  # the parts may be too small for it
        _ = scatter_kernel.dispatcher

    def jobs() -> Iterator[Job]:
        for group in _groups(sinks, span_nbytes):
            for job in _jobs(group, ids, slots, span_nbytes):
                if stop is not None and stop():
                    raise DatasetError("reading was cancelled: these samples are no longer needed")
                yield job

    sync(run_bounded(jobs(), memory_budget))


async def run_bounded(jobs: Iterable[Job], budget: int) -> None:
    """Run ``(cost, start)`` jobs, as many at a time as the budget allows. A job larger than the budget runs alone.

    After a failure no more jobs start. Running jobs are awaited, because they write to the caller's memory. Then the
    first error is raised.
    """
    running: dict[asyncio.Future[None], int] = {}
    errors: list[BaseException] = []
    ended = asyncio.Event()

    def end(job: asyncio.Future[None]) -> None:
        del running[job]
        ended.set()
        try:
            job.result()
        except BaseException as error:  # also if it was cancelled
            errors.append(error)

    try:
        for cost, start in jobs:
            while running and (len(running) >= _MAX_IN_FLIGHT or sum(running.values()) + cost > budget):
                # asyncio.wait would inspect all running jobs each time one ends.
                ended.clear()
                await ended.wait()
            if errors:
                break
            job = asyncio.ensure_future(start())
            running[job] = cost
            job.add_done_callback(end)
    finally:
        await asyncio.gather(*running, return_exceptions=True)
    if errors:
        raise errors[0]


def _groups(sinks: Iterable[Sink], span_nbytes: int) -> Iterator[list[Sink]]:
    """Group narrow arrays with the same chunks that are side by side in rows, such as the columns of a table."""
    group: list[Sink] = []
    for sink in sorted(sinks, key=lambda sink: sink.offset):
        if group:
            last, source = group[-1], sink.source
            is_next = sink.matrix is last.matrix and sink.offset == last.offset + last.source.row_nbytes
            alike = source.info.chunk_rows == last.source.info.chunk_rows and sink.is_narrow and last.is_narrow
            if not (is_next and alike and len(group) * source.band_nbytes < span_nbytes):
                yield group
                group = []
        group.append(sink)
    yield group


def _jobs(group: list[Sink], ids: Indices, slots: Indices, span_nbytes: int) -> Iterator[Job]:
    sink, source, is_own = group[0], group[0].source, group[0].source.decoders is not None
    if source.row_nbytes == 0:
        return
    ids, places = sink.places(ids, slots)
    chunk_rows, shard_rows = source.info.chunk_rows, source.info.shard_rows
    band_items, nbytes = chunk_rows * sink.cut.n_patches, sum(each.source.band_nbytes for each in group)
    if is_own and not shard_rows:
        span_nbytes = min(_FILES_NBYTES, span_nbytes) if source.store.root else 0
    for bands in spans(ids // band_items, span_nbytes // nbytes, (shard_rows or 0) // chunk_rows, gaps=is_own):
        part = slice(*np.searchsorted(ids, [bands[0] * band_items, (bands[-1] + 1) * band_items]))
        items, starts = ids[part], places[part]
        # The fetched and the decoded bytes are in memory together.
        if is_own:
            yield 2 * len(bands) * nbytes, partial(_read_chunks, group, bands, items, starts)
            continue
        begin, end = bands[0] * chunk_rows, (bands[-1] + 1) * chunk_rows
        for box, which in sink.cut.boxes(items):
            size = (end - begin) * source.dtype.itemsize * math.prod(side.stop - side.start for side in box)
            yield 2 * size, partial(_read_box, sink, begin, end, items[which], starts[which], box)


def spans(bands: Indices, most: int, shard_bands: int = 0, *, gaps: bool = False) -> Iterator[list[int]]:
    """Group the bands of samples, which are ascending, into spans of so many that are read in one call.

    With ``shard_bands`` a span stays within one shard. With ``gaps``, bands without samples may lie within a span.
    """
    span: list[int] = []
    for band in bands[np.diff(bands, prepend=-1) != 0].tolist():
        is_next = span and (gaps or band == span[-1] + 1) and len(span) < most
        if not is_next or (shard_bands and band // shard_bands != span[-1] // shard_bands):
            if span:
                yield span
            span = []
        span.append(band)
    if span:
        yield span


async def _read_box(sink: Sink, begin: int, end: int, ids: Indices, places: Indices, box: tuple[slice, ...]) -> None:
    """Read a box of rows with zarr, and copy items out of it."""
    source, axis = sink.source, sink.source.axis
    answer = await source.read_box((*box[:axis], slice(begin, end), *box[axis:]))
    # Arrays from other programs may be stored in Fortran order.
    rows = np.ascontiguousarray(np.moveaxis(answer, axis, 0), dtype=source.dtype)
    block = rows.reshape(len(rows), -1).view(np.uint8)
    items, target = ids - begin * sink.cut.n_patches, sink.matrix.reshape(-1)
    runs = sink.cut.runs(source.dtype.itemsize, box)
    await asyncio.to_thread(scatter, block, items, target, places, *runs)


async def _read_chunks(group: list[Sink], chunks: list[int], ids: Indices, places: Indices) -> None:
    """Read chunks of all arrays of a group, and copy rows out of them."""
    source, cut, target = group[0].source, group[0].cut, group[0].matrix.reshape(-1)
    band_items, runs = source.info.chunk_rows * cut.n_patches, cut.runs(source.dtype.itemsize)

    def use(contents: list[Any]) -> None:
        remaining = iter(contents)
        bounds = np.searchsorted(ids, np.array([*chunks, chunks[-1] + 1]) * band_items).tolist()
        for chunk, begin, end in zip(chunks, bounds[:-1], bounds[1:], strict=True):
            block, *others = (sink.source.decode(chunk, next(remaining)) for sink in group)
            items, run = ids[begin:end] - chunk * band_items, runs
            if others:  # put them side by side first: their places in a row share cache lines
                columns = [each.view(f"V{each.shape[1]}") for each in (block, *others)]
                wide = np.empty(items.size, [(str(at), column.dtype) for at, column in enumerate(columns)])
                for at, column in enumerate(columns):
                    wide[str(at)] = column[items, 0]
                block, items = wide.view(np.uint8).reshape(items.size, -1), np.arange(items.size)
                run = *runs[:2], block.shape[1]
            scatter(block, items, target, places[begin:end], *run)

    if source.info.shard_rows:
        await source.read_shard(chunks, use)
    else:
        await source.store.read([(sink.source.key(chunk), None) for chunk in chunks for sink in group], use)


def scatter(
    block: NDArray[np.uint8],
    items: Indices,
    target: NDArray[np.uint8],
    places: Indices,
    begins: Indices,
    offsets: Indices,
    nbytes: int,
) -> None:
    """Copy items of the rows of a block to ``target``, from the bytes ``places`` on.

    Every row of the block has ``begins.size`` items: each begins there, and has ``nbytes`` at each of the offsets.
    """
    if worth_a_kernel(items.size * offsets.size * nbytes):
        scatter_kernel(block, items, target, places, begins, offsets, nbytes)
        return
    row, patch = np.divmod(items, begins.size)
    each = (offsets[:, None] + np.arange(nbytes)).reshape(-1)
    target[places[:, None] + np.arange(each.size)] = block[row[:, None], begins[patch][:, None] + each]


@kernel(
    "(u1[:,::1], i8[::1], u1[::1], i8[::1], i8[::1], i8[::1], i8)",
    "(Array(u1, 2, 'C', True), i8[::1], u1[::1], i8[::1], i8[::1], i8[::1], i8)",
)
def scatter_kernel(block, items, target, places, begins, offsets, nbytes):  # type: ignore[no-untyped-def]
    """The same for many rows."""
    # Fancy indexing would first copy the selected rows, and cannot write to a range of bytes of packed rows. The two
    # slices matter: without them the inner loop is not vectorised and is five times slower.
    n_patches = begins.size
    for i in range(items.size):
        source, begin, place = block[items[i] // n_patches], begins[items[i] % n_patches], places[i]
        for offset in offsets:
            run = source[begin + offset : begin + offset + nbytes]
            row = target[place : place + nbytes]
            for b in range(nbytes):
                row[b] = run[b]
            place += nbytes


# -- Views: which rows are samples -------------------------------------------------------------------------------------

Box = tuple[slice, ...]
Mask = NDArray[np.bool_]
Offsets = int | Sequence[int]

ORDER = "Make windows of the whole dataset first, then patches, and parts of them afterwards."


class PatchedDim(NamedTuple):
    """A dimension that is cut into patches of a size, whose beginnings have a distance of ``stride``."""

    name: str
    length: int
    size: int
    stride: int

    @property
    def begins(self) -> Indices:
        """Where the patches begin that lie within the dimension."""
        return np.arange(0, self.length - self.size + 1, self.stride)


@dataclass(frozen=True, eq=False)
class View:
    """The samples of a dataset, as rows of its stored arrays.

    ``offsets`` are the distances of the rows of a sample from its anchor: ``(name, offset or offsets)`` of each array,
    in the order of their names. An array with a single offset keeps the shape of its samples. Patches are numbered as
    if they were the items of an array with the dimensions ``patched``. ``bits`` selects samples, a packed bit for each.
    """

    n_rows: int
    offsets: tuple[tuple[str, int | tuple[int, ...]], ...] = ()
    patched: tuple[PatchedDim, ...] = ()
    bits: NDArray[np.uint8] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the ids, which are 64 times as long as the bits.
        return View, (self.n_rows, self.offsets, self.patched, self.bits)

    def windows(self, offsets: Offsets | Mapping[str, Offsets], names: Iterable[str]) -> View:
        """Samples of several rows, for all arrays or for some by name. The others keep the row of the anchor."""
        names = sorted(names)
        if not isinstance(offsets, Mapping):
            offsets = dict.fromkeys(names, offsets)
        if unknown := offsets.keys() - names:
            raise InvalidParameter.of("offsets", min(unknown), f"one of the arrays {', '.join(names)}")
        view = View(self.n_rows, tuple((name, _offsets(name, offsets.get(name, 0))) for name in names))
        if not self.is_whole or view.n_whole < 1:
            reason = f"no window fits into {self.n_rows} rows" if self.is_whole else f"this is a view already. {ORDER}"
            raise InvalidParameter.because("offsets", reason)
        return view

    def patches(self, sizes: Mapping[str, int], stride: int | None, lengths: Mapping[str, int]) -> View:
        """Boxes of these samples, along dimensions of these lengths."""
        if self.patched or self.bits is not None:
            raise InvalidParameter.because("patches", f"this is a part of a dataset, or has patches already. {ORDER}")
        if (unknown := sizes.keys() - lengths.keys()) or not sizes:
            names = (
                f"the dimensions {', '.join(sorted(lengths))}" if lengths else "dimensions, which have no names here"
            )
            hint = "" if lengths else "Write the arrays with xarray, or with dimension_names."
            raise InvalidParameter.of("patches", sorted(unknown), f"lengths along {names}", hint)
        dims = []
        for name, value in sizes.items():
            size, length = as_integer(name, value, 1), lengths[name]
            step = size if stride is None else as_integer("stride", stride, 1)
            if size > length:
                raise InvalidParameter.of(name, size, f"at most {length}, the length of this dimension")
            dims.append(PatchedDim(name, length, size, step))
        return View(self.n_rows, self.offsets, tuple(dims))

    def select(self, samples: ArrayLike) -> View:
        """Some of the samples: a mask, or distinct ids."""
        array = np.asarray(samples)
        if array.dtype == np.bool_:
            if array.shape != (self.n_samples,):
                raise InvalidParameter.of("samples.shape", array.shape, f"({self.n_samples},) for a mask")
            ids = np.flatnonzero(array)
        else:
            ids = np.unique(as_indices("samples", array, self.n_samples, "samples"))
            if len(ids) < array.size:
                raise InvalidParameter.because("samples", "some ids are repeated", "Select each sample once.")
        if not len(ids):
            raise InvalidParameter.because("samples", "it selects nothing", "Select at least one sample.")
        mask = np.zeros(self.n_whole, np.bool_)
        mask[ids if self.ids is None else self.ids[ids]] = True
        return View(self.n_rows, self.offsets, self.patched, np.packbits(mask))

    @functools.cached_property
    def ids(self) -> Indices | None:
        """Ascending numbers of the samples before the selection; None for all."""
        return None if self.bits is None else np.flatnonzero(np.unpackbits(self.bits, count=self.n_whole))

    @property
    def is_whole(self) -> bool:
        """Whether the samples are all stored rows."""
        return not self.offsets and not self.patched and self.bits is None

    @functools.cached_property
    def n_patches(self) -> int:
        """Number of samples that a row is divided into."""
        return math.prod(len(dim.begins) for dim in self.patched)

    @property
    def n_items(self) -> int:
        """Number of items of all rows."""
        return self.n_rows * self.n_patches

    @property
    def n_whole(self) -> int:
        """Number of samples before the selection."""
        return (self.n_rows - max(self._distances) + min(self._distances)) * self.n_patches

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return self.n_whole if self.ids is None else len(self.ids)

    def identity(self, stored: str) -> str:
        """Identity of the samples, from that of the stored dataset."""
        if self.offsets:
            stored = digest_of(f"{stored}{self.offsets}".encode())
        if self.patched:
            dims = [(dim.name, dim.size, dim.stride) for dim in self.patched]
            stored = digest_of(f"{stored}patches{dims}".encode())
        return stored if self.bits is None else digest_of(stored.encode() + self.bits.tobytes())

    def window(self, name: str) -> tuple[int, ...]:
        """Distances of the rows of an array from the anchor of a sample."""
        own = dict(self.offsets).get(name, 0)
        return (own,) if isinstance(own, int) else own

    @property
    def overlapping(self) -> str:
        """What overlaps, so that single samples cannot be divided; empty if nothing does."""
        if self.offsets:
            return "windows"
        return "patches" if any(dim.stride < dim.size and len(dim.begins) > 1 for dim in self.patched) else ""

    def info(self, name: str, source: StoredArray) -> ArrayInfo:
        """Dtype, shape and chunks of an array, as one of samples."""
        info, own = source.info, dict(self.offsets).get(name, 0)
        shape = self.cut(source).sizes if isinstance(own, int) else (len(own), *self.cut(source).sizes)
        shard_rows = info.shard_rows and info.shard_rows * self.n_patches
        return dataclasses.replace(
            info, shape=shape, chunk_rows=info.chunk_rows * self.n_patches, shard_rows=shard_rows
        )

    def cut(self, source: StoredArray) -> Cut:
        """How the rows of an array are divided."""
        return cut_of(self.patched, source.dims, source.info.shape, source.chunks_across)

    def items(self, samples: Indices) -> Indices:
        """Items of samples, or of the anchors of their windows."""
        return (samples if self.ids is None else self.ids[samples]) + self.before

    def apart(self, samples: Indices, other_samples: Indices) -> Mask:
        """Whether the windows of samples share no row with those of other samples: ``(len(samples),)``."""
        if not self.offsets:
            return np.ones(len(samples), np.bool_)
        anchors, other_anchors = (self.items(ids) // self.n_patches for ids in (samples, other_samples))
        used, shared = np.zeros(self.n_rows, np.bool_), np.zeros(len(anchors), np.bool_)
        distances = {distance for name, _ in self.offsets for distance in self.window(name)}
        for distance in distances:
            used[other_anchors + distance] = True
        for distance in distances:
            shared |= used[anchors + distance]
        return ~shared

    @property
    def before(self) -> int:
        """Items of the rows before the first anchor."""
        return -min(self._distances) * self.n_patches

    @functools.cached_property
    def _distances(self) -> set[int]:
        return {0}.union(*(self.window(name) for name, _ in self.offsets))


def _offsets(name: str, offsets: Offsets) -> int | tuple[int, ...]:
    label = f"offsets[{name!r}]"
    if not isinstance(offsets, Iterable) or getattr(offsets, "ndim", 1) == 0:
        return as_integer(label, offsets)
    own = tuple(as_integer(label, offset) for offset in offsets)
    if not own or len(set(own)) < len(own):
        raise InvalidParameter.of(label, offsets, "an integer, or distinct integers")
    return own


class Cut:
    """The patches of the rows of one array, of the shape ``sizes``; a row that is not divided is one patch."""

    def __init__(
        self,
        patched: tuple[PatchedDim, ...],
        names: tuple[str | None, ...],
        shape: tuple[int, ...],
        chunks: tuple[int, ...],
    ) -> None:
        dims = {dim.name: dim for dim in patched}
        self.sizes = tuple(dims[name].size if name in dims else n for name, n in zip(names, shape, strict=True))
        self.n_items, self.n_patches = math.prod(self.sizes), math.prod(len(dim.begins) for dim in patched)
        # The first item of each patch: (n_patches, len(shape)).
        self._origins = np.zeros((self.n_patches, len(shape)), np.int64)
        grid = dict(zip(dims, np.meshgrid(*(dim.begins for dim in patched), indexing="ij"), strict=True))
        for axis, name in enumerate(names):
            if name in grid:
                self._origins[:, axis] = grid[name].ravel()
        whole, step = np.array(shape, np.int64), np.array(chunks, np.int64)
        first = self._origins // step * step
        last = np.minimum(-(-(self._origins + np.array(self.sizes, np.int64)) // step) * step, whole)
        self._boxes, box_of = np.unique(np.hstack([first, last]), axis=0, return_inverse=True)
        self._box_of = box_of.reshape(-1)
        self._whole = tuple(slice(0, length) for length in shape)

    def boxes(self, items: Indices) -> Iterator[tuple[Box, Indices]]:
        """Boxes of whole chunks, and which of the items have their patches in them."""
        box_of = self._box_of[items % self.n_patches]
        order = np.argsort(box_of, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(box_of[order])) + 1):
            first, last = self._boxes[box_of[group[0]]].reshape(2, -1).tolist()
            yield tuple(map(slice, first, last)), group

    def runs(self, itemsize: int, box: Box | None = None) -> tuple[Indices, Indices, int]:
        """Where the bytes of patches are in a box of a row, or in the whole row: ``begins, offsets, nbytes``.

        Each patch in the box begins at its ``begins``, and consists of ``nbytes`` at each of the offsets from there.
        """
        box = self._whole if box is None else box
        lengths = [side.stop - side.start for side in box]
        strides = [itemsize * math.prod(lengths[axis + 1 :]) for axis in range(len(lengths))]
        inner = len(lengths)  # axes from here on are whole, so they belong to one run
        while inner and self.sizes[inner - 1] == lengths[inner - 1]:
            inner -= 1
        inner = max(0, inner - 1)
        offsets = np.zeros(1, np.int64)
        for size, stride in zip(self.sizes[:inner], strides[:inner], strict=True):
            offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
        origin = np.array([side.start for side in box], np.int64)
        begins = (self._origins - origin) @ np.array(strides, np.int64)
        return begins, offsets, itemsize * math.prod(self.sizes[inner:])


cut_of = functools.lru_cache(maxsize=64)(Cut)


def part_of_groups(groups: NDArray[Any], ratio: Fraction, rng: np.random.Generator) -> Mask:
    """A random part of this size; samples with the same number in ``groups`` stay together."""
    _, numbers, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = rng.permutation(len(sizes))
    # Groups in random order go to the part as long as at least half of each fits.
    chosen = np.zeros(len(sizes), np.bool_)
    chosen[order] = np.cumsum(sizes[order]) - sizes[order] / 2 <= float(ratio * len(groups))
    return chosen[numbers]


def part_of_strata(labels: NDArray[Any], ratio: Fraction, rng: np.random.Generator) -> Mask:
    """A random part of this size, with the same fraction of the samples of every label."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # The part gets evenly spread samples of this order. The random offset makes all samples equally likely.
    places = np.arange(len(labels) + 1) * float(ratio) + rng.random()
    mask = np.zeros(len(labels), np.bool_)
    mask[order] = np.diff(np.floor(places)) > 0
    return mask


def earlier_part(times: NDArray[Any], ratio: Fraction) -> Mask:
    """The earlier samples, about this part. Samples of the same time stay together."""
    size = max(1, round(ratio * len(times)))
    last = np.partition(times, size - 1)[size - 1]
    earlier, up_to_last = times < last, times <= last
    nearer: Mask = min(up_to_last, earlier, key=lambda part: abs(np.count_nonzero(part) - size))
    return nearer
