"""Write a dataset. All inputs are checked first, and on local paths an existing dataset is kept until the end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import tempfile
import time
import uuid
import warnings
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import dask
import dask.array as da
import dask.base
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import Store
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.core.array_spec import ArrayConfigParams
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.errors import UnstableSpecificationWarning
from zarr.storage import MemoryStore, StorePath

from dshuffle.checks import as_integer, each
from dshuffle.errors import DatasetError, DatasetExists, InvalidParameter
from dshuffle.store.dataset import Dataset, open_dataset
from dshuffle.store.metadata import Mark
from dshuffle.store.places import GROUP, canonical_url, is_local, is_memory, open_store, standing_at
from dshuffle.store.reader import run_bounded
from dshuffle.store.sources import module_with_pyarrow
from dshuffle.store.sources.source import RowSource, complete

_CHUNK_NBYTES = 4 << 20
# NumPy arrays are passed to zarr in slabs of this many bytes, enough to write several chunks at a time.
_SLAB_NBYTES = 32 << 20


Slab = tuple[zarr.Array[Any], slice, NDArray[Any]]
"""An array, consecutive rows of it, and their values."""


CONFIG: ArrayConfigParams = {"write_empty_chunks": True}
"""Chunks of zeros are written too, so that a missing chunk is known to be lost."""


class NewArray(NamedTuple):
    """An array to create: rows of a chunk and of a shard, names of dimensions, and of the classes that it numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    shard_rows: int | None = None
    dimensions: tuple[str, ...] | None = None
    classes: tuple[str, ...] = ()

    def create(self, group: zarr.Group, name: str) -> zarr.Array[Any]:
        """Create it without values in a new group, in chunks of rows."""
        across = tuple(max(1, size) for size in self.shape[1:])
        return group.create_array(
            name,
            shape=self.shape,
            dtype=self.dtype,
            chunks=(self.chunk_rows, *across),
            dimension_names=self.dimensions,
            shards=None if self.shard_rows is None else (self.shard_rows, *across),
            # Floats hardly compress and re-reading them is the hot path, so rows are stored uncompressed. The checksum
            # turns a flipped bit or a truncated file into an error.
            filters=(),
            serializer=BytesCodec(),
            compressors=(Crc32cCodec(),),
            config=CONFIG,
            attributes={"classes": list(self.classes)} if self.classes else None,
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
        of fixed size. Values are kept. Zarr v3 does not support big-endian items or padding between the fields of a
        structured dtype, so dtypes are made little-endian and packed. Dask arrays are written chunk by chunk by the
        Dask scheduler in use, whose workers must be able to reach the URL. If their chunks have unknown lengths, they
        are computed once and held in memory until they are written. A
        :class:`~dshuffle.store.sources.source.RowSource` (see :func:`~dshuffle.store.read_sources`) is read in slabs
        of 32 MiB or one chunk.

        In a DataFrame (pandas, Dask) or an Arrow table (pyarrow, Polars, DuckDB, ...), each column becomes an array.
        Columns with missing values (nulls, NaN, NaT) are refused, as in Parquet files. Arrays may have NaN.
        From an ``xarray.Dataset``, all variables with the sample dimension are taken, which is the first dimension of
        the largest variable (``ds.transpose("time", ...)`` chooses another one). :attr:`Dataset.skipped` names the
        others. An ``xarray.DataArray`` with a name becomes an array, and so do its coordinates along its first
        dimension.
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
        if storage_options is not None:
            raise InvalidParameter.because(
                "storage_options", "a dataset without a URL is on a local disk", "Leave it out."
            )
        folder = TemporaryFolder()
        dataset = create_dataset(folder.path("dataset.zarr"), arrays, chunk_rows=chunk_rows, shard_rows=shard_rows)
        return dataclasses.replace(dataset, _folder=folder)
    url = canonical_url(url)
    chunk = None if chunk_rows is None else as_integer("chunk_rows", chunk_rows, 1)
    shard = None if shard_rows is None else as_integer("shard_rows", shard_rows, 1)
    if shard is not None and (chunk is None or shard % chunk):
        allowed = "a multiple of the rows of a chunk" + ("" if chunk is None else f" ({chunk})")
        hint = "Give chunk_rows too." if chunk is None else f"For example {-(-shard // chunk) * chunk}."
        raise InvalidParameter.of("shard_rows", shard, allowed, hint)
    kind = standing_at(url, storage_options)  # before anything is computed
    if kind == GROUP and not overwrite:
        raise DatasetExists(f"{url} already exists; replace it with overwrite=True")
    if kind not in ("", GROUP):
        raise DatasetExists(f"{url} is {kind}; only a Zarr group can be replaced, so choose another URL")
    sources, skipped, dimensions = arrays_of(arrays)
    checked = _checked(sources)
    if structs := [name for name, array in checked.items() if array.dtype.fields and shard is not None]:
        hint = "Leave shard_rows out, or store the fields as arrays of their own."
        raise InvalidParameter.because("shard_rows", f"zarr cannot shard structs such as array {structs[0]!r}", hint)
    new = {name: _new_array(array, chunk, shard, dimensions.get(name)) for name, array in checked.items()}
    with _unstable_dtypes_allowed(), _named(url):
        if is_local(url):
            _write_beside(os.path.realpath(url), checked, new, overwrite)
        else:
            _refuse_own_source(url, checked, kind == GROUP)
            store = open_store(url, storage_options, read_only=False)
            _write(store, checked, new, in_process=is_memory(url))
    return dataclasses.replace(open_dataset(url, storage_options=storage_options), skipped=MappingProxyType(skipped))


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    try:
        yield
    except DatasetError:
        raise  # raised by the source; some are also OSErrors
    except OSError as exc:
        raise DatasetError(f"cannot write to {url}: {type(exc).__name__}: {exc}") from exc


def _new_array(values: Any, chunk: int | None, shard: int | None, dimensions: tuple[str, ...] | None) -> NewArray:
    """The array for these values. Chunks and shards are at most as long as it is."""
    dtype, n_samples = _packed_little_endian(values.dtype), len(values)
    row_nbytes = dtype.itemsize * math.prod(values.shape[1:])
    chunk = min(chunk or max(1, _CHUNK_NBYTES // max(1, row_nbytes)), n_samples)
    shard = shard and min(shard, math.ceil(n_samples / chunk) * chunk) // chunk * chunk
    return NewArray(values.shape, dtype, chunk, shard, dimensions, getattr(values, "classes", ()))


def _checked(arrays: Mapping[str, Any]) -> dict[str, Any]:
    checked = each(arrays, lambda name: _checked_array(name, arrays[name]))
    lengths = {name: len(array) for name, array in checked.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidParameter.because(
            "arrays", f"their lengths differ: {lengths}", "The first axis of every array must be the samples."
        )
    if 0 in lengths.values():
        raise InvalidParameter.because("arrays", f"their lengths are {lengths}", "Give at least one sample.")
    return checked


def _checked_array(name: object, value: Any) -> Any:
    # Zarr takes a backslash as a slash, so two names could mean one array.
    if (
        not isinstance(name, str)
        or not name
        or set(name) & set("/\\")
        or name.startswith(("__", "."))
        or name == "zarr.json"
    ):
        allowed = "a string without '/' or '\\' that does not start with '__' or '.'"
        raise InvalidParameter.of("array name", name, allowed, "Rename it." if isinstance(name, str) else "")
    label = f"arrays[{name!r}]"
    value = array_of(label, value)
    if value.ndim == 0:
        raise InvalidParameter.of(f"{label}.shape", (), "(n_samples, ...)")
    dtype = _storable(f"{label}.dtype", value.dtype)
    # NumPy arrays are converted while they are written, to avoid copying the whole array.
    return value.astype(dtype) if isinstance(value, da.Array) and value.dtype != dtype else value


def _storable(label: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which Zarr v3 stores a NumPy dtype, after a trial: Zarr may store some dtypes wrongly."""
    hint = "Cast it to numbers or fixed-length strings of NumPy, or store each array field of a struct as an array."
    # New dtypes, such as those of other libraries, have no byte order.
    if dtype.hasobject or dtype.kind in "OT" or dtype.type.__module__ != "numpy" or not _is_kept(dtype):
        raise InvalidParameter.of(label, str(dtype), "a dtype of fixed size that Zarr v3 can store", hint)
    return _packed_little_endian(dtype)


@functools.cache
def _is_kept(dtype: np.dtype[Any]) -> bool:
    """Whether Zarr keeps items of a dtype."""
    ones = np.ones(1, _packed_little_endian(dtype))
    try:
        with _unstable_dtypes_allowed():
            trial = NewArray((1,), ones.dtype, 1).create(zarr.create_group(MemoryStore()), "trial")
            trial[:] = ones
            return bool(trial.dtype == ones.dtype and np.array_equal(trial[:], ones))
    except Exception:  # whatever Zarr says of it
        return False


def _packed_little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.fields is None:
        return dtype.newbyteorder("<")
    fields = [(name, dtype.fields[name][0]) for name in dtype.names or ()]
    return np.dtype([(name, _packed_little_endian(item.base), item.shape) for name, item in fields])


def _refuse_own_source(url: str, arrays: Mapping[str, Any], replaces: bool) -> None:
    # A local dataset is written to a temporary folder. On other stores the source would be deleted before it is read.
    for name, source in arrays.items():
        hint = "Write the dataset to another URL."
        if not isinstance(source, RowSource):
            continue
        if (source.origin + "/").startswith(url + "/"):
            raise InvalidParameter.of("url", url, f"different from the source of array {name!r}", hint)
        if replaces and not source.has_url:
            allowed = f"a URL where nothing exists, as array {name!r} is read from a store object that may be there"
            raise InvalidParameter.of("url", url, allowed, hint)


def _write_beside(target: str, arrays: Mapping[str, Any], new: Mapping[str, NewArray], overwrite: bool) -> None:
    parent, name = os.path.split(target)
    beside = os.path.join(parent, f".{name}.{uuid.uuid4().hex}")
    try:
        os.makedirs(parent, exist_ok=True)
        _write(open_store(beside + ".partial", None, read_only=False), arrays, new, in_process=False)
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
        _remove(beside + ".partial")


def _remove(folder: str) -> None:
    """Remove a folder into which threads of Zarr may still write, after an error or Ctrl-C."""
    deadline = time.monotonic() + 5
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


def _write(store: Store, arrays: Mapping[str, Any], new: Mapping[str, NewArray], *, in_process: bool) -> None:
    group = zarr.create_group(store, overwrite=True, attributes=Mark(complete=False).attributes())
    created = create_arrays(group, new)
    lazy: list[tuple[da.Array, Any]] = []
    slabs: list[Slab] = []
    nbytes = 0
    for name, array in arrays.items():
        target = created[name]
        rows = (target.shards or target.chunks)[0]
        if isinstance(array, da.Array):
            # One Dask block per stored object, so that no two tasks write to the same object.
            lazy.append((array.rechunk({0: rows, **dict.fromkeys(range(1, array.ndim), -1)}), target))
            continue
        row_nbytes = target.dtype.itemsize * math.prod(array.shape[1:])
        slab = max(1, _SLAB_NBYTES // max(1, rows * row_nbytes)) * rows
        for start in range(0, len(array), slab):
            stop = min(start + slab, len(array))
            if nbytes + (stop - start) * row_nbytes > _SLAB_NBYTES:  # before more is read
                write_slabs(slabs)
                slabs, nbytes = [], 0
            slabs.append((target, slice(start, stop), array[start:stop].astype(target.dtype, copy=False)))
            nbytes += (stop - start) * row_nbytes
    write_slabs(slabs)
    if lazy:
        # A memory store exists in this process only: workers of a cluster would each fill their own.
        with dask.config.set(scheduler="threads") if in_process else contextlib.nullcontext():
            da.store([array for array, _ in lazy], [target for _, target in lazy], lock=False)
    group.attrs.update(Mark.of_new_dataset().attributes())


def create_arrays(group: zarr.Group, arrays: Mapping[str, NewArray]) -> dict[str, zarr.Array[Any]]:
    """Create arrays without values in a new group at the root of its store.

    Zarr takes milliseconds for each. So it makes the first array of a kind, and others of this kind, such as the
    columns of a table, get copies of its metadata document.
    """
    firsts: dict[NewArray, zarr.Array[Any]] = {}
    created = {
        name: firsts[array] if array in firsts else firsts.setdefault(array, array.create(group, name))
        for name, array in arrays.items()
    }

    async def copy(name: str, first: zarr.Array[Any]) -> None:
        for key, document in first.metadata.to_buffer_dict(default_buffer_prototype()).items():
            await group.store.set(f"{name}/{key}", document)
        created[name] = type(first)(zarr.AsyncArray(first.metadata, StorePath(group.store, name), CONFIG))

    copies = [(name, first) for name, first in created.items() if first.path != name]
    sync(run_bounded(((0, partial(copy, *each)) for each in copies), 1))
    return created


def write_slabs(slabs: Iterable[Slab]) -> None:
    """Write slabs concurrently: a table may have hundreds of narrow columns."""
    sync(run_bounded(((0, partial(target.async_array.setitem, rows, values)) for target, rows, values in slabs), 1))


@contextlib.contextmanager
def _unstable_dtypes_allowed() -> Iterator[None]:
    # Fixed-length strings and structs do not have a Zarr v3 specification yet. The documentation says so, so do not
    # warn at every write.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnstableSpecificationWarning)
        yield


class TemporaryFolder:
    """A folder that is removed with this object, or when the process ends."""

    def __init__(self) -> None:
        place = dask.config.get("temporary-directory", None) or tempfile.gettempdir()
        try:
            self._folder = tempfile.mkdtemp(prefix="dshuffle-", dir=place)
        except OSError as error:
            raise DatasetError(f"a temporary folder cannot be made in {place}: {error}") from error
        weakref.finalize(self, remove_if_mine, self._folder, os.getpid())

    def path(self, name: str) -> str:
        """Path of something in the folder."""
        return os.path.join(self._folder, name)


def remove_if_mine(folder: str, process: int) -> None:
    """Remove a folder of a process, unless this is another process that was forked from it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


Arrays = tuple[dict[str, Any], dict[str, str], dict[str, tuple[str, ...]]]
"""Name -> array, name -> why something is not one of the arrays, and name -> dimensions, if they have names."""

HINT = (
    'Give an array a name ({"x": array}), make a table of a Series (.to_frame()) or a LazyFrame (.collect()), and open '
    "what is stored with open_dataset or dshuffle.store.read_sources."
)


def arrays_of(data: Any) -> Arrays:
    """Return the arrays of what :func:`~dshuffle.store.create_dataset` accepts."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(data).__mro__}
    skipped: dict[str, str] = {}
    dimensions: dict[str, tuple[str, ...]] = {}
    arrays: dict[str, Any]
    if "xarray" in libraries:
        arrays, skipped, dimensions = _of_xarray(data)
    elif libraries & {"pandas", "dask", "dask_expr"} and hasattr(getattr(data, "columns", None), "has_duplicates"):
        if data.columns.has_duplicates:
            raise InvalidParameter.of("columns", list(data.columns), "distinct")
        arrays = each(data.columns, lambda name: _of_series(f"column {name!r}", data[name]))
        if "pandas" in libraries:
            skipped = {str(n): "it is the index; reset_index() makes it a column" for n in data.index.names if n}
    elif hasattr(data, "__arrow_c_stream__") and not hasattr(data, "to_frame"):  # as a Series has it
        arrays = module_with_pyarrow().table_arrays(data)
    elif isinstance(data, Mapping) and data:
        arrays = dict(data)
    else:
        raise InvalidParameter.of(
            "arrays", data, "a mapping of at least one name to an array, a table or an xarray.Dataset", HINT
        )
    if not arrays and "xarray" not in libraries:
        raise InvalidParameter.because("arrays", f"this {type(data).__name__} has no columns", "Give at least one.")
    # Dask arrays whose chunks have unknown lengths are computed once and together.
    unknown = {n: a for n, a in arrays.items() if isinstance(a, da.Array) and any(math.isnan(s) for s in a.shape)}
    for name, array in zip(unknown, dask.base.persist(*unknown.values()), strict=True):
        arrays[name] = array.compute_chunk_sizes()
    return arrays, skipped, dimensions


def array_of(label: str, value: Any) -> Any:
    """The NumPy array, Dask array or source of rows that a value is, or that NumPy makes of it."""
    if isinstance(value, RowSource):
        return value
    kind, is_lazy = type(value).__name__, isinstance(value, da.Array)
    parts = [value._meta] if is_lazy else [value, *value] if isinstance(value, list | tuple) else [value]
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        raise InvalidParameter.because(label, "it is a masked array", "Fill it with .filled() or dask.array.ma.filled.")
    if is_lazy:
        if not isinstance(value._meta, np.ndarray):
            blocks = f"{type(value._meta).__module__}.{type(value._meta).__name__}"
            hint = "Convert its blocks to NumPy arrays with .map_blocks()."
            raise InvalidParameter.because(label, f"the blocks of this Dask array are of type {blocks}", hint)
        return value
    if isinstance(value, Mapping):  # such as a group of h5py, of which NumPy makes an array of names
        raise InvalidParameter.because(label, f"this {kind} is not an array", "Give each of its arrays a name.")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as exc:  # also tensors on a device, of other dtypes, or with gradients
        hint = "Convert it to an array of NumPy, in which all samples have the same shape."
        raise InvalidParameter.because(label, f"NumPy cannot convert this {kind} to an array ({exc})", hint) from exc
    if array.ndim == 0 and array.dtype.hasobject:
        if isinstance(getattr(value, "nnz", None), int | np.integer):
            raise InvalidParameter.because(label, f"it is sparse ({kind})", "Make it dense with .toarray().")
        hint = "Make a list, a dense NumPy array or a Dask array of it."
        raise InvalidParameter.because(label, f"this {kind} is not an array", hint)
    return array


def _of_series(label: str, series: Any) -> Any:
    """The values of a column, of which none may be missing. Arrow converts those that NumPy does not have."""
    is_numpy = isinstance(series.dtype, np.dtype) and not series.dtype.hasobject
    if not hasattr(series, "to_dask_array"):
        if is_numpy:
            return complete(label, series.to_numpy())
        return module_with_pyarrow().column_array(label, series)
    if not is_numpy:
        hint = "Cast it to a NumPy dtype of numbers (.astype, .cat.codes), or leave it out."
        raise InvalidParameter.because(label, f"its dtype is {series.dtype}", hint)
    return series.to_dask_array().map_blocks(partial(complete, label), dtype=series.dtype)


def _of_xarray(data: Any) -> Arrays:
    """The arrays of a ``Dataset``, ``DataArray``, or ``DataTree`` of one node. Dask arrays stay lazy.

    Of a dataset, these are the variables with the first dimension of the largest one; of a data array, itself and its
    coordinates along its first dimension. The dimension of samples moves to the front.
    """
    whole = isinstance(getattr(data, "data_vars", None), Mapping)  # a Dataset or a node of a DataTree
    if not whole and not hasattr(data, "coords"):
        raise InvalidParameter.of("arrays", data, "an xarray.Dataset or DataArray")
    variables = data.data_vars.values() if whole else [data.variable]
    main = max(variables, key=lambda variable: variable.nbytes if variable.ndim else -1, default=None)
    groups = [f"Give one of them, such as tree[{name!r}]." for name in getattr(data, "children", ())]
    if main is None or not main.ndim or groups:
        reason = f"this {type(data).__name__} has " + ("groups" if groups else "no variables with a dimension")
        raise InvalidParameter.because("arrays", reason, "".join(groups[:1]))
    if whole:
        return _along(data.variables, main.dims[0])
    if data.name is None:
        raise InvalidParameter.because("arrays", "this DataArray has no name", 'Name it with .rename("x").')
    coordinates = {name: coordinate.variable for name, coordinate in data.coords.items()}
    return _along({**coordinates, data.name: main}, main.dims[0])


def _along(variables: Mapping[Hashable, Any], samples: Hashable) -> Arrays:
    arrays: dict[Any, Any] = {}
    skipped: dict[str, str] = {}
    dimensions: dict[Any, tuple[str, ...]] = {}
    for name, variable in variables.items():
        dtype = variable.dtype
        if samples not in variable.dims:
            dims = ", ".join(map(str, variable.dims)) or "it has no dimensions"
            skipped[str(name)] = f"its dimensions are {dims}, without {samples}" if variable.dims else dims
        elif not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.kind == "T":
            skipped[str(name)] = f"its items are not of a dtype of NumPy with a fixed size ({dtype})"
        else:
            turned = variable.transpose(samples, ...)
            arrays[name], dimensions[name] = turned.data, tuple(map(str, turned.dims))
    return arrays, skipped, dimensions
