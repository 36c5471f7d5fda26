"""Train a linear regression on a dataset that is shuffled between the workers before every epoch.

dshuffle run pipelines/linear_regression.py url=/data/keyed.zarr epochs=5
dshuffle run pipelines/linear_regression.py url=s3://bucket/keyed.zarr --scheduler tcp://head-node:8786

python pipelines/real_data.py flights flights.zarr
dshuffle run pipelines/linear_regression.py url=flights.zarr
"""

from __future__ import annotations

from typing import Any

from dshuffle import Choices, Pipeline, Training, open_dataset
from dshuffle.compare import falling, stable_step
from dshuffle.pipeline import LocalWorkers
from dshuffle.training import rmse_on


def pipeline(
    url: str,
    held_out: float = 0.1,
    workers: int = 4,
    epochs: int = 5,
    assignment: str = "global",
    delivery: str = "peer",
    seed: int = 0,
    step: float | None = None,
) -> Pipeline:
    """Fit y = x @ weights on the dataset at a URL (Chung et al., 2017, section 5.1).

    A tenth of the samples is held out. The root mean square error on them is printed beside that of their mean.
    ``held_out=0`` trains on all. Without ``step``, steps suit the rows, and fall linearly.
    """
    dataset = open_dataset(url)
    options: dict[str, Any] = {"step": step}
    if step is None:
        options = {"step": stable_step(dataset), "schedule": falling(epochs)}
    if held_out:
        dataset, test = dataset.split(1 - held_out)
        options["validate"] = rmse_on(test, lambda weights, rows: rows @ weights)
    return Pipeline(
        dataset,
        Training("linear_regression", epochs=epochs, **options),
        shuffle=Choices(assignment, delivery, seed=seed),  # type: ignore[arg-type]  # a name is parsed
        cluster=LocalWorkers(workers),
    )
