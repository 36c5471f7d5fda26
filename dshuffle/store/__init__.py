"""Create, open, read and verify datasets in Zarr. Only this package imports zarr."""

from dshuffle.store.backends.location import Place
from dshuffle.store.create import create_dataset
from dshuffle.store.dataset import Dataset
from dshuffle.store.description import dataset_of, describe
from dshuffle.store.open import as_dataset, open_dataset
from dshuffle.store.shuffled_copy import shuffle_dataset
from dshuffle.store.sources import read_ratings, read_sources
from dshuffle.store.sources.source import RowSource, watched
from dshuffle.store.sources.zarr_nodes import read_array
from dshuffle.store.stored_array import ArrayInfo
from dshuffle.store.stored_shardings import read_broadcast, read_sharding, stored_shardings, write_sharding
from dshuffle.store.verify import VerifyReport, verify_dataset

__all__ = [
    "ArrayInfo",
    "Dataset",
    "Place",
    "RowSource",
    "VerifyReport",
    "as_dataset",
    "create_dataset",
    "dataset_of",
    "describe",
    "open_dataset",
    "read_array",
    "read_broadcast",
    "read_ratings",
    "read_sharding",
    "read_sources",
    "shuffle_dataset",
    "stored_shardings",
    "verify_dataset",
    "watched",
    "write_sharding",
]
