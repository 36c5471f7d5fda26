"""Zarr arrays and groups (v2 or v3) as sources, for example to rechunk a dataset."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.sync import sync

from dshuffle.errors import DatasetError, DShuffleError, InvalidParameter
from dshuffle.redaction import hide_secrets
from dshuffle.store.cf import attributes_of, encoding_of
from dshuffle.store.dataset import Dataset
from dshuffle.store.open import as_dataset, open_dataset
from dshuffle.store.places import ARRAY, GROUP, Place, canonical_url, open_store, standing_at
from dshuffle.store.sample_arrays import unreadable_items
from dshuffle.store.sources.source import RowSource, stream, unreadable
from dshuffle.store.stored_array import StoredArray

logger = logging.getLogger(__name__)

# Bands of chunks are read this many bytes at a time, because a store answers many concurrent requests as fast as one.
_READ_NBYTES = 16 << 20
# A band is decoded once unless it is larger than this. A larger band is read in parts and decoded several times, to
# save memory.
_BAND_NBYTES = 256 << 20


def zarr_arrays(url: str) -> dict[str, RowSource]:
    """Open the arrays directly below a group, or the single array at the URL, named after its folder."""
    standing = standing_at(url, None)
    if standing == GROUP:
        return {name: _source(array) for name, array in open_dataset(url)._sources.items()}
    if standing != ARRAY:
        raise DatasetError(f"{url} is {standing or 'missing'}; it must be a Zarr array or group")
    name = canonical_url(url).rsplit("/", 1)[-1].removesuffix(".zarr")
    try:
        array = zarr.open_array(store=open_store(url, None, read_only=True), mode="r")
        if reason := unreadable_items(array):
            raise DatasetError(f"array {name!r} of {url} cannot be read: {reason}")
        encoding, undecoded = encoding_of(array, attributes_of({name: array})[name])
        if undecoded:
            logger.warning("Array %r of %s is not decoded: %s", name, hide_secrets(url), undecoded)
        return {name: _source(StoredArray.of(url, name, array, encoding=encoding))}
    except DShuffleError:
        raise
    except Exception as exc:
        raise unreadable(url, exc) from exc


def read_array(dataset: Dataset | Place, name: str) -> RowSource:
    """Return one array of a dataset as a source that is read in ascending slabs.

    Raises
    ------
    InvalidParameter
        If the dataset does not have an array of that name.

    Examples
    --------
    >>> import numpy as np
    >>> from dshuffle.store import create_dataset
    >>> dataset = create_dataset("memory://doc-read-array", {"x": np.arange(10), "y": np.ones(10)}, overwrite=True)
    >>> read_array(dataset, "x")[2:5]
    array([2, 3, 4])
    """
    dataset = as_dataset(dataset)
    if name not in dataset.arrays:
        raise InvalidParameter.of("array", name, f"one of {list(dataset.arrays)}")
    has_url = dataset._opening.location.store is None
    if not dataset.is_view and not dataset.is_temporary:
        return dataclasses.replace(_source(dataset._sources[name]), has_url=has_url)
    part = dataclasses.replace(dataset, _sources={name: dataset._sources[name]})
    info = dataset.arrays[name]
    rows = max(1, _READ_NBYTES // max(1, dataset._sources[name].dtype.itemsize * math.prod(info.shape)))

    def blocks() -> Iterator[NDArray[Any]]:
        for start in range(0, dataset.n_samples, rows):
            yield part.read_rows(np.arange(start, min(start + rows, dataset.n_samples)))[name]

    rows_of = stream(dataset.url, (dataset.n_samples, *info.shape), info.dtype, blocks)
    return dataclasses.replace(rows_of, has_url=has_url)


def _source(stored: StoredArray) -> RowSource:
    info, n_rows = stored.info, stored.n_samples
    # Read whole shards if there are any, because their chunks would otherwise be requested one by one.
    band = (stored.array.shards or stored.array.chunks)[stored.axis]
    row_nbytes = max(1, stored.row_nbytes)
    rows = max(1, min(band, _BAND_NBYTES // row_nbytes))
    rows *= max(1, _READ_NBYTES // (rows * row_nbytes))

    def blocks() -> Iterator[NDArray[Any]]:
        for start in range(0, n_rows, rows):
            stop = min(start + rows, n_rows)
            yield stored.values(sync(stored.read_rows(start, stop)))

    return stream(stored.url, (n_rows, *info.shape), info.dtype, blocks)
