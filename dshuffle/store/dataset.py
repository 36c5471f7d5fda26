"""A dataset: a Zarr group of arrays that share their first axis."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import zarr
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import CorruptChunk, DatasetChanged, DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.notebook import html_summary
from dshuffle.records import StoreTraffic
from dshuffle.redaction import hide_secrets
from dshuffle.rows import ByteMatrix, RowLayout
from dshuffle.store import reader
from dshuffle.store.backends import GROUP, canonical_url, open_store, standing_at
from dshuffle.store.backends.chunk_cache import ChunkCache, cache_nbytes
from dshuffle.store.backends.metered import Meter, MeteredStore
from dshuffle.store.identity import MARK, identity_of
from dshuffle.store.stored_array import ArrayInfo, StoredArray
from dshuffle.units import human_bytes, human_count


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dataset:
    """Arrays in a store that share their first axis, from :func:`open_dataset` or :func:`create_dataset`.

    A dataset may be used from several threads at once. Its pickle holds the URL and the storage options, and
    unpickling opens the dataset again.

    Parameters
    ----------
    url
        URL of the dataset; local paths are absolute.
    n_samples
        Length of the first axis.
    arrays
        Name -> dtype, shape of one sample, samples in a chunk.
    layout
        Position of each array in a row.
    identity
        A name of these very data: copies have the same one, and a dataset that was written again has another one. It is
        stored with datasets from :func:`create_dataset`. For any other group it is a digest of its metadata, and of the
        last bytes of a few chunks.
    """

    url: str
    n_samples: int
    arrays: Mapping[str, ArrayInfo]
    layout: RowLayout
    identity: str
    _store: MeteredStore
    _sources: Mapping[str, StoredArray]
    _meter: Meter
    _storage_options: Mapping[str, Any] | None
    _cache: ChunkCache | None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one sample, summed over all arrays."""
        return self.layout.nbytes

    @property
    def read_by(self) -> dict[str, str]:
        """Name -> ``"direct"`` for arrays whose chunks are read without zarr's codec pipeline, else ``"zarr"``.

        An array is read directly if its chunks (inner chunks, if sharded) span all axes except the first, and if its
        only codecs are crc32c, zstd, gzip and blosc.
        """
        return {name: "zarr" if source.direct is None else "direct" for name, source in self._sources.items()}

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """Options of the store, with which it was opened. They may hold secrets."""
        return self._storage_options

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

        Examples
        --------
        >>> from dshuffle.store import create_dataset
        >>> dataset = create_dataset("memory://doc-read", {"x": np.arange(10) ** 2}, overwrite=True)
        >>> dataset.read_rows([7, 2, 7])
        {'x': array([49,  4, 49])}
        """
        samples = self._checked_ids(ids)
        result: dict[str, NDArray[Any]] = {}
        sinks = []
        for name, source in self._sources.items():
            result[name] = np.empty((samples.size, *source.info.shape), source.info.dtype)
            if result[name].size:
                matrix = result[name].reshape(samples.size, -1).view(np.uint8)
                sinks.append(reader.Sink(source, matrix, 0))
        self._read(sinks, samples, np.arange(samples.size), memory_budget)
        return result

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
        ids
            ``(n,)`` integers in ``[0, n_samples)``.
        memory_budget
            Bytes of chunks in flight at a time. A larger chunk is read alone.
        stop
            Called before each read; reading ends once it returns true.

        Raises
        ------
        DatasetError
            If ``stop`` returned true.
        InvalidParameter
            If the matrix does not fit the layout, or a slot or an id does not exist.
        CorruptChunk
            If a chunk is missing, truncated or fails its checksum.
        """
        if not (
            isinstance(rows, np.ndarray)
            and rows.dtype == np.uint8
            and rows.ndim == 2
            and rows.shape[1] == self.row_nbytes
            and rows.flags.c_contiguous
            and rows.flags.writeable
        ):
            found = f"{type(rows).__name__} {getattr(rows, 'dtype', '')} {getattr(rows, 'shape', '')}".strip()
            raise InvalidParameter.because(
                "rows",
                f"it is not a writeable, C-contiguous (capacity, {self.row_nbytes}) uint8 matrix (found {found})",
                "Allocate it with the layout's empty().",
            )
        samples = self._checked_ids(ids)
        places = _checked_indices("slots", slots, len(rows), "slots of rows")
        if places.size != samples.size:
            raise InvalidParameter.of("len(slots)", places.size, f"the number of ids ({samples.size})")
        taken = np.zeros(len(rows), dtype=np.bool_)
        taken[places] = True
        if np.count_nonzero(taken) != places.size:
            raise InvalidParameter.because("slots", "some slots are repeated", "Give distinct slots.")
        fields = self.layout.dtype.fields
        assert fields is not None
        sinks = [reader.Sink(source, rows, fields[name][1]) for name, source in self._sources.items()]
        self._read(sinks, samples, places, memory_budget, stop)

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
            now = identity_of(self._store.bare, zarr.open_group(store=self._store, mode="r"))
        except DatasetError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise DatasetError(f"the dataset at {self.url} cannot be read any more: {text}") from error
        if now != self.identity:
            raise DatasetChanged(
                f"the dataset at {self.url} was written again while it was in use: its identity was {self.identity} "
                f"and is now {now}. Rows of both must not be mixed. Open it again, and make a new Shuffler"
            )

    def _read(
        self,
        sinks: list[reader.Sink],
        ids: NDArray[np.int64],
        slots: NDArray[np.int64],
        memory_budget: int,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        if isinstance(memory_budget, bool) or not isinstance(memory_budget, int) or memory_budget < 1:
            raise InvalidParameter.of("memory_budget", memory_budget, "an integer >= 1 (bytes)")
        start = time.perf_counter()
        try:
            reader.read_rows(sinks, ids, slots, memory_budget=memory_budget, stop=stop)
        except CorruptChunk:
            if self._cache is not None:
                self._cache.forget()
            raise
        self._meter.add(StoreTraffic(delivered_bytes=ids.size * self.row_nbytes, seconds=time.perf_counter() - start))

    def _checked_ids(self, ids: ArrayLike) -> NDArray[np.int64]:
        return _checked_indices("ids", ids, self.n_samples, "samples")

    def __repr__(self) -> str:
        # Storage options may hold secrets and must not appear here.
        arrays = ", ".join(f"{name}: {info.dtype} {info.shape}" for name, info in self.arrays.items())
        return f"<Dataset {hide_secrets(self.url)!r}, {self.n_samples} samples of {self.row_nbytes} bytes ({arrays})>"

    def _repr_html_(self) -> str:
        size = human_bytes(self.n_samples * self.row_nbytes)
        facts = {"samples": human_count(self.n_samples), "bytes per sample": self.row_nbytes, "size": size}
        rows = [(name, info.dtype, info.shape, info.chunk_rows) for name, info in self.arrays.items()]
        headings = ("array", "dtype", "shape of a sample", "rows per chunk")
        return html_summary(f"Dataset {hide_secrets(self.url)}", facts, headings, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        nbytes = None if self._cache is None else self._cache.nbytes
        return _reopen, (self.url, self._storage_options, nbytes)


def open_dataset(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    chunk_cache: int | str | None = None,
) -> Dataset:
    """Open a dataset: any Zarr group (v2 or v3) whose arrays share their first axis.

    The group does not have to come from dshuffle. Its arrays may be chunked in any way, sharded or compressed. In a
    dataset from :func:`create_dataset` a missing chunk is an error. In any other group a missing chunk is read as the
    fill value, as the Zarr specification says.

    Parameters
    ----------
    url
        A local path (including mounted file systems) or a URL: ``file://``, ``s3://bucket/prefix``,
        ``nfs://server/export/path``, ``memory://name`` (this process only), or any scheme that fsspec knows.
    storage_options
        Options of the store. For S3: ``access_key_id``, ``secret_access_key``, ``session_token``, ``region``,
        ``endpoint``, ``skip_signature`` and obstore's other options, or s3fs's names for them (``key``, ``secret``,
        ``endpoint_url``, ``client_kwargs``, ...). Missing options come from ``AWS_ACCESS_KEY_ID``,
        ``AWS_ENDPOINT_URL``, .... The URL of an endpoint without TLS must begin with ``http://``. For other schemes:
        the options of fsspec. For all stores except ``memory://``: ``max_retries`` (7) and ``timeout`` (60 s); see
        ``Patience``.
    chunk_cache
        Bytes (or ``"256 MiB"``) of stored chunks that each process keeps in memory between epochs; by default none.
        It applies to arrays whose chunks span all axes except the first.

    Raises
    ------
    InvalidParameter
        If an option is unknown.
    DatasetNotFound
        If nothing exists at the URL, or something other than a Zarr group.
    DatasetError
        If the store cannot be reached or refuses access, or the group has no arrays, arrays of different lengths, or
        items of variable length.

    Examples
    --------
    >>> from dshuffle.store import create_dataset
    >>> arrays = {"x": np.ones((10, 3), "f4"), "y": np.arange(10)}
    >>> _ = create_dataset("memory://doc-open", arrays, overwrite=True)
    >>> dataset = open_dataset("memory://doc-open")
    >>> dataset
    <Dataset 'memory://doc-open', 10 samples of 20 bytes (x: float32 (3,), y: int64 ())>
    >>> dataset.arrays["x"]
    ArrayInfo(dtype=dtype('<f4'), shape=(3,), chunk_rows=10, shard_rows=None)
    """
    url = canonical_url(url)
    nbytes = cache_nbytes(chunk_cache)
    found = standing_at(url, storage_options)
    if not found:
        hint = " (memory:// URLs exist only in the process that created them)" if url.startswith("memory://") else ""
        raise DatasetNotFound(
            f"no dataset exists at {url}{hint}; create one with create_dataset (dshuffle dataset create)"
        )
    if found != GROUP:
        raise DatasetNotFound(f"{url} is {found}, but a dataset is a Zarr group of arrays")
    meter = Meter()
    store = MeteredStore(open_store(url, storage_options, read_only=True, on_retry=meter.count_retry), meter)
    cache = ChunkCache(store, nbytes, meter) if nbytes else None
    try:
        group = zarr.open_group(store=store, mode="r")
        arrays = dict(sorted(group.arrays()))
        mark = group.attrs.get(MARK)
        identity = identity_of(store.bare, group)
    except DatasetError:
        raise
    except Exception as exc:
        raise DatasetError(f"cannot open the Zarr group at {url}: {type(exc).__name__}: {exc}") from exc
    if isinstance(mark, Mapping):
        if not mark.get("complete"):
            raise DatasetError(f"the dataset at {url} was never finished; create it again with overwrite=True")
        store.absent_is_error = True
    sources = {name: StoredArray.of(url, name, array, cache) for name, array in arrays.items()}
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if not lengths:
        raise DatasetError(f"the Zarr group at {url} has no arrays")
    if len(set(lengths.values())) > 1:
        raise DatasetError(f"the arrays of {url} have different lengths along their first axis: {lengths}")
    n_samples = next(iter(lengths.values()))
    if n_samples == 0:
        raise DatasetError(f"the dataset at {url} has no samples")
    infos = {name: source.info for name, source in sources.items()}
    return Dataset(
        url=url,
        n_samples=n_samples,
        arrays=MappingProxyType(infos),
        layout=RowLayout.of({name: (info.dtype, info.shape) for name, info in infos.items()}),
        identity=identity,
        _store=store,
        _sources=sources,
        _meter=meter,
        _storage_options=storage_options,
        _cache=cache,
    )


def _reopen(url: str, storage_options: Mapping[str, Any] | None, chunk_cache: int | None) -> Dataset:
    return open_dataset(url, storage_options=storage_options, chunk_cache=chunk_cache)


def _checked_indices(name: str, values: ArrayLike, stop: int, what: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidParameter.of(f"{name}.shape", array.shape, "one-dimensional")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype == np.bool_:
        raise InvalidParameter.because(name, "it is a boolean mask, not integers", "Use numpy.flatnonzero(mask).")
    if array.dtype.kind not in "iu":
        raise InvalidParameter.of(f"{name}.dtype", str(array.dtype), "a dtype of integers")
    if array.min() < 0 or array.max() >= stop:
        first = int(np.flatnonzero((array < 0) | (array >= stop))[0])
        raise InvalidParameter.of(
            f"{name}[{first}]",
            int(array[first]),
            f"in [0, {stop}), the range of the {what}",
            "Negative indices are not supported.",
        )
    return array.astype(np.int64, copy=False)
