"""A dataset of zeros without stored chunks. A process that unpickles it can read it."""

from __future__ import annotations

import zarr
from zarr.storage import MemoryStore

from dshuffle.store.dataset import Dataset
from dshuffle.store.open import open_dataset


def blank_dataset(n_samples: int, row_nbytes: int = 1, chunk_rows: int | None = None) -> Dataset:
    """Make a dataset of zeros. It has metadata only: chunks that are not stored are zeros."""
    store = MemoryStore()
    group = zarr.create_group(store=store)
    shape, chunks = (n_samples, row_nbytes), (chunk_rows or n_samples, row_nbytes)
    group.create_array("x", shape=shape, chunks=chunks, dtype="u1", fill_value=0)
    return open_dataset(store)
