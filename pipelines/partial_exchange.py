"""Train a network by synchronous SGD, and exchange none, some or all of the samples before every epoch.

dshuffle run pipelines/partial_exchange.py url=classes.zarr classes=10 epochs=20 --report report
dshuffle run pipelines/partial_exchange.py url=mnist.zarr classes=10  # made by pipelines/real_data.py
"""

from __future__ import annotations

from dshuffle import Choices, Pipeline, Training, open_dataset
from dshuffle.pipeline import LocalWorkers
from dshuffle.planning import Global, Local, Partial
from dshuffle.training import Network, TrainedNetwork, accuracy_on


def pipeline(
    url: str,
    classes: int,
    workers: int = 4,
    epochs: int = 10,
    batch_size: int = 32,
    step: float = 0.1,
    hidden: int = 64,
    held_out: float = 0.1,
) -> Pipeline:
    """Begin with contiguous shards of the arrays x and the labels y (Nguyen et al., 2022, Figure 5)."""
    dataset, test = open_dataset(url).split(1 - held_out)
    network = Network((*dataset.arrays["x"].shape, hidden, classes))
    options = {"batch_size": batch_size, "step": step, "validate": accuracy_on(test, TrainedNetwork.predict)}
    assignments = (Local(), Partial(0.1), Partial(0.3), Global())
    return Pipeline(
        dataset,
        Training("synchronous_sgd", epochs=epochs, network=network, **options),
        shuffle=[Choices(one, sharding="contiguous") for one in assignments],
        cluster=LocalWorkers(workers),
    )
