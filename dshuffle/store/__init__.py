"""Create, open, read and verify datasets in Zarr. Only this package imports zarr.

The names below load on first use, so that a worker does not load what only a client calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshuffle.lazy_names import loader

if TYPE_CHECKING:  # the table below, for type checkers; a test compares them
    from dshuffle.store.create import create_dataset as create_dataset
    from dshuffle.store.dataset import Dataset as Dataset
    from dshuffle.store.dataset import VerifyReport as VerifyReport
    from dshuffle.store.dataset import as_dataset as as_dataset
    from dshuffle.store.dataset import open_dataset as open_dataset
    from dshuffle.store.dataset import verify_dataset as verify_dataset
    from dshuffle.store.places import Place as Place
    from dshuffle.store.reader import ArrayInfo as ArrayInfo
    from dshuffle.store.sharding_arrays import read_broadcast as read_broadcast
    from dshuffle.store.sharding_arrays import read_sharding as read_sharding
    from dshuffle.store.sharding_arrays import stored_shardings as stored_shardings
    from dshuffle.store.sharding_arrays import write_sharding as write_sharding
    from dshuffle.store.shuffled_copy import shuffle_dataset as shuffle_dataset
    from dshuffle.store.sources import read_array as read_array
    from dshuffle.store.sources import read_sources as read_sources
    from dshuffle.store.sources.image_folder import ImageFolder as ImageFolder
    from dshuffle.store.sources.source import RowSource as RowSource
    from dshuffle.store.sources.source import watched as watched

_HOMES = {
    "ArrayInfo": "dshuffle.store.reader",
    "Dataset": "dshuffle.store.dataset",
    "ImageFolder": "dshuffle.store.sources.image_folder",
    "Place": "dshuffle.store.places",
    "RowSource": "dshuffle.store.sources.source",
    "VerifyReport": "dshuffle.store.dataset",
    "as_dataset": "dshuffle.store.dataset",
    "create_dataset": "dshuffle.store.create",
    "open_dataset": "dshuffle.store.dataset",
    "read_array": "dshuffle.store.sources",
    "read_broadcast": "dshuffle.store.sharding_arrays",
    "read_sharding": "dshuffle.store.sharding_arrays",
    "read_sources": "dshuffle.store.sources",
    "shuffle_dataset": "dshuffle.store.shuffled_copy",
    "stored_shardings": "dshuffle.store.sharding_arrays",
    "verify_dataset": "dshuffle.store.dataset",
    "watched": "dshuffle.store.sources.source",
    "write_sharding": "dshuffle.store.sharding_arrays",
}
__all__ = sorted(_HOMES)

__getattr__ = loader(__name__, _HOMES)
