"""A dataset: arrays of a Zarr group that share a dimension of samples. How it is opened, read, divided and verified.

Shardings are stored with a dataset, in the sub-group ``shards`` beside its arrays. Readers of the dataset ignore it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import zarr
from numpy.typing import ArrayLike, NDArray
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import MemoryStore, StorePath

from dshuffle.checks import as_indices, as_integer, as_ratio
from dshuffle.encodings import Encoding
from dshuffle.errors import (
    CorruptChunk,
    DatasetChanged,
    DatasetError,
    DatasetExists,
    DatasetNotFound,
    DShuffleError,
    InvalidParameter,
)
from dshuffle.records import StoreTraffic
from dshuffle.redaction import hide_secrets
from dshuffle.rows import ByteMatrix, RowLayout
from dshuffle.store import reader
from dshuffle.store.metadata import (
    Opening,
    SampleArrays,
    encoding_of,
    find_arrays,
    identity_of,
    mark_of,
)
from dshuffle.store.places import ARRAY, GROUP, Location, Meter, PatientStore, Place, is_memory
from dshuffle.store.reader import (
    ArrayInfo,
    Offsets,
    StoredArray,
    View,
    earlier_part,
    part_of_groups,
    part_of_strata,
)

logger = logging.getLogger(__name__)

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dataset:
    """Arrays in a store that share a dimension of samples, from :func:`open_dataset` or :func:`create_dataset`.

    A dataset may be used from several threads at once. Its pickle holds the URL and the storage options, and
    unpickling opens the dataset again.

    Parameters
    ----------
    url
        URL of the dataset; local paths are absolute.
    n_samples
        Length of this dimension.
    arrays
        Name -> dtype, shape of one sample, samples in a chunk.
    skipped
        Name -> why an array of the group is not part of the dataset.
    undecoded
        Name -> why the values of an array are numbers, although its attributes speak of times.
    layout
        Position of each array in a row.
    """

    url: str
    n_samples: int
    arrays: Mapping[str, ArrayInfo]
    skipped: Mapping[str, str]
    undecoded: Mapping[str, str]
    layout: RowLayout
    _stored_identity: str
    _store: PatientStore
    _sources: Mapping[str, StoredArray]
    _meter: Meter
    _opening: Opening
    _view: View
    _folder: object | None = None  # a temporary folder lasts as long as the datasets in it

    @property
    def identity(self) -> str:
        """A name for this content: copies have the same one, and a dataset that was written again has another one.

        It is stored with datasets from :func:`create_dataset`. For any other group it is a digest of its metadata, and
        of the last bytes of a few chunks. A part of a dataset has an identity of its own.
        """
        return self._view.identity(self._stored_identity)

    @property
    def is_view(self) -> bool:
        """Whether its samples differ from those of the stored dataset: a part of them, windows, or patches."""
        return not self._view.is_whole

    @property
    def scalars(self) -> list[str]:
        """Names of the arrays with one value for each sample."""
        return [name for name, info in self.arrays.items() if not info.shape]

    @property
    def is_temporary(self) -> bool:
        """Whether it is in a temporary folder that lasts as long as this object, or another one of the same dataset."""
        return self._folder is not None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one sample, summed over all arrays."""
        return self.layout.nbytes

    @property
    def storage_options(self) -> Options | None:
        """Options of the store, with which it was opened. They may hold secrets."""
        return self._opening.location.storage_options

    @property
    def traffic(self) -> StoreTraffic:
        """Traffic of this object so far; subtract two values for the traffic between them."""
        return self._meter.traffic

    def read_rows(self, ids: ArrayLike, *, memory_budget: int = reader.MEMORY_BUDGET) -> dict[str, NDArray[Any]]:
        """Read samples; each chunk that holds any of them is read once.

        Parameters
        ----------
        ids
            ``(n,)`` integers in ``[0, n_samples)``, in any order; they may repeat.
        memory_budget
            Bytes of chunks in flight at a time. A larger chunk is read alone.

        Returns
        -------
        dict
            Name -> array of shape ``(n, *shape of one sample)``.

        Raises
        ------
        InvalidParameter
            If an id is out of range.
        CorruptChunk
            If a chunk is missing, truncated or fails its checksum.
        DatasetError
            If a date or duration is beyond what its dtype can hold.

        Examples
        --------
        >>> from dshuffle.store import create_dataset
        >>> dataset = create_dataset("memory://doc-read", {"x": np.arange(10) ** 2}, overwrite=True)
        >>> dataset.read_rows([7, 2, 7])
        {'x': array([49,  4, 49])}
        """
        samples = as_indices("ids", ids, self.n_samples, "samples")
        rows = {name: np.empty((samples.size, self._nbytes(name)), np.uint8) for name in self._sources}
        self._read(
            {name: (matrix, 0) for name, matrix in rows.items()}, samples, np.arange(samples.size), memory_budget
        )
        return {name: self._sources[name].values(matrix, self.arrays[name].shape) for name, matrix in rows.items()}

    def read_into(
        self,
        rows: ByteMatrix,
        slots: ArrayLike,
        ids: ArrayLike,
        *,
        memory_budget: int = reader.MEMORY_BUDGET,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """Read samples ``ids`` into ``rows[slots]`` of a packed byte matrix; each chunk is read once.

        Memory use beyond ``rows`` stays within the budget. After an error some of ``rows[slots]`` may have been
        written, but nothing writes to them once this method has raised.

        Parameters
        ----------
        rows
            ``(capacity, row_nbytes)`` uint8, contiguous: see :class:`~dshuffle.rows.RowLayout`.
        slots
            ``(n,)`` distinct integers in ``[0, capacity)``.
        ids, memory_budget
            As for :meth:`read_rows`.
        stop
            Called before each read; reading ends with a :class:`DatasetError` once it returns true.
        """
        samples = as_indices("ids", ids, self.n_samples, "samples")
        places = as_indices("slots", slots, len(rows), "slots of rows")
        if rows.shape[1:] != (self.row_nbytes,) or rows.dtype != np.uint8 or not rows.flags.carray:
            raise InvalidParameter.of("rows", rows, "a writeable matrix from the layout's empty()")
        if not len(samples) == len(places) == len(np.unique(places)):
            raise InvalidParameter.of("slots", slots, f"{len(samples)} distinct numbers, one for each id")
        fields = self.layout.dtype.fields
        assert fields is not None
        self._read({name: (rows, fields[name][1]) for name in self._sources}, samples, places, memory_budget, stop)

    def select(self, samples: ArrayLike) -> Dataset:
        """Return a part of the dataset, as a dataset of its own. Nothing is read or copied.

        Parameters
        ----------
        samples
            ``(q,)`` mask, or distinct ids of samples.
        """
        return self._seen_as(self._view.select(samples))

    def split(
        self, fraction: float, *, by: str = "sample", stratify: str | None = None, seed: int = 0
    ) -> tuple[Dataset, Dataset]:
        """Divide the dataset into two parts, for example for training and validation."""
        ratio = as_ratio("fraction", fraction, Fraction(0))
        rng = np.random.default_rng(as_integer("seed", seed, 0))
        if stratify is not None and by != "sample":
            raise InvalidParameter.of("stratify", stratify, f"None with by={by!r}")
        if by == "sample" and (overlapping := self._view.overlapping):
            allowed = f"'chunk', 'time' or the name of an array, without stratify, because {overlapping} overlap"
            raise InvalidParameter.of("by", by, allowed)
        if stratify is not None:
            mask = part_of_strata(self._values("stratify", stratify), ratio, rng)
        elif by == "time":
            mask = earlier_part(self._times(), ratio)
        else:
            samples = np.arange(self.n_samples)
            chunks = self._view.items(samples) // self.arrays[self._widest.name].chunk_rows
            groups = {"sample": samples, "chunk": chunks}.get(by)
            mask = part_of_groups(self._values("by", by) if groups is None else groups, ratio, rng)
        first, second = np.flatnonzero(mask), np.flatnonzero(~mask)
        if not len(first) or not len(second):
            hint = f"With by={by!r}, a part cannot be smaller than one {by}." if by != "sample" else ""
            raise InvalidParameter.of("fraction", fraction, "a fraction that leaves samples in both parts", hint)
        apart = self._view.apart(second, first)
        if not apart.any():
            hint = "Keep larger groups together, or use smaller windows."
            raise InvalidParameter.because("by", "every window of the second part overlaps with the first", hint)
        if not apart.all():
            text = "dshuffle: %d of %d samples are in neither part, because they share rows with the first part"
            logger.warning(text, np.count_nonzero(~apart), self.n_samples)
        return self.select(first), self.select(second[apart])

    def _values(self, parameter: str, name: str) -> NDArray[Any]:
        """An array of one value for each sample, named by a parameter of :meth:`split`."""
        if name not in self.scalars:
            choices = ", ".join([*(("sample", "chunk", "time") if parameter == "by" else ()), *self.scalars])
            raise InvalidParameter.of(parameter, name, f"one of {choices} (arrays of one value for each sample)")
        return self._only([name]).read_rows(np.arange(self.n_samples))[name]

    def _times(self) -> NDArray[Any]:
        """The time of each sample; its place in the stored order if there is no array of times."""
        if "time" not in self.arrays:
            return self._view.items(np.arange(self.n_samples)) // self._view.n_patches
        times = self._values("by", "time")
        if missing := np.count_nonzero(times != times):  # NaN and NaT
            raise InvalidParameter.because(
                "by", f"{missing} of {self.n_samples} samples have no time", "Select the others."
            )
        return times

    def windows(self, offsets: Offsets | Mapping[str, Offsets]) -> Dataset:
        """Make samples of several consecutive rows, such as steps of time. Nothing is read or copied.

        Parameters
        ----------
        offsets
            Distances of the rows of a sample from its anchor, for all arrays or by name: ``(-1, 0, 1)`` gives an array
            an axis of length 3 in front, and ``1`` gives it the next row in its own shape. Arrays that are not named
            keep the row of the anchor.
        """
        return self._seen_as(self._view.windows(offsets, self.arrays))

    def patches(self, /, *, stride: int | None = None, **sizes: int) -> Dataset:
        """Make samples of boxes of rows, such as regions of a map or tiles of an image. Nothing is read or copied.

        Notes
        -----
        A chunk that spans all dimensions of a row is read once for all its patches. Of other chunks, those that patches
        of the same chunks need are read together, so a chunk that patches share with different neighbours is read more
        than once. Workers hold and exchange whole patches: with a stride below the length, bytes in several patches are
        held several times.
        """
        lengths: dict[str, int] = {}
        for source in self._sources.values():
            for name, length in zip(source.dims, source.info.shape, strict=True):
                if name in sizes and (source.dims.count(name) > 1 or lengths.get(name, length) != length):
                    reason = f"array {source.name} has this dimension twice, or in another length than other arrays"
                    raise InvalidParameter.because(name, reason)
                lengths |= {name: length} if name else {}
        return self._seen_as(self._view.patches(sizes, stride, lengths))

    @property
    def _widest(self) -> StoredArray:
        """The array with the widest rows, and among equals with the largest chunks."""
        return max(self._sources.values(), key=lambda source: (source.row_nbytes, source.info.chunk_rows))

    def _slabs(self, nbytes: int) -> Iterator[NDArray[np.int64]]:
        """All samples in ascending order, in pieces of about so many bytes that divide few chunks.

        Slabs begin where chunks of the largest array begin (anchors of windows do), and have at least the samples of
        one. If several chunks of another array, or shards, fit, they begin where these begin.
        """
        view, most = self._view, nbytes // max(1, sum(map(self._nbytes, self._sources)))
        infos = [self.arrays[name] for name in self._sources]
        units = [rows for info in infos for rows in (info.chunk_rows, info.shard_rows or 1) if rows <= most]
        unit = max([self.arrays[self._widest.name].chunk_rows, *units])
        step = max(1, most // unit) * unit
        for begin in range(-view.before, view.n_items, step):
            bounds = np.clip([begin, begin + step], 0, view.n_whole)
            first, last = bounds if view.ids is None else np.searchsorted(view.ids, bounds)
            if first < last:
                yield np.arange(first, last)

    def _only(self, names: Sequence[str]) -> Dataset:
        """The dataset without other arrays, to be read into rows of all arrays."""
        return dataclasses.replace(self, _sources={name: self._sources[name] for name in names})

    def close(self) -> None:
        """Close the files and connections of the store. They are opened again if more is read."""
        self._store.close()

    def _seen_as(self, view: View) -> Dataset:
        sources = self._sources
        infos = {name: view.info(name, source) for name, source in sources.items()}
        items = {name: (source.dtype, infos[name].shape) for name, source in sources.items()}
        encodings = {name: source.encoding for name, source in sources.items() if source.encoding is not None}
        return dataclasses.replace(
            self,
            n_samples=view.n_samples,
            arrays=MappingProxyType(infos),
            layout=RowLayout.of(items, encodings),
            _view=view,
        )

    def check_unchanged(self) -> None:
        """Check that the dataset is still the one that was opened. Call it after a read that must not mix two of them.

        Raises
        ------
        DatasetChanged
            If it has been written again in the meantime.
        DatasetError
            If it cannot be read any more.
        """
        try:
            now = self._opening.identity(self._store.bare)
        except DatasetError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            # It could be read when it was opened.
            raise DatasetError(f"the dataset at {self.url} cannot be read any more: {text}", transient=True) from error
        if now != self._stored_identity:
            raise DatasetChanged(
                f"the dataset at {self.url} was written again while it was in use: its identity was "
                f"{self._stored_identity} and is now {now}. Rows of both must not be mixed. Open it again, and make a "
                "new Shuffler"
            )

    def _nbytes(self, name: str) -> int:
        """Bytes of a sample of an array, as it is stored."""
        return math.prod(self.arrays[name].shape) * self._sources[name].dtype.itemsize

    def _read(
        self,
        targets: Mapping[str, tuple[ByteMatrix, int]],
        ids: NDArray[np.int64],
        slots: NDArray[np.int64],
        memory_budget: int,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        as_integer("memory_budget", memory_budget, 1)
        start, view = time.perf_counter(), self._view
        sinks = [
            reader.Sink(source, *targets[name], view.window(name), view.cut(source))
            for name, source in self._sources.items()
        ]
        reader.read_rows(sinks, view.items(ids), slots, memory_budget=memory_budget, stop=stop)
        nbytes = ids.size * sum(map(self._nbytes, self._sources))
        self._meter.add(StoreTraffic(delivered_bytes=nbytes, seconds=time.perf_counter() - start))

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Say what to do instead: scikit-learn's steps and functions of NumPy call this."""
        hint = (
            'Take rows into memory with dataset.read_rows(ids)["x"], or train with ShuffledSGD(...).fit(dataset), '
            "before which a Pipeline has no other steps."
        )
        raise InvalidParameter.because("a Dataset in place of an array", "its samples are not in memory", hint)

    def __repr__(self) -> str:
        # Storage options may hold secrets and must not appear here.
        arrays = ", ".join(f"{name}: {info.dtype} {info.shape}" for name, info in self.arrays.items())
        left_out = f", without {', '.join(self.skipped)}" if self.skipped else ""
        part = "" if self._view.bits is None else f" of {self._view.n_whole}"
        samples = f"{self.n_samples}{part} samples of {self.row_nbytes} bytes"
        raw = f", not decoded: {', '.join(self.undecoded)}" if self.undecoded else ""
        return f"<Dataset {hide_secrets(self.url)!r}, {samples} ({arrays}){left_out}{raw}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # How arrays are decoded may depend on the packages of the process that opens it first.
        encodings = {name: source.encoding for name, source in self._sources.items()}
        return open_stored, (self._opening, self._view, (encodings, dict(self.undecoded)))


def open_dataset(
    url: Place,
    *,
    arrays: Sequence[str] | None = None,
    sample_dim: str | int | None = None,
    decode: bool = True,
    storage_options: Options | None = None,
) -> Dataset:
    """Open a dataset: any Zarr group (v2 or v3) with arrays that share a dimension of samples.

    The group does not have to come from dshuffle. Its arrays may be chunked in any way, sharded or compressed.

    Parameters
    ----------
    url
        A local path (including mounted file systems) or a URL: ``file://``, ``s3://bucket/prefix``, ``memory://name``
        (this process only), or any scheme that fsspec knows. Or a Zarr store object (of zarr, obstore, icechunk, ...),
        a ``zarr.storage.StorePath`` for a group in it, or a ``zarr.Group``. Workers open a store object from its
        pickle, so it must have one.
    arrays
        Names of arrays, or their paths below the group, such as ``"obsm/X_pca"``. By default all arrays directly below
        the group that have the sample dimension. Others (coordinates of other dimensions, scalars, strings) are left
        out; :attr:`Dataset.skipped` says why.
    sample_dim
        Name of the sample dimension (``dimension_names``, or ``_ARRAY_DIMENSIONS`` as xarray writes it), or its number.
        By default the first dimension of the largest array. It may be any axis of an array.
    decode
        Whether values are decoded by the CF conventions, as xarray does: ``scale_factor``, ``add_offset``,
        ``_FillValue``, ``missing_value`` and times. Workers cache and exchange the stored numbers. Times that cannot be
        decoded stay numbers; a warning in the log and :attr:`Dataset.undecoded` say why.
    storage_options
        Options of the store. For S3: ``access_key_id``, ``secret_access_key``, ``session_token``, ``region``,
        ``endpoint``, ``skip_signature`` and obstore's other options, or s3fs's names for them (``key``, ``secret``,
        ``endpoint_url``, ``anon``, ``requester_pays``). Missing options come from ``AWS_ACCESS_KEY_ID``,
        ``AWS_ENDPOINT_URL``, .... The URL of an endpoint without TLS must begin with ``http://``. For other schemes:
        the options of fsspec. For all stores: ``max_retries`` (7) and ``timeout`` (60 s).

    Raises
    ------
    InvalidParameter
        If an option is unknown, or no array has a name or a dimension that is asked for.
    DatasetNotFound
        If nothing exists at the URL, or something other than a Zarr group.
    DatasetError
        If the store cannot be reached or refuses access, the group has no arrays of samples, or those that are asked
        for cannot be opened together.

    Examples
    --------
    >>> import numpy as np
    >>> from dshuffle.store import create_dataset
    >>> arrays = {"x": np.ones((10, 3), "f4"), "y": np.arange(10)}
    >>> _ = create_dataset("memory://doc-open", arrays, overwrite=True)
    >>> dataset = open_dataset("memory://doc-open")
    >>> dataset
    <Dataset 'memory://doc-open', 10 samples of 20 bytes (x: float32 (3,), y: int64 ())>
    >>> dataset.arrays["x"]
    ArrayInfo(dtype=dtype('<f4'), shape=(3,), chunk_rows=10, shard_rows=None)
    """
    location, names = Location.of(url, storage_options), None
    if arrays is not None:
        names = (arrays,) if isinstance(arrays, str) else tuple(arrays)
        if not names or not all(isinstance(name, str) and name.strip("/") for name in names):
            raise InvalidParameter.of("arrays", arrays, "None, or names of arrays")
        names = tuple(dict.fromkeys(name.strip("/") for name in names))
    if not isinstance(sample_dim, str | None):
        sample_dim = as_integer("sample_dim", sample_dim, 0)
    if not isinstance(decode, bool):
        raise InvalidParameter.of("decode", decode, "True or False")
    return open_stored(Opening(location, names, sample_dim, decode))


def as_dataset(dataset: Dataset | Place) -> Dataset:
    """Open a dataset, unless it is open."""
    if isinstance(dataset, Dataset):
        return dataset
    if not isinstance(dataset, str | os.PathLike | Store | StorePath | zarr.Group):
        raise InvalidParameter.of("dataset", dataset, "a Dataset, or the path, URL or Zarr store of one")
    return open_dataset(dataset)


def blank_dataset(n_samples: int, row_nbytes: int = 1, chunk_rows: int | None = None) -> Dataset:
    """Make a dataset of zeros. It has metadata only: chunks that are not stored are zeros."""
    store = MemoryStore()
    shape, chunks = (n_samples, row_nbytes), (chunk_rows or n_samples, row_nbytes)
    zarr.create_group(store=store).create_array("x", shape=shape, chunks=chunks, dtype="u1", fill_value=0)
    return open_dataset(store)


Decoding = tuple[dict[str, Encoding | None], dict[str, str]]
"""How arrays are decoded, and why others are not: each by name."""


def open_stored(opening: Opening, view: View | None = None, decoding: Decoding | None = None) -> Dataset:
    """Open a dataset as :func:`open_dataset` does, or again as another process has decided."""
    location, url, meter = opening.location, opening.location.url, Meter()
    store, kind = location.open_to_read()
    if not kind:
        hint = "memory:// URLs exist only in the process that created them; " if is_memory(url) else ""
        raise DatasetNotFound(
            f"no dataset exists at {url}; {hint}create one with create_dataset (dshuffle dataset create)"
        )
    if kind != GROUP:
        hint = ". Open the group that has it with arrays=[...], or give dask.array.from_zarr to create_dataset"
        what = f"{kind}, but a dataset is a Zarr group of arrays{hint if kind == ARRAY else ''}"
        raise DatasetNotFound(f"{url} is {what}")
    try:
        group = opening.group(store)
        mark = mark_of(group)
        if not mark.get("complete", True):
            raise DatasetError(
                f"the dataset at {url} was never finished, or is still being written; if nothing writes it, create "
                "it again with overwrite=True"
            )
        chosen = find_arrays(group, opening)
        identity = identity_of(store, group, chosen, opening)
    except DShuffleError:
        raise
    except Exception as exc:
        raise DatasetError(f"cannot open the Zarr group at {url}: {type(exc).__name__}: {exc}") from exc
    store.meter = meter
    store.absent_is_error = bool(mark)
    n_samples = next(chosen.arrays[name].shape[axis] for name, axis in chosen.axes.items())
    if n_samples == 0:
        raise DatasetError(f"the dataset at {url} has no samples")
    encodings, undecoded = decoding or _decoding(chosen, opening)
    sources = {
        name: StoredArray.of(url, name, array, axis=chosen.axes[name], encoding=encodings[name])
        for name, array in chosen.arrays.items()
        if name in encodings  # else it was added after the client opened the dataset
    }
    return Dataset(
        url=url,
        n_samples=n_samples,
        arrays={},
        skipped=MappingProxyType(chosen.skipped),
        undecoded=MappingProxyType(undecoded),
        layout=RowLayout(()),
        _stored_identity=identity,
        _store=store,
        _sources=sources,
        _meter=meter,
        _opening=opening,
        _view=View(n_samples),
    )._seen_as(view or View(n_samples))


def _decoding(chosen: SampleArrays, opening: Opening) -> Decoding:
    """How the numbers of each array become values."""
    found = {name: encoding_of(array) if opening.decode else (None, "") for name, array in chosen.arrays.items()}
    undecoded = {name: reason for name, (_, reason) in found.items() if reason}
    for reason in dict.fromkeys(undecoded.values()):
        names = ", ".join(repr(name) for name, its in undecoded.items() if its == reason)
        logger.warning("Array %s of %s is not decoded: %s", names, hide_secrets(opening.location.url), reason)
    return {name: encoding for name, (encoding, _) in found.items()}, undecoded


class VerifyReport(NamedTuple):
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
    sources, done, nbytes = as_dataset(dataset)._sources.values(), 0, 0
    chunks = [(source, index) for source in sources for index in itertools.product(*map(range, source.chunk_grid))]
    bad: dict[tuple[str, tuple[int, ...]], str] = {}

    async def check(source: StoredArray, index: tuple[int, ...]) -> None:
        nonlocal done, nbytes
        box = tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, source.array.chunks, strict=True))
        try:
            values = await source.read_box(box)
            nbytes += values.nbytes
        except CorruptChunk as exc:
            bad[source.name, index] = str(exc)
        done += 1
        if progress is not None:
            progress(done, len(chunks))

    jobs = ((2 * source.chunk_nbytes, partial(check, source, index)) for source, index in chunks)
    sync(reader.run_bounded(jobs, reader.MEMORY_BUDGET))
    return VerifyReport(len(chunks), nbytes, tuple(bad[chunk] for chunk in sorted(bad)))


# -- Shardings that are stored with a dataset --------------------------------------------------------------------------


def write_sharding(
    dataset: Dataset | Place,
    name: str,
    ranks: ArrayLike,
    *,
    broadcast: ArrayLike = (),
    overwrite: bool = False,
) -> None:
    """Store a first assignment under a name that sessions can refer to.

    Parameters
    ----------
    dataset
        Dataset to store the sharding with. Its arrays are not changed.
    name
        Name of the sharding, a string without ``/`` or ``:`` that does not start with ``.`` or ``__``.
    ranks
        ``(q,)`` integers, the worker of each sample.
    broadcast
        Ascending ids of the samples that every worker trains on.
    overwrite
        Replace an existing sharding of that name.

    Raises
    ------
    InvalidParameter
        If the name is not allowed, or if there is not one rank for each sample.
    DatasetExists
        If a sharding of that name already exists.
    DatasetError
        If the sharding cannot be written.

    Examples
    --------
    >>> from dshuffle.store import create_dataset
    >>> dataset = create_dataset("memory://doc-shards", {"x": np.arange(4)}, overwrite=True)
    >>> write_sharding(dataset, "mine", [1, 0, 1, 0], overwrite=True)
    >>> stored_shardings(dataset)
    ('mine',)
    >>> read_sharding(dataset, "mine")
    array([1, 0, 1, 0], dtype=int32)
    """
    if not isinstance(name, str) or not name or set("/\\:") & set(name) or name.startswith((".", "__")):
        allowed = "a string without '/', '\\' and ':' that does not start with '.' or '__'"
        raise InvalidParameter.of("name", name, allowed)
    dataset = as_dataset(dataset)
    if dataset.is_view:
        hint = "Give the sharding to the session as an array."
        raise InvalidParameter.because("dataset", "its samples are not those of the stored dataset", hint)
    values = np.asarray(ranks, np.int32)
    if values.shape != (dataset.n_samples,):
        raise InvalidParameter.of("ranks.shape", values.shape, f"({dataset.n_samples},), one rank for each sample")
    if not overwrite and name in stored_shardings(dataset):
        raise DatasetExists(f"sharding {name!r} of {dataset.url} already exists; replace it with overwrite=True")
    with _named(f"cannot write sharding {name!r} of {dataset.url}"):
        location = dataset._opening.location
        group = zarr.open_group(store=location.open(read_only=False), path=location.path, mode="r+")
        attributes: dict[str, Any] = {"broadcast": np.asarray(broadcast, np.int64).tolist()}
        # What could not be written is no rank, and is refused when it is read.
        options: Any = {"fill_value": -1, "attributes": attributes, "overwrite": True}
        group.require_group("shards").create_array(name, data=values, **options)


def stored_shardings(dataset: Dataset | Place) -> tuple[str, ...]:
    """Return the names of the shardings stored with a dataset, in ascending order. A part of a dataset has none."""
    dataset = as_dataset(dataset)
    if dataset.is_view:
        return ()
    with _named(f"cannot list the shardings of {dataset.url}"), contextlib.suppress(FileNotFoundError):
        return tuple(sorted(name for name, _ in _shards(dataset).arrays()))
    return ()


def read_sharding(dataset: Dataset | Place, name: str, key: str = "ranks") -> NDArray[Any]:
    """Read the ranks of a stored sharding, ``(q,)`` int32, or with the key ``"broadcast"`` its ascending int64 ids."""
    dataset = as_dataset(dataset)
    if name not in (names := stored_shardings(dataset)):
        raise DatasetError(f"{dataset.url} has no sharding {name!r}; it has {', '.join(names) or 'none'}")
    with _named(f"cannot read sharding {name!r} of {dataset.url}"):
        array: Any = _shards(dataset)[name]
        return array[:] if key == "ranks" else np.array(array.attrs["broadcast"], np.int64)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn errors of zarr and of the store into one that says what cannot be done."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as exc:
        raise DatasetError(f"{what}: {type(exc).__name__}: {exc}") from exc


def _shards(dataset: Dataset) -> zarr.Group:
    """Open the group of the shardings of a dataset."""
    # Consolidated metadata would not list shardings that were added later.
    path = f"{dataset._opening.location.path}/shards"
    return zarr.open_group(store=dataset._store.bare, path=path, mode="r", use_consolidated=False)
