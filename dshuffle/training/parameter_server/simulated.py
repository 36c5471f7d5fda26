"""Simulation of the asynchronous parameter server: the same updates in one process and in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer, as_ranks
from dshuffle.errors import InvalidParameter
from dshuffle.sharding import Sharding
from dshuffle.training.fit import EarlyStopping, History, OnEpoch, Recorder, Validate
from dshuffle.training.inputs import check_finite, checked_width, diverged
from dshuffle.training.monitoring import WorkerSpeeds
from dshuffle.training.parameter_server.asynchronous import ONCE, Asynchrony, MiniBatches
from dshuffle.training.parameter_server.models import Model, Parameters, as_rows, check_labels
from dshuffle.training.parameter_server.slices import ParameterSlice, Turns
from dshuffle.training.parameter_server.staleness import Staleness
from dshuffle.training.schedules import CONSTANT, Schedule

REMEDY = "take a smaller step, fewer workers, or scale the features"


def simulate_parameter_server(
    arrays: Mapping[str, NDArray[Any]],
    ranks: ArrayLike | Sharding,
    model: Model,
    *,
    epochs: int,
    batch_size: int,
    step: float,
    pace: str = ONCE,
    speeds: Sequence[float] | None = None,
    seed: int = 0,
    features: str = "x",
    target: str = "y",
    schedule: Schedule = CONSTANT,
    validate: Validate[Parameters] | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
) -> History[Parameters]:
    """Simulate :func:`fit_parameter_server` in one process, for workers of given speeds and fixed shares.

    Parameters
    ----------
    arrays
        Mapping from name to array, with all samples.
    ranks
        ``(q,)`` ranks that train on each sample, in all epochs (``assignment="local"``), or a sharding, which may have
        broadcast samples.
    model, epochs, batch_size, step, pace, seed, features, target, schedule, validate, early_stopping, on_epoch
        See :func:`fit_parameter_server`.
    speeds
        Relative speeds by rank. By default all workers are equally fast.

    Returns
    -------
    History
        Bit for bit the result of :func:`fit_parameter_server` with the same ``speeds`` (all 1 if none are given) and a
        shuffler with this sharding. Only the seconds differ, and the error: it is summed in another order, and counts
        broadcast samples once.

    Raises
    ------
    InvalidParameter
        See :func:`fit_parameter_server`; also if the arrays and ``ranks`` do not have the same number of samples.

    Examples
    --------
    >>> from dshuffle.training import LinearModel
    >>> x = np.random.default_rng(0).standard_normal((100, 2))
    >>> history = simulate_parameter_server(
    ...     {"x": x, "y": x @ [1, 2]}, np.arange(100) % 2, LinearModel(), epochs=20, batch_size=10, step=0.3
    ... )
    >>> history.model.round(2) + 0
    array([1., 2., 0.])
    """
    given_ranks, broadcast = (ranks.ranks, ranks.broadcast) if isinstance(ranks, Sharding) else (ranks, ())
    checked = as_ranks("ranks", given_ranks, 2**31)
    n_workers = ranks.n_workers if isinstance(ranks, Sharding) else int(checked.max(initial=0)) + 1
    as_integer("epochs", epochs, 1)
    emulated = (1.0,) * n_workers if speeds is None else tuple(map(float, speeds))
    sharing = Asynchrony(n_workers, batch_size, step, pace, emulated, seed)
    sharing.warn_of_rounding()
    described = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
    checked_width(described, model.n_classes, features=features, target=target)
    for parameter, name in (("features", features), ("target", target)):
        if (shape := arrays[name].shape)[:1] != checked.shape:
            allowed = f"an array of {len(checked)} samples, the length of ranks (its shape is {shape})"
            raise InvalidParameter.of(parameter, name, allowed)
        check_finite(parameter, name, arrays[name], np.arange(len(checked)))
    rows, targets = as_rows(arrays[features]), arrays[target]
    if model.n_classes is not None:
        check_labels(target, np.unique(targets), len(targets), model.n_classes)
    everywhere = np.zeros(len(checked), np.bool_)
    everywhere[np.asarray(broadcast, np.int64)] = True
    shards = [np.flatnonzero((checked == rank) | everywhere) for rank in range(n_workers)]
    sharing.check_partition(min(map(len, shards)))
    server = ParameterSlice(model.first(rows.shape[1], seed))
    pushes: list[list[int]] = [[] for _ in shards]
    recorder = Recorder(validate, early_stopping, on_epoch, speeds=WorkerSpeeds(emulated=True))
    for epoch in range(epochs):
        server.begin(sharing.worker_step * schedule(epoch), sharing.n_updates(len(rows)))
        batches = [
            MiniBatches(shard, sharing, rank=rank, epoch=epoch, done=len(pushes[rank]))
            for rank, shard in enumerate(shards)
        ]
        recorder.speeds.add(emulated, seconds=0.0)
        turns = Turns(emulated)
        replies = []
        for rank, own in enumerate(batches):
            replies.append(server.pull(rank, own.following))
            turns.begin(rank, own.following)
        while (ready := turns.next()) is not None:
            turns.finish()
            batch = shards[ready][batches[ready].take()]
            # Values that are not finite are detected at the end of the epoch.
            with np.errstate(over="ignore", invalid="ignore"):
                gradient, _ = model.gradient(replies[ready].parameters, rows[batch], targets[batch])
            following = batches[ready].following
            replies[ready] = server.push(ready, replies[ready].version, gradient, following)
            pushes[ready].append(replies[ready].staleness)
            if replies[ready].more:
                turns.begin(ready, following)
        parameters = server.parameters()
        with np.errstate(over="ignore", invalid="ignore"):
            loss = model.loss(parameters, rows, targets)
        if not (np.isfinite(loss) and np.isfinite(parameters).all()):
            raise diverged(step, epoch, remedy=REMEDY)
        if recorder.add(parameters, loss):
            break
    return recorder.history(server.parameters(), staleness=Staleness.of(pushes), batch_size=sharing.rounded_batch)
