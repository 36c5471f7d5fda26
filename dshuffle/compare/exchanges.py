"""Exchanges by themselves: every way of shuffling a dataset, with tasks that only sleep."""

from __future__ import annotations

import time
from collections.abc import Callable

from distributed import Client

from dshuffle.compare.comparison import Way, shuffler_of
from dshuffle.records import EpochRecord
from dshuffle.runtime import Partition
from dshuffle.store import Dataset


def measure_exchanges(
    client: Client,
    dataset: Dataset,
    way: Way,
    *,
    epochs: int = 3,
    training_seconds: float = 0.0,
    cache_fraction: float | None = None,
    seed: int = 0,
    on_epoch: Callable[[int], None] | None = None,
) -> tuple[EpochRecord, ...]:
    """Run the exchanges of a way of shuffling, beside tasks that leave the processors alone.

    Parameters
    ----------
    client
        Client of the cluster.
    dataset
        What is shuffled; any arrays.
    way
        How.
    epochs
        Exchanges, beside the loading of the first epoch.
    training_seconds
        What every worker sleeps in an epoch.
    cache_fraction, seed
        See :class:`dshuffle.Shuffler`.
    on_epoch
        Called with the number of every epoch that has ended.

    Returns
    -------
    tuple of EpochRecord
        One for each exchange; that of the loading is left out.

    Examples
    --------
    >>> import numpy as np
    >>> from distributed import LocalCluster
    >>> from dshuffle import create_dataset
    >>> dataset = create_dataset("memory://doc-measure", {"x": np.arange(100.0)}, overwrite=True)
    >>> way = Way("global + peer", "global", "peer", "random")
    >>> with LocalCluster(2, processes=False, dashboard_address=":0") as cluster, Client(cluster) as client:
    ...     records = measure_exchanges(client, dataset, way, epochs=2)
    >>> [record.epoch for record in records]
    [1, 2]
    """

    def sleep(partition: Partition) -> None:
        time.sleep(training_seconds)

    with shuffler_of(client, dataset, way, cache_fraction=cache_fraction, seed=seed) as shuffler:
        for epoch in shuffler.epochs(epochs + 1):
            client.gather(epoch.map(sleep))
            if on_epoch is not None:
                on_epoch(epoch.number)
    return tuple(shuffler.records[1:])
