"""Complete a matrix whose rows are shuffled between the workers before every epoch.

dshuffle dataset create ratings.zarr --movielens ratings.csv
dshuffle run pipelines/matrix_completion.py url=ratings.zarr entries_a_row=68
"""

from __future__ import annotations

from typing import Any

from dshuffle import Partition, Pipeline, Shuffler, Training
from dshuffle.pipeline import LocalWorkers
from dshuffle.runtime import gathered
from dshuffle.training import Decay, History, OnEpoch, fit_matrix_completion


def extent(partition: Partition) -> tuple[int, int]:
    """Return the numbers of rows and columns that the entries of a partition need. Runs on each worker."""
    return 1 + int(partition["row"].max()), 1 + int(partition["column"].max())


def fit(shuffler: Shuffler, *, epochs: int, on_epoch: OnEpoch | None = None, **options: Any) -> History[Any]:
    """Find the shape of the matrix, which is not stored, in the first epoch; then fit its factors."""
    shapes = gathered(next(shuffler.epochs(1)).map(extent))
    rows, columns = map(max, zip(*shapes, strict=True))
    return fit_matrix_completion(
        shuffler, n_rows=rows, n_columns=columns, epochs=epochs, schedule=Decay(0.9), on_epoch=on_epoch, **options
    )


def pipeline(
    url: str, entries_a_row: int, workers: int = 4, rank: int = 10, epochs: int = 7, step: float = 0.05
) -> Pipeline:
    """Fit row and column factors to the entries at a URL (Chung et al., 2017, section 5.1, P5 and P6)."""
    return Pipeline(
        url,
        Training(fit, epochs=epochs, rank=rank, step=step),
        shuffle=f"chunks:{entries_a_row}",
        cluster=LocalWorkers(workers),
    )
