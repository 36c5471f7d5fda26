"""Train a softmax regression with asynchronous parameter servers, from random and from stratified shards.

dshuffle run pipelines/parameter_server.py url=classes.zarr classes=10 epochs=20 --report report
"""

from __future__ import annotations

from dshuffle import Choices, Local, Pipeline, Training, open_dataset
from dshuffle.compare import Way
from dshuffle.pipeline import LocalWorkers
from dshuffle.training import SoftmaxRegression


def pipeline(
    url: str, classes: int, workers: int = 4, epochs: int = 10, batch_size: int = 128, step: float = 0.1, seed: int = 0
) -> Pipeline:
    """Keep the first shards, of the arrays x and the labels y, in all epochs (Provatas et al., 2021, section IV)."""
    return Pipeline(
        open_dataset(url),
        Training(
            "parameter_server",
            epochs=epochs,
            model=SoftmaxRegression(classes),
            batch_size=batch_size,
            step=step,
            pace="free",
        ),
        shuffle=[Way(name, Choices(Local(), sharding=name, seed=seed)) for name in ("random", "stratified:y")],
        cluster=LocalWorkers(workers),
    )
