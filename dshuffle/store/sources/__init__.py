"""Sources of datasets: NumPy, Parquet, Zarr and MovieLens files, read in slabs and never loaded whole."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from dshuffle.errors import DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store.backends.urls import canonical_url, is_local
from dshuffle.store.sources.numpy_files import npy_arrays, npz_arrays
from dshuffle.store.sources.source import RowSource
from dshuffle.store.sources.zarr_nodes import zarr_arrays

if TYPE_CHECKING:
    from dshuffle.store.sources.movielens import Ratings

PARQUET = (".parquet", ".pq")


def read_sources(files: Sequence[str | os.PathLike[str]], names: Collection[str] | None = None) -> dict[str, RowSource]:
    """Open the arrays in files, for :func:`~dshuffle.store.create_dataset`. Only headers are read at this point.

    Parameters
    ----------
    files
        Paths or, for Zarr, URLs:

        - ``.npy``: one array, named after the file without its suffix.
        - ``.npz``: one array per member. Members are read as streams, so they must be in C order.
        - ``.parquet``, ``.pq`` or a folder of such files with such a suffix (extra ``parquet``): one array per
          column of numbers or times, or of lists of equal length. Several files form one table, in the given order.
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
    tables = [place for place in places if place.endswith(PARQUET)]
    sources: dict[str, RowSource] = {}
    present: set[str] = set()
    for place in places:
        if place in tables[1:]:
            continue  # read with the first one
        for name, source in _arrays_of(place, tables, chosen).items():
            present.add(name)
            if chosen is not None and name not in chosen:
                continue
            if name in sources:
                raise InvalidParameter.because(
                    "files",
                    f"{sources[name].origin} and {source.origin} both contain an array {name!r}",
                    "Give each array a distinct name.",
                )
            sources[name] = _checked(name, source)
    if chosen is not None and chosen - set(sources):
        hint = f"They have {', '.join(sorted(present))}." if present else ""
        raise InvalidParameter.of("names", sorted(chosen - set(sources)), "names of arrays in the files", hint)
    _same_length(sources)
    return sources


def read_ratings(
    path: str | os.PathLike[str],
    per_user: int = 68,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Ratings:
    """Open MovieLens's ``ratings.csv`` with ``per_user`` ratings of each user; see :class:`.movielens.Ratings`.

    Raises
    ------
    DatasetNotFound
        If the file does not exist.
    DatasetError
        If it is not a ``ratings.csv``, no user has ``per_user`` ratings, or pyarrow is not installed.
    InvalidParameter
        If ``per_user`` or ``seed`` is not allowed.
    """
    place = canonical_url(path)
    _must_exist(place)
    ratings: Ratings = _arrow_module("movielens").Ratings.of(place, per_user, seed, progress)
    return ratings


def _arrays_of(place: str, tables: list[str], chosen: set[str] | None) -> dict[str, RowSource]:
    suffix = os.path.splitext(place)[1]
    if suffix in (".npy", ".npz", *PARQUET) and not is_local(place):
        raise InvalidParameter.of("files", place, "a local path", "Only Zarr is read from URLs.")
    if suffix in PARQUET:
        for table in tables:
            _must_exist(table)
        columns: dict[str, RowSource] = _arrow_module("parquet").parquet_arrays(tables, chosen)
        return columns
    if is_local(place):
        _must_exist(place)
    if suffix == ".npy":
        return npy_arrays(place)
    if suffix == ".npz":
        return npz_arrays(place)
    if not is_local(place) or os.path.isdir(place):
        return zarr_arrays(place)
    hint = "Read MovieLens ratings with --movielens." if suffix == ".csv" else ""
    raise InvalidParameter.of("files", place, "a .npy, .npz, .parquet or .pq file, or a Zarr array or group", hint)


def _must_exist(place: str) -> None:
    if not os.path.exists(place):
        raise DatasetNotFound(f"{place} does not exist")


def _arrow_module(name: str) -> ModuleType:
    """Import a module that needs pyarrow. It is imported on use, because pyarrow is an extra."""
    try:
        return importlib.import_module(f"dshuffle.store.sources.{name}")
    except ImportError as exc:
        raise DatasetError(
            f"pyarrow is needed to read this file; install it with pip install 'dshuffle[parquet]' ({exc})"
        ) from exc


def _checked(name: str, source: RowSource) -> RowSource:
    label = f"{source.origin}: array {name!r}"
    if source.ndim == 0:
        raise InvalidParameter.because(label, "it is a single number", "The first axis must be the samples.")
    if source.dtype.hasobject or source.dtype.kind in "OT":
        raise InvalidParameter.because(
            label,
            f"its dtype {source.dtype} does not have a fixed size",
            "Cast it to numbers or fixed-length strings, or leave it out.",
        )
    if not len(source):
        raise InvalidParameter.because(label, "it is empty", "Give at least one sample.")
    return source


def _same_length(sources: dict[str, RowSource]) -> None:
    if not sources:
        raise InvalidParameter.because("files", "they do not contain any array", "Give files with at least one array.")
    first, *following = sources.items()
    for name, source in following:
        if len(source) != len(first[1]):
            raise InvalidParameter.because(
                "files",
                f"array {first[0]!r} of {first[1].origin} has {len(first[1])} samples, "
                f"but array {name!r} of {source.origin} has {len(source)}",
                "All arrays must have the same length.",
            )
