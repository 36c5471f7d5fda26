"""Sources of datasets: files of NumPy, Parquet and Zarr, folders of images, and arrays of datasets.

All of them give arrays that are read in ascending slabs and may be larger than memory.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import zarr
from dask.utils import natural_sort_key
from numpy.lib import format as npy
from numpy.typing import NDArray
from zarr.core.sync import sync

from dshuffle.checks import each
from dshuffle.errors import DatasetError, DatasetNotFound, DShuffleError, InvalidParameter
from dshuffle.redaction import hide_secrets
from dshuffle.store.cf import attributes_of, encoding_of
from dshuffle.store.dataset import Dataset, as_dataset, open_dataset
from dshuffle.store.metadata import unreadable_items
from dshuffle.store.places import ARRAY, GROUP, Meter, Place, canonical_url, is_local, open_store, standing_at
from dshuffle.store.reader import ArrayInfo, StoredArray
from dshuffle.store.sources.source import RowSource, files_below, stream, unreadable

logger = logging.getLogger(__name__)

PARQUET = (".parquet", ".parq", ".pq")

# Zarr is read this many bytes at a time, because a store answers many concurrent requests as fast as one.
_READ_NBYTES = 16 << 20


def read_sources(files: Sequence[str | os.PathLike[str]], names: Collection[str] | None = None) -> dict[str, RowSource]:
    """Open the arrays in files, for :func:`~dshuffle.store.create_dataset`. Only headers are read at this point.

    Parameters
    ----------
    files
        Paths or, for Zarr, URLs:

        - ``.npy``: one array, named after the file without its suffix.
        - ``.npz``: one array for each member. A member is loaded whole when its turn comes.
        - ``.parquet``, ``.parq``, ``.pq``, or a folder with such files at any depth (extra ``parquet``): one array for
          each column of numbers or times without missing values, or of lists of these of equal length. Folders such as
          ``year=2020`` are columns. The files of a folder are read in natural order (``part.2`` before ``part.10``).
          Several files or folders form one table, in the given order.
        - A Zarr array (named after its folder) or group.
    names
        Names of the arrays to take; by default all.

    Returns
    -------
    dict
        Name -> rows, all of the same length.

    Raises
    ------
    DatasetNotFound
        If a file does not exist.
    DatasetError
        If a file cannot be read, or pyarrow is not installed.
    InvalidParameter
        If a file is of another kind, does not contain arrays of fixed-size items, has no rows, or has a different
        number of rows than the first; if two arrays have the same name, or a name does not occur.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from dshuffle.store import create_dataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(folder + "/x.npy", np.ones((100, 3), "f4"))
    ...     np.savez_compressed(folder + "/more.npz", y=np.arange(100), z=np.zeros(100))
    ...     sources = read_sources([folder + "/x.npy", folder + "/more.npz"], names=["x", "y"])
    ...     dataset = create_dataset("memory://doc-ingest", sources, overwrite=True)
    >>> dataset
    <Dataset 'memory://doc-ingest', 100 samples of 20 bytes (x: float32 (3,), y: int64 ())>
    """
    if isinstance(files, str | os.PathLike) or not files:
        raise InvalidParameter.of("files", files, "a list of at least one file")
    chosen = None if names is None else set(names)
    places = [canonical_url(file) for file in files]
    if len(set(places)) < len(places):
        raise InvalidParameter.of("files", places, "distinct files")
    tables = {place: parts for place in places if (parts := _parts_of_table(place)) is not None}
    sources: dict[str, RowSource] = {}
    present: set[str] = set()
    for found in _opened([place for place in places if place not in tables], tables, chosen):
        present |= found.keys()
        for name in [name for name in found if chosen is None or name in chosen]:
            if name in sources:
                reason = f"{sources[name].origin} and {found[name].origin} both contain an array {name!r}"
                raise InvalidParameter.because("files", reason, "Give each array a distinct name.")
            sources[name] = found[name]
    if chosen is not None and chosen - present:
        hint = f"They have {', '.join(sorted(present))}." if present else ""
        raise InvalidParameter.of("names", sorted(chosen - present), "names of arrays in the files", hint)
    if not sources:
        raise InvalidParameter.because("files", "they do not contain any array", "Give files with at least one array.")
    each(sources, lambda name: _check_items(f"{sources[name].origin}: array {name!r}", sources[name]))
    first, *others = sources
    for name in others:
        if len(sources[name]) != len(sources[first]):
            one, other = (f"{each!r} of {sources[each].origin} has {len(sources[each])}" for each in (first, name))
            hint = "All arrays must have the same length."
            raise InvalidParameter.because("files", f"array {one} samples, but array {other}", hint)
    return sources


def module_with_pyarrow() -> ModuleType:
    """Import the module that needs pyarrow. It is imported on use, because pyarrow is an extra."""
    try:
        return importlib.import_module("dshuffle.store.sources.tables")
    except ImportError as exc:
        raise DatasetError(
            f"pyarrow is needed to read this table; install it with pip install 'dshuffle[parquet]' ({exc})"
        ) from exc


def _parts_of_table(place: str) -> list[str] | None:
    """The files of Parquet that a place is or has, in natural order; None if it is something else."""
    named = place.lower().endswith(PARQUET)
    if not is_local(place) or not os.path.isdir(place):
        return [place] if named else None
    if not named and any(os.path.exists(os.path.join(place, key)) for key in ("zarr.json", ".zgroup", ".zarray")):
        return None
    # Names that start with an underscore (such as _metadata) or a dot are not part of the table.
    parts = [file for file in files_below(place, "._", natural_sort_key) if file.lower().endswith(PARQUET)]
    if named and not parts:
        raise InvalidParameter.of("files", place, f"a folder with at least one file of {', '.join(PARQUET)}")
    return parts or None


def _opened(places: list[str], tables: dict[str, list[str]], chosen: set[str] | None) -> Iterator[dict[str, RowSource]]:
    for place in [*places, *tables]:
        if not is_local(place) and place.lower().endswith((".npy", ".npz", *PARQUET)):
            raise InvalidParameter.of("files", place, "a local path", "Only Zarr is read from URLs.")
        if is_local(place) and not os.path.exists(place):
            raise DatasetNotFound(f"{place} does not exist")
    for place in places:
        suffix = os.path.splitext(place)[1].lower()
        if suffix not in (".npy", ".npz") and is_local(place) and not os.path.isdir(place):
            kinds = f"a file of .npy, .npz, {', '.join(PARQUET)}, or a Zarr array or group"
            hint = "Read CSV files with pandas or Dask, and give the table to create_dataset."
            raise InvalidParameter.of("files", place, kinds, hint if suffix == ".csv" else "")
        try:
            yield {".npy": _of_npy, ".npz": _of_npz}.get(suffix, _of_zarr)(place)
        except DShuffleError:
            raise
        except Exception as exc:
            raise unreadable(place, exc) from exc
    if tables:
        yield module_with_pyarrow().parquet_arrays(tables, chosen)


def _of_npy(path: str) -> dict[str, RowSource]:
    def read(rows: slice) -> NDArray[Any]:
        # Copy the rows and map each slab separately: mapped pages count as process memory while the mapping exists.
        return np.array(np.load(path, mmap_mode="r")[rows], order="C")

    whole = np.load(path, mmap_mode="r")
    return {Path(path).stem: RowSource(path, whole.shape, whole.dtype, read)}


def _of_npz(path: str) -> dict[str, RowSource]:
    def member(archive: Any, name: str) -> RowSource:
        with archive.zip.open(f"{name}.npy") as file:
            version = "_".join(map(str, npy.read_magic(file)))
            shape, _, dtype = getattr(npy, f"read_array_header_{version}")(file)

        def blocks() -> Iterator[NDArray[Any]]:
            with np.load(path) as again:
                yield again[name]

        return stream(path, shape, dtype, blocks)

    with np.load(path) as archive:
        return {name: member(archive, name) for name in archive.files}


def _of_zarr(url: str) -> dict[str, RowSource]:
    """The arrays directly below a group, or the single array at the URL, named after its folder."""
    standing = standing_at(url, None)
    if standing == GROUP:
        dataset = open_dataset(url)
        return {name: read_array(dataset, name) for name in dataset.arrays}
    if standing != ARRAY:
        raise DatasetError(f"{url} is {standing or 'missing'}; it must be a Zarr array or group")
    name = url.rsplit("/", 1)[-1].removesuffix(".zarr")
    array = zarr.open_array(store=open_store(url, None, read_only=True), mode="r")
    if reason := unreadable_items(array):
        raise DatasetError(f"array {name!r} of {url} cannot be read: {reason}")
    encoding, undecoded = encoding_of(array, attributes_of({name: array})[name])
    if undecoded:
        logger.warning("Array %r of %s is not decoded: %s", name, hide_secrets(url), undecoded)
    stored = StoredArray.of(url, name, array, encoding=encoding)
    shape, rows = stored.info.shape, _rows_at_a_time(stored.info)

    def blocks() -> Iterator[NDArray[Any]]:
        for start in range(0, array.shape[0], rows):
            box = tuple(slice(0, length) for length in shape)
            yield stored.values(sync(stored.read_rows(start, min(start + rows, array.shape[0]), box)), shape)

    return {name: stream(url, array.shape, stored.info.dtype, blocks)}


def read_array(dataset: Dataset | Place, name: str) -> RowSource:
    """Return one array of a dataset as a source that is read in ascending slabs."""
    dataset = as_dataset(dataset)
    if name not in dataset.arrays:
        raise InvalidParameter.of("array", name, f"one of {list(dataset.arrays)}")
    info = dataset.arrays[name]
    part = dataclasses.replace(dataset._only([name]), _meter=Meter())  # labels are not rows that were delivered
    rows = _rows_at_a_time(info)

    def blocks() -> Iterator[NDArray[Any]]:
        for start in range(0, dataset.n_samples, rows):
            yield part.read_rows(np.arange(start, min(start + rows, dataset.n_samples)))[name]

    source = stream(dataset.url, (dataset.n_samples, *info.shape), info.dtype, blocks)
    return dataclasses.replace(source, has_url=dataset._opening.location.store is None)


def _rows_at_a_time(info: ArrayInfo) -> int:
    # Whole shards if there are any, because their chunks would otherwise be requested one by one.
    band = info.shard_rows or info.chunk_rows
    return band * max(1, _READ_NBYTES // max(1, band * info.dtype.itemsize * math.prod(info.shape)))


def _check_items(label: str, source: RowSource) -> None:
    if source.ndim == 0:
        raise InvalidParameter.because(label, "it is a single number", "Leave it out by naming the other arrays.")
    if source.dtype.hasobject or source.dtype.kind in "OT":
        reason = f"its dtype {source.dtype} does not have a fixed size"
        raise InvalidParameter.because(label, reason, "Cast it to numbers, or leave it out.")
    if not len(source):
        raise InvalidParameter.because(label, "it is empty", "Give at least one sample.")
