"""Sources of datasets: files of NumPy, Parquet and Zarr, folders of images, and tables and arrays of other libraries.

:func:`read_sources` opens files, :class:`.image_folder.ImageFolder` a folder of images, and :mod:`.in_memory` finds the
arrays in what users pass. All of them give arrays, or a :class:`.source.RowSource` that is read in slabs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from dask.utils import natural_sort_key
from numpy.lib import format as npy
from numpy.typing import NDArray

from dshuffle.checks import each
from dshuffle.errors import DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store.places import canonical_url, is_local
from dshuffle.store.sources.source import RowSource, files_below, stream, unreadable
from dshuffle.store.sources.zarr_nodes import zarr_arrays

PARQUET = (".parquet", ".parq", ".pq")


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
        for name, source in found.items():
            present.add(name)
            if chosen is not None and name not in chosen:
                continue
            if name in sources:
                raise InvalidParameter.because(
                    "files",
                    f"{sources[name].origin} and {source.origin} both contain an array {name!r}",
                    "Give each array a distinct name.",
                )
            sources[name] = source
    if chosen is not None and chosen - set(sources):
        hint = f"They have {', '.join(sorted(present))}." if present else ""
        raise InvalidParameter.of("names", sorted(chosen - set(sources)), "names of arrays in the files", hint)
    _check(sources)
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
        if not is_local(place) and (place in tables or place.lower().endswith((".npy", ".npz"))):
            raise InvalidParameter.of("files", place, "a local path", "Only Zarr is read from URLs.")
        if is_local(place) and not os.path.exists(place):
            raise DatasetNotFound(f"{place} does not exist")
    for place in places:
        suffix = os.path.splitext(place)[1].lower()
        if suffix in (".npy", ".npz"):
            yield numpy_arrays(place, suffix)
        elif not is_local(place) or os.path.isdir(place):
            yield zarr_arrays(place)
        else:
            kinds = f"a file of .npy, .npz, {', '.join(PARQUET)}, or a Zarr array or group"
            hint = "Read CSV files with pandas or Dask, and give the table to create_dataset."
            raise InvalidParameter.of("files", place, kinds, hint if suffix == ".csv" else "")
    if tables:
        yield module_with_pyarrow().parquet_arrays(tables, chosen)


def numpy_arrays(path: str, suffix: str) -> dict[str, RowSource]:
    """Open the array of a ``.npy`` file, or the members of a ``.npz`` file."""
    try:
        if suffix == ".npy":
            whole = np.load(path, mmap_mode="r")
            # Copy the rows and map each slab separately: mapped pages count as process memory while the mapping exists.
            return {
                Path(path).stem: RowSource(
                    path, whole.shape, whole.dtype, lambda rows: np.array(np.load(path, mmap_mode="r")[rows], order="C")
                )
            }
        with np.load(path) as archive:
            return {name: _member(path, archive, name) for name in archive.files}
    except Exception as exc:
        raise unreadable(path, exc) from exc


def _member(path: str, archive: Any, name: str) -> RowSource:
    with archive.zip.open(f"{name}.npy") as member:
        version = "_".join(map(str, npy.read_magic(member)))
        shape, _, dtype = getattr(npy, f"read_array_header_{version}")(member)

    def blocks() -> Iterator[NDArray[Any]]:
        with np.load(path) as again:
            yield again[name]

    return stream(path, shape, dtype, blocks)


def _check(sources: dict[str, RowSource]) -> None:
    if not sources:
        raise InvalidParameter.because("files", "they do not contain any array", "Give files with at least one array.")
    each(sources, lambda name: _check_items(f"{sources[name].origin}: array {name!r}", sources[name]))
    first, *following = sources.items()
    for name, source in following:
        if len(source) != len(first[1]):
            raise InvalidParameter.because(
                "files",
                f"array {first[0]!r} of {first[1].origin} has {len(first[1])} samples, "
                f"but array {name!r} of {source.origin} has {len(source)}",
                "All arrays must have the same length.",
            )


def _check_items(label: str, source: RowSource) -> None:
    if source.ndim == 0:
        raise InvalidParameter.because(label, "it is a single number", "Leave it out by naming the other arrays.")
    if source.dtype.hasobject or source.dtype.kind in "OT":
        reason = f"its dtype {source.dtype} does not have a fixed size"
        raise InvalidParameter.because(label, reason, "Cast it to numbers, or leave it out.")
    if not len(source):
        raise InvalidParameter.because(label, "it is empty", "Give at least one sample.")
