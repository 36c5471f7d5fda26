"""Datasets in Zarr: create, open, read rows chunk by chunk, verify. The only package that imports zarr."""

from dshuffle.store.chunks import ArrayInfo
from dshuffle.store.create import create_dataset
from dshuffle.store.dataset import Dataset, open_dataset
from dshuffle.store.ingest import read_ratings, read_sources
from dshuffle.store.source import RowSource, watched
from dshuffle.store.verify import VerifyReport, verify_dataset

__all__ = [
    "ArrayInfo",
    "Dataset",
    "RowSource",
    "VerifyReport",
    "create_dataset",
    "open_dataset",
    "read_ratings",
    "read_sources",
    "verify_dataset",
    "watched",
]
