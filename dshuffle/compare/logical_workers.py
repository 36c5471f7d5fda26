"""Synchronous SGD of many workers in one process, to study how shuffling affects learning without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, ShuffleSpec, parse_assignment
from dshuffle.planning.mixing import orders_of_first_epochs
from dshuffle.training.fit import CONSTANT, EarlyStopping, History, OnEpoch, Recorder, Schedule, Validate
from dshuffle.training.inputs import check_step, diverged
from dshuffle.training.synchronous import MOMENTUM, Network, TrainedNetwork, checked_batch, checked_batching


def fit_logical_workers(
    arrays: Mapping[str, NDArray[Any]],
    network: Network,
    *,
    n_workers: int,
    assignment: str = "global",
    sharding: str = "random",
    every: int = 1,
    between: str = "redraw",
    shuffle_seed: int = 0,
    epochs: int,
    batch_size: int,
    step: float,
    seed: int = 0,
    start: TrainedNetwork | None = None,
    features: str = "x",
    target: str = "y",
    schedule: Schedule = CONSTANT,
    validate: Validate[TrainedNetwork] | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
) -> History[TrainedNetwork]:
    """Compute the result of :func:`fit_synchronous_sgd` on ``n_workers`` workers, all in this process.

    The mini-batches of all workers go into one call of :meth:`Network.gradient`. This suits studies of how a way of
    shuffling learns, with many workers, seeds and ways. Samples are not exchanged, and the measured seconds are
    meaningless.

    Parameters
    ----------
    arrays
        Mapping from name to array: the dataset.
    n_workers, assignment, sharding, every, between, shuffle_seed
        Options of the :class:`dshuffle.Shuffler` to emulate. Its plans say which worker trains on which samples, and
        when. There is no dataset with labels or stored shardings, so ``sharding`` is one of
        :data:`dshuffle.planning.SHARDINGS`.
    start
        Trained network of the same shape to begin with. By default, parameters are drawn from ``seed``.
    network, epochs, batch_size, step, seed, features, target, schedule, validate, early_stopping, on_epoch
        See :func:`fit_synchronous_sgd`.

    Returns
    -------
    History
        See :func:`fit_synchronous_sgd`. The numbers are the same up to the rounding of sums.

    Raises
    ------
    InvalidParameter
        See :func:`fit_synchronous_sgd`; also if the arrays differ in length, or ``start`` has another shape.

    Examples
    --------
    >>> arrays = {"x": np.eye(12), "y": np.arange(12) % 3}
    >>> history = fit_logical_workers(arrays, Network((12, 3)), n_workers=4, epochs=30, batch_size=3, step=3.0)
    >>> history.points[-1].error
    0.0
    """
    as_integer("epochs", epochs, 1)
    check_step(step)
    ids = np.arange(len(next(iter(arrays.values()))))
    rows, labels = checked_batch(network, arrays, features, target, ids)
    if len(rows) != len(labels):
        raise InvalidParameter.of(f"len({target})", len(labels), f"{len(rows)}, the length of {features}")
    spec = ShuffleSpec(
        len(rows),
        n_workers,
        Choices(
            parse_assignment(assignment),
            "storage",
            sharding=sharding,
            every=every,
            between=between,
            seed=shuffle_seed,
        ),
    )
    if start is not None and start.network != network:
        raise InvalidParameter.of("start", start, f"a trained {network}")
    initial = TrainedNetwork(network, network.first_parameters(as_integer("seed", seed)), network.first_statistics())
    model = start or initial
    parameters, statistics = model.parameters, model.statistics
    recorder: Recorder[TrainedNetwork] = Recorder(validate, early_stopping, on_epoch)
    for number, orders in enumerate(orders_of_first_epochs(spec, epochs)):
        counts = [len(order) for order in orders]
        shares = min(counts), max(counts)
        batchings = [checked_batching(network, count, shares, batch_size) for count in counts]
        for turn in range(len(batchings[0])):
            batches = [order[batching.positions(turn)] for order, batching in zip(orders, batchings, strict=True)]
            starts = np.cumsum([0, *map(len, batches[:-1])])
            chosen = np.concatenate(batches)
            with np.errstate(over="ignore", invalid="ignore"):
                _, gradient, seen = network.gradient(parameters, rows[chosen], labels[chosen], starts)
                parameters = parameters - step * schedule(number) * gradient
            if network.n_statistics:
                # Running statistics are linear: their mean over workers is the running statistic of the mean.
                statistics = (1 - MOMENTUM) * statistics + MOMENTUM * np.average(seen, axis=0, weights=counts)
        model = TrainedNetwork(network, parameters, statistics)
        if not (np.isfinite(parameters).all() and np.isfinite(statistics).all()):
            raise diverged(step, number)
        if recorder.add(model, float(np.mean(model.predict(rows) != labels))):
            break
    return recorder.history(model)
