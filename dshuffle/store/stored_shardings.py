"""Shardings stored beside a dataset's arrays, in the sub-group ``shards``, which readers of the dataset pass over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import zarr
from numpy.typing import ArrayLike, NDArray
from zarr.abc.store import Store

from dshuffle.errors import DatasetError, DatasetExists, InvalidParameter
from dshuffle.store.backends import open_store
from dshuffle.store.dataset import MARK, Dataset

FOLDER = "shards"


def write_sharding(
    dataset: Dataset,
    name: str,
    ranks: ArrayLike,
    *,
    broadcast: ArrayLike = (),
    about: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Store a first assignment, by whose name sessions find it.

    Parameters
    ----------
    dataset
        The dataset, whose arrays are not touched.
    name
        A string without ``/`` or ``:`` that does not start with ``.`` or ``__``.
    ranks
        ``(q,)`` integers, the worker of each sample.
    broadcast
        Ascending samples that every worker is to train on.
    about
        How it was made, as JSON knows it.
    overwrite
        Replace one of that name.

    Raises
    ------
    InvalidParameter
        If the name is not allowed, or there is not one rank to a sample.
    DatasetExists
        If there is one of that name.
    DatasetError
        If it cannot be written.

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
    if not isinstance(name, str) or not name or {"/", ":"} & set(name) or name.startswith((".", "__")):
        raise InvalidParameter.of("name", name, "a string without '/' and ':' that does not start with '.' or '__'")
    values = np.asarray(ranks, dtype=np.int32)
    if values.shape != (dataset.n_samples,):
        raise InvalidParameter.of("ranks.shape", values.shape, f"({dataset.n_samples},), one rank to a sample")
    if not overwrite and name in stored_shardings(dataset):
        raise DatasetExists(
            f"{dataset.url} has a sharding {name!r} already; replace it with overwrite=True (--overwrite)"
        )
    try:
        store = open_store(dataset.url, dataset._storage_options, read_only=False)
        shards = zarr.open_group(store=store, mode="r+").require_group(FOLDER)
        group = shards.create_group(name, overwrite=True, attributes={MARK: {"version": 1, "complete": False}})
        for key, array in (("ranks", values), ("broadcast", np.asarray(broadcast, dtype=np.int64))):
            group.create_array(key, data=array, chunks=(max(1, min(len(array), 1 << 20)),))
        group.attrs.update({"about": dict(about or {}), MARK: {"version": 1, "complete": True}})
    except DatasetError:
        raise
    except Exception as exc:
        raise DatasetError(
            f"cannot write the sharding {name!r} beside {dataset.url}: {type(exc).__name__}: {exc}"
        ) from exc


def stored_shardings(dataset: Dataset) -> tuple[str, ...]:
    """The names of those that are stored beside a dataset, ascending."""
    store = open_store(dataset.url, dataset._storage_options, read_only=True)
    try:
        # Not the whole group: consolidated metadata would not know what was added later.
        shards = zarr.open_group(store=store, path=FOLDER, mode="r", use_consolidated=False)
        return tuple(sorted(name for name, group in shards.groups() if _complete(group)))
    except FileNotFoundError:
        return ()
    except DatasetError:
        raise
    except Exception as exc:
        raise DatasetError(f"cannot look for shardings beside {dataset.url}: {type(exc).__name__}: {exc}") from exc


def read_sharding(dataset: Dataset, name: str) -> NDArray[np.int32]:
    """``(q,)`` int32, the ranks that were stored under a name.

    Raises
    ------
    DatasetError
        If there are none, or they cannot be read.
    """
    return np.asarray(_read(dataset, name, "ranks"), dtype=np.int32)


def read_broadcast(dataset: Dataset, name: str) -> NDArray[np.int64]:
    """Ascending int64, the samples that every worker is to train on, as they were stored with ranks under a name.

    Raises
    ------
    DatasetError
        If there are none, or they cannot be read.
    """
    return np.asarray(_read(dataset, name, "broadcast"), dtype=np.int64)


def _read(dataset: Dataset, name: str, key: str) -> NDArray[np.generic]:
    store: Store = open_store(dataset.url, dataset._storage_options, read_only=True)
    try:
        group = zarr.open_group(store=store, path=f"{FOLDER}/{name}", mode="r", use_consolidated=False)
        if not _complete(group):
            raise DatasetError(f"writing the sharding {name!r} beside {dataset.url} was never finished; write it again")
        array = group[key]
        assert isinstance(array, zarr.Array)
        return np.asarray(array[:])
    except DatasetError:
        raise
    except Exception as exc:
        raise DatasetError(
            f"cannot read the sharding {name!r} beside {dataset.url}: {type(exc).__name__}: {exc}"
        ) from exc


def _complete(group: zarr.Group) -> bool:
    mark = group.attrs.get(MARK)
    return isinstance(mark, Mapping) and bool(mark.get("complete"))
