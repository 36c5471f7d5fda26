"""The dataset of ``dshuffle compare`` without a DATASET. This module loads dask.array, which takes half a second."""

from __future__ import annotations

import time

from dshuffle.cli.options import RARE_KEYS_NOISE, RARE_KEYS_ROWS, RARE_KEYS_SAMPLES
from dshuffle.store import Dataset, create_dataset, shuffle_dataset
from dshuffle.synthetic import rare_keys_regression


def generate(folder: str, seed: int, chunk_rows: int, *, copied: bool) -> tuple[Dataset, Dataset | None, float | None]:
    """Write the dataset, and a copy in random order; return both, and the seconds of making the copy."""
    n_keys = RARE_KEYS_SAMPLES // RARE_KEYS_ROWS
    arrays = rare_keys_regression(RARE_KEYS_SAMPLES, n_keys, seed=seed, noise=RARE_KEYS_NOISE)
    data = create_dataset(f"{folder}/rare-keys.zarr", arrays, chunk_rows=chunk_rows)
    if not copied:
        return data, None, None
    start = time.perf_counter()
    copy = shuffle_dataset(data, f"{folder}/shuffled.zarr", seed=seed, chunk_rows=chunk_rows)
    return data, copy, time.perf_counter() - start
