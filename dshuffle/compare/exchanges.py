"""Measure exchanges alone: any way of shuffling a dataset, with tasks that only sleep."""

from __future__ import annotations

import time

from distributed import Client

from dshuffle.compare.comparison import shuffler_of
from dshuffle.compare.ways import Way
from dshuffle.records import EpochRecord
from dshuffle.runtime import Partition
from dshuffle.store import Dataset


def measure_exchanges(
    client: Client, dataset: Dataset, way: Way, *, epochs: int = 3, training_seconds: float = 0.0
) -> tuple[EpochRecord, ...]:
    """Run the exchanges of a way of shuffling beside tasks that only sleep.

    Parameters
    ----------
    client
        Client of the cluster.
    dataset
        Dataset to shuffle, with any arrays.
    way
        Way of shuffling.
    epochs
        Number of exchanges, not counting the loading of epoch 0.
    training_seconds
        Seconds that every worker sleeps in an epoch.

    Returns
    -------
    tuple of EpochRecord
        One record for each exchange. The record of the loading is left out.

    Examples
    --------
    >>> import numpy as np
    >>> from distributed import LocalCluster
    >>> from dshuffle import Choices, create_dataset
    >>> dataset = create_dataset("memory://doc-measure", {"x": np.arange(100.0)}, overwrite=True)
    >>> way = Way("global + peer", Choices("global"))
    >>> with LocalCluster(2, processes=False, dashboard_address=":0") as cluster, Client(cluster) as client:
    ...     records = measure_exchanges(client, dataset, way, epochs=2)
    >>> [record.epoch for record in records]
    [1, 2]
    """

    def sleep(partition: Partition) -> None:
        time.sleep(training_seconds)

    with shuffler_of(client, dataset, way) as shuffler:
        for epoch in shuffler.epochs(epochs + 1):
            client.gather(epoch.map(sleep))
    return tuple(shuffler.records[1:])
