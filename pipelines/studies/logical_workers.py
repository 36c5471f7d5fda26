"""Synchronous SGD of many workers in one process, to study how shuffling affects learning without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle import create_dataset
from dshuffle.compare import SimulatedCluster
from dshuffle.planning import Choices
from dshuffle.training import CONSTANT, Network, Schedule, TrainedNetwork

MOMENTUM = 0.1
"""Weight of a mini-batch in the running statistics, as in ``fit_synchronous_sgd``."""


def fit_logical_workers(
    arrays: Mapping[str, NDArray[Any]],
    network: Network,
    choices: Choices,
    *,
    n_workers: int,
    epochs: int,
    batch_size: int,
    step: float,
    seed: int = 0,
    start: TrainedNetwork | None = None,
    schedule: Schedule = CONSTANT,
) -> TrainedNetwork:
    """Compute what ``fit_synchronous_sgd`` computes on ``n_workers`` workers, up to the rounding of sums.

    ``start`` is a network to begin with; by default, parameters are drawn from ``seed``.
    """
    rows, labels = arrays["x"], arrays["y"].astype(np.int64)
    numbers = create_dataset("memory://logical-workers", {"number": np.arange(len(rows))}, overwrite=True)
    first = start or TrainedNetwork(network, network.first_parameters(seed), network.first_statistics())
    parameters, statistics = first.parameters, first.statistics
    for epoch in SimulatedCluster.of(numbers, n_workers).session(choices).epochs(epochs):
        counts = [len(order) for order in epoch.orders]
        n_steps = -(-max(counts) // batch_size)
        for turn in range(n_steps):
            places = [(count * turn // n_steps, count * (turn + 1) // n_steps) for count in counts]
            batches = [order[begin:end] for order, (begin, end) in zip(epoch.orders, places, strict=True)]
            means = [network.gradient(parameters, rows[batch], labels[batch])[1:] for batch in batches]
            gradients, seen = zip(*means, strict=True)
            gradient = np.average(gradients, axis=0, weights=list(map(len, batches)))
            parameters = parameters - step * schedule(epoch.number) * gradient
            if network.n_statistics:  # the mean of running statistics is the running statistic of the mean
                statistics = (1 - MOMENTUM) * statistics + MOMENTUM * np.average(seen, axis=0, weights=counts)
    return TrainedNetwork(network, parameters, statistics)
