"""Train a softmax regression with asynchronous parameter servers and unequal workers, on random or stratified shards.

dshuffle run pipelines/parameter_server.py url=classes.zarr classes=10 epochs=20 --report report
for seed in 0 1 2 3 4; do dshuffle run pipelines/parameter_server.py url=mnist.zarr classes=10 seed=$seed; done
"""

from __future__ import annotations

from dshuffle import Choices, Local, Pipeline, Training, open_dataset
from dshuffle.compare import Way
from dshuffle.pipeline import LocalWorkers
from dshuffle.training import SoftmaxRegression, accuracy_on, geometric_speeds


def pipeline(
    url: str,
    classes: int,
    workers: int = 4,
    epochs: int = 10,
    batch_size: int = 128,
    step: float = 0.1,
    ratio: float = 10.0,
    seed: int = 0,
    held_out: float = 0.1,
) -> Pipeline:
    """Keep the first shards, of the arrays x and the labels y, in all epochs (Provatas et al., 2021, section IV).

    ``ratio`` is the speed of the fastest worker over that of the slowest one, whose samples are used least.
    """
    dataset, test = open_dataset(url).split(1 - held_out)
    model = SoftmaxRegression(classes)
    options = {"speeds": geometric_speeds(workers, ratio), "validate": accuracy_on(test, model.predict)}
    return Pipeline(
        dataset,
        Training(
            "parameter_server", epochs=epochs, model=model, pace="free", batch_size=batch_size, step=step, **options
        ),
        shuffle=[Way(name, Choices(Local(), sharding=name, seed=seed)) for name in ("random", "stratified:y")],
        cluster=LocalWorkers(workers),
    )
