"""Datasets in Zarr: create, open, read rows chunk by chunk, verify. The only package that imports zarr."""

from dshuffle.store.chunks import ArrayInfo
from dshuffle.store.create import create_dataset
from dshuffle.store.dataset import Dataset, open_dataset
from dshuffle.store.verify import VerifyReport, verify_dataset

__all__ = ["ArrayInfo", "Dataset", "VerifyReport", "create_dataset", "open_dataset", "verify_dataset"]
