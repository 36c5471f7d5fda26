"""Complete a matrix from some of its entries, and test it on others, beside the mean and biases of rows and columns.

python pipelines/movielens_ratings.py ratings.csv ratings.zarr
dshuffle run pipelines/matrix_completion.py url=ratings.zarr entries_a_row=68

python pipelines/real_data.py movielens all.zarr
dshuffle run pipelines/matrix_completion.py url=all.zarr rank=20 step=0.08
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dshuffle import Choices, InvalidParameter, Pipeline, Training, open_dataset
from dshuffle.pipeline import LocalWorkers
from dshuffle.planning import GivenSharding, Local
from dshuffle.training import Decay, split_entries


def pipeline(
    url: str,
    entries_a_row: int | None = None,
    held_out: float = 0.1,
    workers: int = 4,
    epochs: int = 7,
    rank: int = 10,
    step: float = 0.05,
    regularization: float | None = None,
) -> Pipeline:
    """Fit factors to the entries at a URL, and hold out some as a test (Chung et al., 2017, Figure 8).

    If every row has ``entries_a_row`` entries, rows are shuffled between the workers before every epoch. Otherwise they
    stay on their workers, and only the columns are permuted. By default, the regularization is a tenth of the mean
    number of entries of a row.
    """
    dataset = open_dataset(url, arrays=["row", "column", "value"])
    entries = dataset.read_rows(np.arange(dataset.n_samples))
    shuffle: Any
    if entries_a_row is None:
        ranks = split_entries(entries["row"], workers, held_out=held_out)
        is_test = ranks < 0
        shuffle = Choices(Local(), sharding=GivenSharding.of("whole rows", ranks[~is_test]))
    else:
        tested = round(held_out * entries_a_row)
        if dataset.n_samples % entries_a_row or not 0 < tested < entries_a_row:
            raise InvalidParameter(
                f"{dataset.n_samples} entries are not rows of {entries_a_row}, {tested} of them held out"
            )
        drawn = np.random.default_rng(0).random((dataset.n_samples // entries_a_row, entries_a_row))
        is_test = (drawn.argsort(axis=1) < tested).ravel()
        shuffle = f"chunks:{entries_a_row - tested}"
    data: dict[str, Any] = {"n_rows": 1 + int(entries["row"].max()), "n_columns": 1 + int(entries["column"].max())}
    data["test"] = tuple(entries[name][is_test] for name in ("row", "column", "value"))
    if regularization is None:
        regularization = np.count_nonzero(~is_test) / len(np.unique(entries["row"])) / 10
    data |= {"rank": rank, "step": step, "regularization": regularization}
    training = Training("matrix_completion", epochs=epochs, schedule=Decay(0.9), **data)
    return Pipeline(dataset.select(~is_test), training, shuffle=shuffle, cluster=LocalWorkers(workers))
