"""Train a linear regression on a dataset that is shuffled between the workers before every epoch.

dshuffle run pipelines/linear_regression.py url=/data/keyed.zarr epochs=5
dshuffle run pipelines/linear_regression.py url=s3://bucket/keyed.zarr --scheduler tcp://head-node:8786
"""

from __future__ import annotations

from dshuffle import Choices, Pipeline, Training, open_dataset
from dshuffle.compare import modest_step
from dshuffle.pipeline import LocalWorkers


def pipeline(
    url: str,
    workers: int = 4,
    epochs: int = 5,
    assignment: str = "global",
    delivery: str = "peer",
    seed: int = 0,
    step: float | None = None,
) -> Pipeline:
    """Fit y = x @ weights on the dataset at a URL (Chung et al., 2017, section 5.1)."""
    dataset = open_dataset(url)
    return Pipeline(
        dataset,
        Training("linear_regression", epochs=epochs, step=modest_step(dataset) if step is None else step),
        shuffle=Choices(assignment, delivery, seed=seed),  # type: ignore[arg-type]  # a name is parsed
        cluster=LocalWorkers(workers),
    )
