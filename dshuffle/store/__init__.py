"""Create, open, read and verify datasets in Zarr. Only this package imports zarr."""

from dshuffle.store.create import create_dataset, shuffle_dataset
from dshuffle.store.dataset import (
    Dataset,
    as_dataset,
    open_dataset,
    read_sharding,
    stored_shardings,
    verify_dataset,
    write_sharding,
)
from dshuffle.store.places import Place
from dshuffle.store.sources import ImageFolder, read_array, read_sources, watched

__all__ = [
    "Dataset",
    "ImageFolder",
    "Place",
    "as_dataset",
    "create_dataset",
    "open_dataset",
    "read_array",
    "read_sharding",
    "read_sources",
    "shuffle_dataset",
    "stored_shardings",
    "verify_dataset",
    "watched",
    "write_sharding",
]
