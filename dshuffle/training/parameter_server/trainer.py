"""The asynchronous parameter server of paper 002 on Dask actors: workers pull and push, and wait for nobody."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.runtime import Partition, PerRank, Shuffler
from dshuffle.training.fit import EarlyStopping, History, OnEpoch, Recorder, Validate
from dshuffle.training.inputs import EVALUATION_ROWS, check_finite, checked_width, diverged
from dshuffle.training.monitoring import WorkerSpeeds
from dshuffle.training.parameter_server.asynchronous import ONCE, Asynchrony, MiniBatches
from dshuffle.training.parameter_server.models import Model, Parameters, as_rows, check_labels
from dshuffle.training.parameter_server.servers import Servers, answers
from dshuffle.training.parameter_server.simulated import REMEDY
from dshuffle.training.parameter_server.slices import Reply
from dshuffle.training.parameter_server.staleness import Staleness
from dshuffle.training.schedules import CONSTANT, Schedule


def fit_parameter_server(
    shuffler: Shuffler,
    model: Model,
    *,
    epochs: int,
    batch_size: int,
    step: float,
    servers: int = 1,
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
    """Train a model by asynchronous SGD with parameter servers.

    Every worker computes the gradient of a mini-batch at the parameters that it has, pushes it to the servers, which
    apply it at once, and goes on with the parameters that it gets back, whatever the others do.

    Parameters
    ----------
    shuffler
        Any sharding, assignment and delivery. Paper 002 keeps shards fixed: ``assignment="local"`` with
        ``sharding="random"``, ``"stratified:y"`` or a stored distribution-aware one.
    model
        Such as :class:`~dshuffle.training.SoftmaxRegression`; or anything with the methods of
        :class:`~dshuffle.training.Model`.
    epochs
        Passes over as many samples as there are. Those that are broadcast count once per worker, here and in the
        error.
    batch_size, step
        B and alpha, as they would be for a single worker. Each of n workers takes mini-batches of ``WB = B / n`` and
        steps of ``alpha / n``. (In the synchronous trainers ``batch_size`` is what one worker takes, here all do.)
    servers
        Dask actors that share the parameters equally. They are on workers that do not train, if there are any,
        otherwise on those with the lowest ranks, beside training.
    pace
        ``"once"``: an epoch uses every sample once, so that fast workers are done before the others. ``"free"``: an
        epoch has as many updates, but whoever is ready makes the next; fast workers begin their partitions again, and
        samples of slow ones are used less. That is what paper 002 runs, and where shards that differ do harm.
    speeds
        For experiments: relative speeds by rank. The servers then take gradients in the order in which workers of these
        speeds would have them, which makes everything reproducible, but lets fast workers wait. By default workers
        are as fast as they are. Gradients are then applied on the event loop of the server's worker, which does nothing
        else meanwhile: for models of up to some millions of parameters, whose updates take milliseconds.
    seed
        Of the order of each worker's samples, and the model's first parameters.
    features, target
        Arrays of the dataset: ``(q, ...)`` numbers, flattened; ``(q,)`` labels if the model has classes, otherwise
        numbers.
    schedule
        Factor on the step by epoch.
    validate
        Called with the parameters after every epoch; its metrics become the point's ``validation``.
    early_stopping
        When to end before ``epochs``.
    on_epoch
        Called with each epoch's point as soon as it is known.

    Returns
    -------
    History
        ``weights`` are the parameters. A point's ``error`` is the model's mean loss over the whole dataset, which the
        workers evaluate between epochs. ``staleness`` has that of every push. With ``speeds``, ``worker_rates`` are
        samples in a unit of virtual time.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, the arrays are nothing for the model (samples that are not finite are named), a
        mini-batch is larger than a partition, or the parameters diverge.
    ClusterError
        A server is lost.

    Notes
    -----
    An epoch begins when all workers have ended the one before: only then have samples moved. ``"once"`` ends with
    updates of slow workers alone, and ``"free"`` with one of each.

    A push takes one message to each server, and brings the parameters back. With several servers a worker may get one
    part of the parameters from before and another from after an update by somebody else, as with any split server.

    References
    ----------
    Paper 002, sections II-B to II-D, equations 3 to 5.
    """
    as_integer("epochs", epochs, 1)
    as_integer("servers", servers, 1)
    given = None if speeds is None else tuple(map(float, speeds))
    sharing = Asynchrony(shuffler.n_workers, batch_size, step, pace, given, seed)
    arrays = {"features": features, "target": target}
    described = {name: (array.dtype, tuple(array.shape)) for name, array in shuffler.dataset.arrays.items()}
    first = model.first(checked_width(described, model.n_classes, **arrays), seed)
    if servers > len(first):
        raise InvalidParameter.of("servers", servers, f"at most {len(first)}, the number of parameters")
    recorder = Recorder(validate, early_stopping, on_epoch, speeds=WorkerSpeeds(emulated=given is not None))
    pushes: list[list[int]] = [[] for _ in range(shuffler.n_workers)]
    parameters, n_samples = first, 0
    with Servers(shuffler, first, servers, given) as actors:
        for number, epoch in enumerate(shuffler.epochs(epochs)):
            if number == 0:
                found = actors.results(epoch.map(survey, model.n_classes, **arrays))
                n_samples = sum(count for _, count in found)
                if model.n_classes is not None:
                    labels = np.unique(np.concatenate([values for values, _ in found]))
                    check_labels(target, labels, shuffler.dataset.n_samples, model.n_classes)
            actors.begin(sharing.worker_step * schedule(number), sharing.n_updates(n_samples))
            done = PerRank([len(own) for own in pushes])
            worked = actors.results(epoch.map(work, actors.handles, actors.bounds, model, sharing, done, **arrays))
            for own, one in zip(pushes, worked, strict=True):
                own += one.staleness
            recorder.speeds.add([one.rate for one in worked] if given is None else given)
            parameters = actors.parameters()
            if not np.isfinite(parameters).all():
                raise diverged(step, number, remedy=REMEDY)
            loss, count = np.sum(actors.results(epoch.map(total_loss, model, parameters, **arrays)), axis=0)
            if not np.isfinite(loss):
                raise diverged(step, number, remedy=REMEDY)
            if recorder.add(parameters, float(loss / count)):
                break
    return recorder.history(parameters, staleness=Staleness.of(pushes))


class Work(NamedTuple):
    """What a worker did in an epoch: the staleness of each of its pushes, and its samples a second."""

    staleness: list[int]
    rate: float


def work(
    partition: Partition,
    servers: Sequence[Any],
    bounds: Sequence[slice],
    model: Model,
    sharing: Asynchrony,
    done: int,
    *,
    features: str,
    target: str,
) -> Work:
    """An epoch's mini-batches of a worker; a task on each.

    Parameters
    ----------
    partition
        Its samples.
    servers, bounds
        Actors, and which parameters each has.
    model, sharing
        What is trained, and how.
    done
        Mini-batches in earlier epochs.
    features, target
        Names of arrays.
    """
    sharing.check_partition(partition.shares[0])
    batches = MiniBatches(partition.sample_ids, sharing, rank=partition.rank, epoch=partition.epoch, done=done)
    following = batches.following
    replies: list[Reply] = answers(servers, [server.pull(partition.rank, following) for server in servers])
    staleness: list[int] = []
    samples, started = 0, time.perf_counter()
    while replies[0].more:
        parameters = np.concatenate([reply.parameters for reply in replies]) if len(servers) > 1 else replies[0][0]
        batch = partition.take(batches.take(), (features, target))
        # Values that are not finite are told in the end, by the client.
        with np.errstate(over="ignore", invalid="ignore"):
            gradient, _ = model.gradient(parameters, as_rows(batch[features]), batch[target])
        samples, following = samples + following, batches.following
        pushed = [
            server.push(partition.rank, reply.version, gradient[part], following)
            for server, reply, part in zip(servers, replies, bounds, strict=True)
        ]
        replies = answers(servers, pushed)
        staleness.append(max(reply.staleness for reply in replies))
    return Work(staleness, samples / max(time.perf_counter() - started, 1e-9))


def survey(partition: Partition, n_classes: int | None, *, features: str, target: str) -> tuple[NDArray[Any], int]:
    """A partition's distinct labels, none if the model has no classes, and its samples; a task on each worker.

    Raises
    ------
    InvalidParameter
        A sample is not finite.
    """
    labels, first = [], 0
    for batch in partition.batches(EVALUATION_ROWS):
        for parameter, name in (("features", features), ("target", target)):
            check_finite(parameter, name, batch[name], partition.sample_ids[first:])
        labels.append(np.unique(batch[target][: 0 if n_classes is None else None]))
        first += len(batch[target])
    return np.unique(np.concatenate(labels)), len(partition)


def total_loss(
    partition: Partition, model: Model, parameters: Parameters, *, features: str, target: str
) -> tuple[float, int]:
    """The sum of the losses of a partition's samples, and how many those are: the evaluator; a task on each worker."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in partition.batches(EVALUATION_ROWS):
            total += model.loss(parameters, as_rows(batch[features]), batch[target]) * len(batch[target])
    return total, len(partition)
