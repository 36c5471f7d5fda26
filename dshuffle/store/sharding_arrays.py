"""Shardings stored with a dataset, in the sub-group ``shards`` beside its arrays. Readers of the dataset ignore it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import zarr
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import DatasetError, DatasetExists, InvalidParameter
from dshuffle.store.dataset import Dataset, as_dataset
from dshuffle.store.metadata import Mark
from dshuffle.store.places import Place

FOLDER = "shards"


def write_sharding(
    dataset: Dataset | Place,
    name: str,
    ranks: ArrayLike,
    *,
    broadcast: ArrayLike = (),
    about: Mapping[str, Any] | None = None,
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
    about
        Description of how the sharding was made, as JSON values.
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
        raise InvalidParameter.because(
            "dataset",
            "its samples are not those of the stored dataset",
            "Give the sharding to the session as an array.",
        )
    values = np.asarray(ranks, dtype=np.int32)
    if values.shape != (dataset.n_samples,):
        raise InvalidParameter.of("ranks.shape", values.shape, f"({dataset.n_samples},), one rank for each sample")
    if not overwrite and name in stored_shardings(dataset):
        raise DatasetExists(f"sharding {name!r} of {dataset.url} already exists; replace it with overwrite=True")
    with _named(f"cannot write sharding {name!r} of {dataset.url}"):
        location = dataset._opening.location
        group = zarr.open_group(store=location.open(read_only=False), path=location.path, mode="r+")
        shards = group.require_group(FOLDER)
        group = shards.create_group(name, overwrite=True, attributes=Mark(complete=False).attributes())
        for key, array in (("ranks", values), ("broadcast", np.asarray(broadcast, dtype=np.int64))):
            group.create_array(key, data=array, chunks=(max(1, min(len(array), 1 << 20)),))
        group.attrs.update({"about": dict(about or {}), **Mark(complete=True).attributes()})


def stored_shardings(dataset: Dataset | Place) -> tuple[str, ...]:
    """Return the names of the shardings stored with a dataset, in ascending order. A part of a dataset has none."""
    dataset = as_dataset(dataset)
    if dataset.is_view:
        return ()
    with _named(f"cannot list the shardings of {dataset.url}"), contextlib.suppress(FileNotFoundError):
        return tuple(sorted(name for name, group in _open_group(dataset, FOLDER).groups() if _complete(group)))
    return ()


def read_sharding(dataset: Dataset | Place, name: str) -> NDArray[np.int32]:
    """Read the ranks of a stored sharding, ``(q,)`` int32.

    Raises
    ------
    DatasetError
        If the sharding does not exist or cannot be read.
    """
    return np.asarray(_read(as_dataset(dataset), name, "ranks"), dtype=np.int32)


def read_broadcast(dataset: Dataset | Place, name: str) -> NDArray[np.int64]:
    """Read the broadcast samples of a stored sharding, ascending int64."""
    return np.asarray(_read(as_dataset(dataset), name, "broadcast"), dtype=np.int64)


def _read(dataset: Dataset, name: str, key: str) -> Any:
    with _named(f"cannot read sharding {name!r} of {dataset.url}"):
        try:
            group: Any = _open_group(dataset, f"{FOLDER}/{name}")
        except FileNotFoundError:
            names = ", ".join(stored_shardings(dataset)) or "none"
            raise DatasetError(f"{dataset.url} has no sharding {name!r}; it has {names}") from None
        if not _complete(group):
            raise DatasetError(f"sharding {name!r} of {dataset.url} was never finished; write it again")
        return group[key][:]


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn errors of zarr and of the store into one that says what cannot be done."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as exc:
        raise DatasetError(f"{what}: {type(exc).__name__}: {exc}") from exc


def _open_group(dataset: Dataset, path: str) -> zarr.Group:
    """Open a group below that of the dataset."""
    place = "/".join(filter(None, (dataset._opening.location.path, path)))
    # Consolidated metadata would not list shardings that were added later.
    return zarr.open_group(store=dataset._store.bare, path=place, mode="r", use_consolidated=False)


def _complete(group: zarr.Group) -> bool:
    mark = Mark.of(group.attrs)
    return mark is not None and mark.complete
