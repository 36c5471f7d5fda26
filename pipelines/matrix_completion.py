"""Complete a matrix whose rows are shuffled between the workers before every epoch, and test it on entries held out.

dshuffle dataset create ratings.zarr --movielens ratings.csv
dshuffle run pipelines/matrix_completion.py url=ratings.zarr entries_a_row=68
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dshuffle import InvalidParameter, Pipeline, Training, open_dataset
from dshuffle.pipeline import LocalWorkers
from dshuffle.training import Decay


def pipeline(
    url: str, entries_a_row: int, held_out: int = 7, workers: int = 4, rank: int = 10, step: float = 0.05
) -> Pipeline:
    """Fit factors to the entries at a URL, and hold out some of each row as a test (Chung et al., 2017, Figure 8)."""
    dataset = open_dataset(url)
    if dataset.n_samples % entries_a_row or not 0 < held_out < entries_a_row:
        raise InvalidParameter(
            f"{dataset.n_samples} entries are not rows of {entries_a_row}, {held_out} of them held out"
        )
    entries = dataset.read_rows(np.arange(dataset.n_samples))
    drawn = np.random.default_rng(0).random((dataset.n_samples // entries_a_row, entries_a_row))
    is_test = (drawn.argsort(axis=1) < held_out).ravel()
    data: dict[str, Any] = {"n_rows": 1 + int(entries["row"].max()), "n_columns": 1 + int(entries["column"].max())}
    data["test"] = tuple(entries[name][is_test] for name in ("row", "column", "value"))
    training = Training("matrix_completion", epochs=7, step=step, schedule=Decay(0.9), rank=rank, **data)
    shuffle = f"chunks:{entries_a_row - held_out}"
    return Pipeline(dataset.select(~is_test), training, shuffle=shuffle, cluster=LocalWorkers(workers))
