"""Write a dataset, or write one again in random order.

All inputs are checked first, and on local paths an existing dataset is kept until the end.

To shuffle a dataset in bounded memory, it is read once, in its own order, in slabs of whole chunks. Every row goes to a
bucket, a range of positions in the new order, in a file on a local disk. Then the buckets are read one after the other,
and each is put in order in memory. Who goes where is a function (:class:`~dshuffle.planning.randomness.Bijection`), so
no list of positions is kept. The file does not have a name, and vanishes when its process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, BinaryIO

import dask
import dask.base
import numpy as np
import zarr
from dask.utils import parse_bytes
from numpy.typing import NDArray
from zarr.abc.store import Store
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.core.sync import sync
from zarr.errors import UnstableSpecificationWarning

from dshuffle.checks import as_integer, each
from dshuffle.errors import DatasetError, DatasetExists, InvalidParameter
from dshuffle.planning.randomness import Bijection
from dshuffle.private_files import reserve
from dshuffle.store.dataset import Dataset, as_dataset, open_dataset
from dshuffle.store.metadata import new_mark
from dshuffle.store.places import GROUP, Place, canonical_url, is_local, is_memory, open_store, standing_at
from dshuffle.store.reader import ArrayInfo, run_bounded
from dshuffle.store.sources import RowSource, arrow_column, arrow_table, complete, distinct, stream

_CHUNK_NBYTES = 4 << 20
# NumPy arrays are passed to zarr in slabs of this many bytes, enough to write several chunks at a time.
_SLAB_NBYTES = 32 << 20

HINT = (
    'Give an array a name ({"x": array}), make a table of a Series (.to_frame()) or a LazyFrame (.collect()), write '
    "what xarray has with its to_zarr, and open what is stored with open_dataset or dshuffle.store.read_sources."
)


def create_dataset(
    url: str | os.PathLike[str] | None,
    arrays: Any,
    *,
    chunk_rows: int | None = None,
    shard_rows: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Write arrays that share their first axis as a dataset: a Zarr v3 group that any Zarr reader can open.

    On a local path the dataset is written to a temporary folder beside the target and renamed when it is complete. On
    other stores it is written in place and marked as complete at the end. An incomplete dataset cannot be opened.

    Parameters
    ----------
    url
        A local path (including mounted file systems) or a URL: ``file://``, ``s3://bucket/prefix``, ``memory://name``
        (this process only), or any scheme that fsspec knows. If it is None, the dataset is written to a folder in
        Dask's ``temporary-directory`` (by default the system's), which suits workers on this machine. The folder is
        removed when this process has no more references to the dataset and its parts, or ends. Copies in other
        processes do not keep it.
    arrays
        Name -> NumPy or Dask array, or anything that :func:`numpy.asarray` accepts; ``(n_samples, ...)`` of any dtype
        of fixed size. Values are kept; items are made little-endian. Dask arrays are written chunk by chunk by the
        Dask scheduler in use, whose workers must be able to reach the URL. If their chunks have unknown lengths, they
        are computed once and held in memory until they are written. The sources of
        :func:`~dshuffle.store.read_sources` are read in slabs of 32 MiB or one chunk.

        In a DataFrame (pandas, Dask) or an Arrow table (pyarrow, Polars, DuckDB, ...), each column becomes an array.
        Columns with missing values (nulls, NaN, NaT) are refused, as in Parquet files. Arrays may have NaN.
        What xarray has is written with its ``to_zarr``, and opened with :func:`open_dataset`.
    chunk_rows
        Samples in a chunk. By default each array's chunks hold about 4 MiB.
    shard_rows
        Samples in a shard, a multiple of ``chunk_rows``. A shard is one file or object of many chunks, each of which
        can be read separately. By default each chunk is a file or object.
    overwrite
        Replace an existing Zarr group. Nothing else is ever replaced.
    storage_options
        Options of the store, as for :func:`~dshuffle.store.open_dataset`.

    Raises
    ------
    InvalidParameter
        If arrays differ in length or have no samples, or if a name, dtype, ``chunk_rows`` or ``shard_rows`` cannot be
        written. Nothing is written in this case.
    DatasetExists
        If something exists at the URL that may not be replaced.

    Examples
    --------
    >>> arrays = {"x": np.ones((100, 3)), "y": np.arange(100)}
    >>> dataset = create_dataset("memory://doc-create", arrays, overwrite=True)
    >>> dataset.n_samples, dataset.row_nbytes
    (100, 32)
    """
    if url is None:
        place = dask.config.get("temporary-directory", None)
        folder = TemporaryFolder(tempfile.mkdtemp(prefix="dshuffle-", dir=place))
        Finalize(folder, shutil.rmtree, (str(folder), True), exitpriority=0)  # not in a forked process
        url = os.path.join(folder, "dataset.zarr")
        options: Any = {"chunk_rows": chunk_rows, "shard_rows": shard_rows, "storage_options": storage_options}
        return dataclasses.replace(create_dataset(url, arrays, **options), _folder=folder)
    url = canonical_url(url)
    chunk = None if chunk_rows is None else as_integer("chunk_rows", chunk_rows, 1)
    shard = None if shard_rows is None else as_integer("shard_rows", shard_rows, 1)
    if shard is not None and (chunk is None or shard % chunk):
        raise InvalidParameter.of("shard_rows", shard, f"a multiple of chunk_rows ({chunk})", "Give chunk_rows too.")
    kind = standing_at(url, storage_options)  # before anything is computed
    if kind == GROUP and not overwrite:
        raise DatasetExists(f"{url} already exists; replace it with overwrite=True")
    if kind not in ("", GROUP):
        raise DatasetExists(f"{url} is {kind}; only a Zarr group can be replaced, so choose another URL")
    sources = arrays_of(arrays)
    checked = each(sources, lambda name: _checked(name, sources[name]))
    lengths = {name: len(array) for name, array in checked.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        hint = "The first axis of every array must be the samples, at least one."
        raise InvalidParameter.because("arrays", f"their lengths are {lengths}", hint)
    for name, array in checked.items():
        origin = array.origin if isinstance(array, RowSource) and not is_local(url) else "/"
        is_place = os.path.isabs(origin) or origin.partition("://")[0].isalnum()  # a store object may be anywhere
        if (origin + "/").startswith(url + "/") or (kind == GROUP and not is_place):
            # A local dataset is written to a temporary folder. Elsewhere the source would be deleted before it is read.
            allowed = f"another place than the source of array {name!r}, or one where nothing exists"
            raise InvalidParameter.of("url", url, allowed)

    def write(store: Store) -> None:
        group = zarr.create_group(store, overwrite=True, attributes=new_mark(complete=False))
        _write(group, checked, chunk, shard, in_process=is_memory(url))
        group.attrs.update(new_mark(complete=True))

    try:
        # Fixed-length strings and structs do not have a Zarr v3 specification yet. The documentation says so, so do not
        # warn at every write.
        with warnings.catch_warnings(action="ignore", category=UnstableSpecificationWarning):
            if is_local(url):
                _write_beside(os.path.realpath(url), write, overwrite)
            else:
                write(open_store(url, storage_options, read_only=False))
    except DatasetError:
        raise  # raised by the source; some are also OSErrors
    except OSError as exc:
        raise DatasetError(f"cannot write to {url}: {type(exc).__name__}: {exc}") from exc
    return open_dataset(url, storage_options=storage_options)


def _checked(name: object, value: Any) -> Any:
    # Zarr takes a backslash as a slash, so two names could mean one array.
    is_name = isinstance(name, str) and name and not set(name) & set("/\\") and not name.startswith(("__", "."))
    if not is_name or name == "zarr.json":
        allowed = "a string without '/' or '\\' that does not start with '__' or '.'"
        raise InvalidParameter.of("array name", name, allowed)
    label = f"arrays[{name!r}]"
    array = _array_of(label, value)
    if array.ndim == 0:
        raise InvalidParameter.of(f"{label}.shape", (), "(n_samples, ...)")
    # Dtypes of other libraries may have these kinds, too.
    dtype = array.dtype
    if dtype.kind not in "biufcSUmM" or dtype.char in "gG" or dtype.type.__module__ != "numpy":
        hint = "Cast it to numbers or fixed-length strings of NumPy, or store each field of a struct as an array."
        raise InvalidParameter.of(f"{label}.dtype", str(dtype), "a dtype of fixed size that Zarr v3 can store", hint)
    # NumPy arrays are converted while they are written, to avoid copying the whole array.
    return array.astype(dtype.newbyteorder("<")) if _is_lazy(array) else array


def _is_lazy(array: Any) -> bool:
    """Whether something is a Dask array; dask.array takes half a second to load."""
    return hasattr(type(array), "compute_chunk_sizes")


def _write_beside(target: str, write: Callable[[Store], None], overwrite: bool) -> None:
    parent, name = os.path.split(target)
    beside = os.path.join(parent, f".{name}.{uuid.uuid4().hex}")
    try:
        os.makedirs(parent, exist_ok=True)
        write(open_store(beside + ".partial", None, read_only=False))
        if overwrite and standing_at(target, None) == GROUP:
            os.rename(target, beside + ".replaced")
        try:
            os.rename(beside + ".partial", target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.rename(beside + ".replaced", target)
            raise
        shutil.rmtree(beside + ".replaced", ignore_errors=True)
    finally:
        shutil.rmtree(beside + ".partial", ignore_errors=True)


def _write(
    group: zarr.Group, arrays: Mapping[str, Any], chunk: int | None, shard: int | None, *, in_process: bool
) -> None:
    lazy: list[tuple[Any, Any]] = []
    jobs: list[Any] = []
    nbytes = 0

    def write_jobs() -> None:
        """Write slabs concurrently: a table may have hundreds of narrow columns."""
        nonlocal jobs, nbytes
        sync(run_bounded(jobs, 1))
        jobs, nbytes = [], 0

    for name, array in arrays.items():
        dtype, n_rows, across = array.dtype.newbyteorder("<"), len(array), tuple(max(1, n) for n in array.shape[1:])
        row_nbytes, classes = dtype.itemsize * math.prod(array.shape[1:]), getattr(array, "classes", ())
        rows = size = min(chunk or max(1, _CHUNK_NBYTES // max(1, row_nbytes)), n_rows)
        if shard:  # at most as long as the array
            rows = min(shard, math.ceil(n_rows / size) * size) // size * size
        target = group.create_array(
            name,
            shape=array.shape,
            dtype=dtype,
            chunks=(size, *across),
            shards=(rows, *across) if shard else None,
            # Floats hardly compress and re-reading them is the hot path, so rows are stored uncompressed. The checksum
            # turns a flipped bit or a truncated file into an error.
            filters=(),
            serializer=BytesCodec(),
            compressors=(Crc32cCodec(),),
            # Chunks of zeros are written too, so that a missing chunk is known to be lost.
            config={"write_empty_chunks": True},
            attributes={"classes": list(classes)} if classes else None,
        )
        if _is_lazy(array):
            # One Dask block per stored object, so that no two tasks write to the same object.
            lazy.append((array.rechunk({0: rows, **dict.fromkeys(range(1, array.ndim), -1)}), target))
            continue
        slab = max(1, _SLAB_NBYTES // max(1, rows * row_nbytes)) * rows
        for start in range(0, n_rows, slab):
            stop = min(start + slab, n_rows)
            if nbytes + (stop - start) * row_nbytes > _SLAB_NBYTES:  # before more is read
                write_jobs()
            values = array[start:stop].astype(dtype, copy=False)
            jobs.append((0, partial(target.async_array.setitem, slice(start, stop), values)))
            nbytes += values.nbytes
    write_jobs()
    if lazy:
        # A memory store exists in this process only: workers of a cluster would each fill their own.
        with dask.config.set(scheduler="threads") if in_process else contextlib.nullcontext():
            store: Any = importlib.import_module("dask.array").store
            store([array for array, _ in lazy], [target for _, target in lazy], lock=False)


class TemporaryFolder(str):
    """The path of a folder that is removed with this object, or when the process ends."""


# -- What is accepted --------------------------------------------------------------------------------------------------


def arrays_of(data: Any) -> dict[str, Any]:
    """Return the arrays of what :func:`create_dataset` accepts."""
    is_arrow = hasattr(data, "__arrow_c_stream__") and not hasattr(data, "to_frame")  # as a Series has it
    if hasattr(getattr(data, "columns", None), "has_duplicates"):  # of pandas and Dask
        arrays = each(distinct(list(data.columns)), lambda name: _of_series(f"column {name!r}", data[name]))
    elif type(data).__module__.startswith("xarray") or not (is_arrow or isinstance(data, Mapping)):
        raise InvalidParameter.of("arrays", data, "a mapping of at least one name to an array, or a table", HINT)
    else:
        arrays = arrow_table(data) if is_arrow else dict(data)
    if not arrays:
        raise InvalidParameter.because(
            "arrays", f"this {type(data).__name__} has no columns", "Give at least one name."
        )
    # Dask arrays whose chunks have unknown lengths are computed once and together.
    unknown = {n: a for n, a in arrays.items() if _is_lazy(a) and any(math.isnan(s) for s in a.shape)}
    for name, array in zip(unknown, dask.base.persist(*unknown.values()), strict=True):
        arrays[name] = array.compute_chunk_sizes()
    return arrays


def _array_of(label: str, value: Any) -> Any:
    """The NumPy array, Dask array or source of rows that a value is, or that NumPy makes of it."""
    if isinstance(value, RowSource):
        return value
    kind = type(value).__name__
    if isinstance(getattr(value, "_meta", value), np.ma.MaskedArray):
        raise InvalidParameter.because(label, "it is a masked array", "Fill it with .filled().")
    if _is_lazy(value):
        return value
    hint = "Make a NumPy or Dask array of it, in which all samples have the same shape (a sparse one: .toarray())."
    try:
        array = np.asarray(None if isinstance(value, Mapping) else value)  # NumPy makes an array of the names
    except (ValueError, TypeError, RuntimeError) as exc:  # also tensors on a device, of other dtypes, or with gradients
        raise InvalidParameter.because(label, f"NumPy cannot convert this {kind} to an array ({exc})", hint) from exc
    if array.ndim == 0 and array.dtype.hasobject:
        raise InvalidParameter.because(label, f"this {kind} is not an array", hint)
    return array


def _of_series(label: str, series: Any) -> Any:
    """The values of a column, of which none may be missing. Arrow converts those that NumPy does not have."""
    is_numpy = isinstance(series.dtype, np.dtype) and not series.dtype.hasobject
    if not hasattr(series, "to_dask_array"):
        return complete(label, series.to_numpy()) if is_numpy else arrow_column(label, series)
    if not is_numpy:
        hint = "Cast it to a NumPy dtype of numbers (.astype, .cat.codes), or leave it out."
        raise InvalidParameter.because(label, f"its dtype is {series.dtype}", hint)
    return series.to_dask_array().map_blocks(partial(complete, label), dtype=series.dtype)


# -- A copy in random order --------------------------------------------------------------------------------------------

PARTS = 8
"""Parts of the memory budget: rows that are read, sorted by bucket, ordered and written, with room for copies."""

MOST_BUCKETS = 1 << 16
"""With more, the rows of a bucket in a slab would be too few to write them quickly."""


def shuffle_dataset(
    source: Dataset | Place,
    url: str | os.PathLike[str],
    *,
    seed: int = 0,
    chunk_rows: int | None = None,
    shard_rows: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    memory_budget: int | str = "1 GiB",
    temporary: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Dataset:
    """Write a dataset again, with its samples in random order.

    Parameters
    ----------
    source
        A dataset, or the URL of one. It is not changed. Encoded values (scale, offset) are written decoded.
    url
        Where to write, other than the source; as for :func:`create_dataset`. Arrays that cannot be opened
        (:attr:`Dataset.skipped`), attributes and stored shardings are not written.
    seed
        Random seed. The order depends on it and on the number of samples.
    chunk_rows, shard_rows, overwrite, storage_options
        As for :func:`create_dataset`.
    memory_budget
        Bytes of memory to use: an integer, or text such as ``"1 GiB"``. A chunk that is larger than an eighth of it
        takes more, because chunks are read whole.
    temporary
        Folder on a local disk with room for the whole dataset, by default the system's folder for temporary files.
        Nothing is left there whatever happens.
    progress
        Called as ``progress(rows done, all rows, text)``. Every array counts twice: it is read, and written.

    Returns
    -------
    Dataset
        The new dataset.

    Raises
    ------
    InvalidParameter
        If a parameter is not allowed.
    DatasetError
        If the dataset cannot be read or written, or the disk does not have enough room.

    Notes
    -----
    One shuffle on disk makes reading in chunks (the assignment ``chunks``, or another loader that shuffles chunks)
    nearly as good as a random order: Corgi², below.

    References
    ----------
    Livne et al. (2023), "Corgi²: a hybrid offline-online approach to storage-aware data shuffling for SGD". They
    shuffle blocks offline; here all samples are shuffled.

    Examples
    --------
    >>> from dshuffle.store import create_dataset
    >>> _ = create_dataset("memory://doc-sorted", {"x": np.arange(8)}, overwrite=True)
    >>> shuffled = shuffle_dataset("memory://doc-sorted", "memory://doc-shuffled", seed=1, overwrite=True)
    >>> sorted(shuffled.read_rows(np.arange(8))["x"].tolist())
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    opened = as_dataset(source)
    target = canonical_url(url)
    if is_local(target) and os.path.realpath(target) == os.path.realpath(opened.url):
        # The copy may lack arrays, attributes, shardings or samples that the source has.
        raise InvalidParameter.of("url", os.fspath(url), "another place than the source's")
    order = Bijection.of(opened.n_samples, "shuffle dataset", as_integer("seed", seed))
    try:
        part = int(parse_bytes(memory_budget)) // PARTS
    except (ValueError, TypeError):
        part = 0
    if part < 1:
        raise InvalidParameter.of("memory_budget", memory_budget, f'a number of bytes >= {PARTS}, such as "1 GiB"')
    folder = tempfile.gettempdir() if temporary is None else os.fspath(temporary)
    arrays, q, done = opened.arrays, opened.n_samples, 0
    bucket_rows = max(1, part // max(1, *map(_nbytes, arrays.values())), -(-q // MOST_BUCKETS))
    filled = np.zeros(-(-q // bucket_rows), np.int64)  # rows of each bucket so far
    sizes = [q * _nbytes(info) for info in arrays.values()]
    begins = {name: sum(sizes[:number]) for number, name in enumerate(arrays)}

    def say(n_rows: int, text: str) -> None:
        nonlocal done
        done += n_rows
        if progress is not None:
            progress(done, 2 * len(arrays) * q, text)

    def by_bucket(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        buckets = order.forward(ids) // bucket_rows
        sorting = np.argsort(buckets, kind="stable")
        return buckets[sorting], opened.read_rows(ids[sorting], memory_budget=part)

    @functools.cache  # the target has been checked when it is called first
    def spread() -> BinaryIO:
        """Read all rows, and append them to their buckets, in ascending order of their samples."""
        try:
            file: BinaryIO = resources.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
            reserve(file, sum(sizes), folder)
        except OSError as error:
            hint = "Choose another folder (temporary=, --temporary)"
            raise DatasetError(f"the temporary folder {folder!r} cannot hold the dataset: {error}. {hint}") from error
        for buckets, rows in _ahead(by_bucket, opened._slabs(part)):
            distinct, firsts = np.unique(buckets, return_index=True)
            places = (distinct * bucket_rows + filled[distinct]).tolist()
            for name, values in rows.items():
                nbytes, flat = _nbytes(arrays[name]), _bytes(values)
                for place, first, last in zip(places, firsts, [*firsts[1:], len(buckets)], strict=True):
                    file.seek(begins[name] + place * nbytes)
                    file.write(flat[first * nbytes : last * nbytes])
            filled[distinct] += np.diff([*firsts, len(buckets)])
            say(len(buckets) * len(arrays), "rows read")
        opened.check_unchanged()
        return file

    def blocks(name: str) -> Iterator[NDArray[Any]]:
        file = spread()

        def ordered(bucket: int) -> NDArray[Any]:
            first = bucket * bucket_rows
            ids = order.inverse(np.arange(first, min(first + bucket_rows, q)))
            rows = np.empty((len(ids), *arrays[name].shape), arrays[name].dtype)
            file.seek(begins[name] + first * _nbytes(arrays[name]))
            if file.readinto(_bytes(rows)) != rows.nbytes:  # type: ignore[attr-defined]
                raise DatasetError(f"bucket {bucket} of a shuffle is truncated")
            # The bucket has these samples in ascending order.
            places = np.empty(len(ids), np.int64)
            places[np.argsort(ids)] = np.arange(len(ids))
            return rows[places]

        for rows in _ahead(ordered, range(len(filled))):
            say(len(rows), "rows written")
            yield rows

    with contextlib.ExitStack() as resources:
        return create_dataset(
            url,
            {
                name: stream(opened.url, (q, *info.shape), info.dtype, partial(blocks, name))
                for name, info in arrays.items()
            },
            chunk_rows=chunk_rows,
            shard_rows=shard_rows,
            overwrite=overwrite,
            storage_options=storage_options,
        )


def _nbytes(info: ArrayInfo) -> int:
    return info.dtype.itemsize * math.prod(info.shape)


def _bytes(rows: NDArray[Any]) -> memoryview:
    flat: Any = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _ahead(function: Callable[[Any], Any], values: Iterable[Any]) -> Iterator[Any]:
    """The results of a function, of which the next one is computed in a thread while one is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = None
        for value in values:
            coming, previous = thread.submit(function, value), coming
            if previous is not None:
                yield previous.result()
        if coming is not None:
            yield coming.result()
