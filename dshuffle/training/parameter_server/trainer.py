"""Asynchronous parameter server on Dask actors: workers pull and push without waiting for each other."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning import GivenSharding
from dshuffle.runtime import Epoch, Partition, PerRank, Shuffler
from dshuffle.training.fit import EarlyStopping, History, OnEpoch, Recorder, Validate, raises_once
from dshuffle.training.inputs import EVALUATION_ROWS, check_finite, check_fixed_workers, checked_width, diverged
from dshuffle.training.monitoring import WorkerSpeeds
from dshuffle.training.parameter_server.asynchronous import ONCE, Asynchrony, MiniBatches
from dshuffle.training.parameter_server.models import Model, Parameters, as_rows, check_labels
from dshuffle.training.parameter_server.servers import Servers, answers
from dshuffle.training.parameter_server.simulated import REMEDY
from dshuffle.training.parameter_server.slices import Reply
from dshuffle.training.parameter_server.staleness import Staleness
from dshuffle.training.schedules import CONSTANT, Schedule


@raises_once
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

    Every worker computes the gradient of a mini-batch at its current parameters and pushes it to the servers. The
    servers apply it at once and return the new parameters. The worker goes on with them, without waiting for other
    workers.

    Parameters
    ----------
    shuffler
        Shuffler with any sharding, assignment and delivery. Provatas et al. (2021) keep the first assignment in all
        epochs: ``assignment="local"`` with ``sharding="random"``, ``"stratified:y"`` or a stored distribution-aware
        one.
    model
        Model such as :class:`~dshuffle.training.SoftmaxRegression`, or any object with the methods of
        :class:`~dshuffle.training.Model`.
    epochs
        Number of passes over all samples. With broadcast samples, an epoch of the pace ``"free"`` has as many updates
        as without them (Provatas et al., section IV-B), and one of ``"once"`` has more, because each worker uses its
        copies. In the error, broadcast samples count once for each worker.
    batch_size, step
        Batch size B and step alpha of a single worker. Each of n workers takes mini-batches of ``WB = B / n`` samples,
        rounded down, and steps of ``alpha / n``. (In the synchronous trainers ``batch_size`` is for one worker. Here it
        is for all workers together.)
    servers
        Number of Dask actors that share the parameters equally. They run on workers that do not train, if there are
        any, otherwise on the workers with the lowest ranks, beside training.
    pace
        ``"once"``: an epoch uses every sample once, so fast workers finish before the others. ``"free"``: an epoch has
        the same number of updates, but each is made by whichever worker is ready. Fast workers start their share again,
        and samples of slow workers are used less. Provatas et al. (2021) use this pace. At this pace, differences
        between shares do harm.
    speeds
        Relative speeds by rank, for experiments. The servers then apply gradients in the order in which workers of
        these speeds would push them. This makes the result reproducible, but fast workers have to wait. Gradients are
        then applied on the event loop of the server's worker, which does nothing else meanwhile. This suits models of
        up to some millions of parameters, whose updates take milliseconds. By default workers run at their real speed.
    seed
        Seed of the order of each worker's samples, and of the model's initial parameters.
    features, target
        Names of arrays in the dataset: ``(q, ...)`` numbers, flattened; ``(q,)`` labels if the model has classes,
        otherwise numbers.
    schedule
        Factor on the step by epoch.
    validate
        Function that is called with the parameters after every epoch. The metrics that it returns become the point's
        ``validation``.
    early_stopping
        Rule that ends the fit before ``epochs``.
    on_epoch
        Function that is called with the :class:`~dshuffle.report.TrainingPoint` of each epoch as soon as it is known.

    Returns
    -------
    History
        ``model`` is the vector of parameters. A point's ``error`` is the mean loss over the whole dataset, which the
        workers evaluate between epochs. ``staleness`` counts every push. With ``speeds``, ``worker_rates`` are samples
        per unit of virtual time.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, the arrays do not suit the model, samples are not finite (the message names one), a
        mini-batch is larger than a share, or the parameters diverge.
    WorkerLost
        A worker or a server is lost, and the epoch could not be trained again.

    Notes
    -----
    An epoch starts when all workers have finished the previous one, because samples move only then. An epoch of
    ``"once"`` ends with updates from slow workers only; an epoch of ``"free"`` ends with one update from each worker.

    If a worker or a server is lost, the epoch starts again on all workers, with new servers and from the parameters at
    its beginning. So no gradient is applied twice.

    A push takes one message to each server and returns the parameters. With several servers, a worker may get one slice
    of the parameters from before another worker's update and another slice from after it, as with any split server.

    References
    ----------
    Provatas et al. (2021), sections II-B to II-D, equations 3 to 5; see docs/papers.md.
    """
    as_integer("epochs", epochs, 1)
    as_integer("servers", servers, 1)
    rates = None if speeds is None else tuple(map(float, speeds))
    check_fixed_workers(shuffler, "fit_parameter_server")
    sharing = Asynchrony(shuffler.n_workers, batch_size, step, pace, rates, seed)
    sharing.warn_of_rounding()
    arrays = {"features": features, "target": target}
    described = {name: (array.dtype, tuple(array.shape)) for name, array in shuffler.dataset.arrays.items()}
    first = model.first(checked_width(described, model.n_classes, **arrays), seed)
    if servers > len(first):
        raise InvalidParameter.of("servers", servers, f"at most {len(first)}, the number of parameters")
    recorder = Recorder(validate, early_stopping, on_epoch, speeds=WorkerSpeeds(emulated=rates is not None))
    pushes: list[list[int]] = [[] for _ in range(shuffler.n_workers)]
    parameters = recorder.begin(shuffler, "fit_parameter_server", first, batch_size=batch_size, step=step)
    n_samples = 0
    with Servers(shuffler, parameters, servers, rates) as actors:
        for number, epoch in recorder.epochs(shuffler, epochs):
            if not n_samples:
                surveys = actors.results(epoch.map(survey, model.n_classes, **arrays))
                n_samples = without_copies(shuffler, sum(count for _, count in surveys))
                if model.n_classes is not None:
                    labels = np.unique(np.concatenate([values for values, _ in surveys]))
                    check_labels(target, labels, shuffler.dataset.n_samples, model.n_classes)
            done = PerRank([len(own) for own in pushes])
            train = functools.partial(_train, actors, epoch, model, sharing, schedule(number), n_samples, done, arrays)
            worked, parameters = actors.attempt(parameters, train)
            n_samples = shuffler.dataset.n_samples  # the first epoch of a resumed session has fewer
            for own, result in zip(pushes, worked, strict=True):
                own += result.staleness
            recorder.speeds.add(
                [result.rate for result in worked] if rates is None else rates,
                seconds=max(result.seconds for result in worked),
            )
            if not np.isfinite(parameters).all():
                raise diverged(step, number, remedy=REMEDY)
            loss, count = np.sum(actors.results(epoch.map(total_loss, model, parameters, **arrays)), axis=0)
            if not np.isfinite(loss):
                raise diverged(step, number, remedy=REMEDY)
            if recorder.add(parameters, float(loss / count)):
                break
    return recorder.history(parameters, staleness=Staleness.of(pushes), batch_size=sharing.rounded_batch)


def _train(
    actors: Servers,
    epoch: Epoch,
    model: Model,
    sharing: Asynchrony,
    factor: float,
    n_samples: int,
    done: PerRank,
    arrays: Mapping[str, str],
) -> tuple[list[Work], Parameters]:
    """Train one epoch, and return what each worker has done and the new parameters."""
    actors.begin(sharing.worker_step * factor, sharing.n_updates(n_samples))
    futures = epoch.map(work, actors.handles, actors.bounds, model, sharing, done, **arrays)
    worked = actors.results(futures)
    epoch.forget(futures)  # if a worker is lost from here on, its part of the epoch is not trained again
    return worked, actors.parameters()


def without_copies(shuffler: Shuffler, trained: int) -> int:
    """Number of samples among those that workers train on, without the copies of samples that all of them have."""
    sharding, q = shuffler.choices.sharding, shuffler.dataset.n_samples
    broadcast = sharding.n_broadcast if isinstance(sharding, GivenSharding) else 0
    return -(-trained * q // (q + (shuffler.n_workers - 1) * broadcast))


class Work(NamedTuple):
    """Work of a worker in an epoch: the staleness of each push, samples per second, and seconds."""

    staleness: list[int]
    rate: float
    seconds: float


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
    """Train on a worker's mini-batches of an epoch. Runs as a task on each worker.

    Parameters
    ----------
    partition
        Partition with the samples.
    servers, bounds
        Actors, and the slice of the parameters that each has.
    model, sharing
        Model, and the parameters of the training.
    done
        Number of mini-batches in earlier epochs.
    features, target
        Names of the arrays.
    """
    partition.mark_trained(0)
    # A small share among unequal ones is a batch of its own.
    sharing.check_partition(partition.shares[1 if partition.unequal else 0])
    batches = MiniBatches(partition.sample_ids, sharing, rank=partition.rank, epoch=partition.epoch, done=done)
    following = batches.following
    replies: list[Reply] = answers(servers, [server.pull(partition.rank, following) for server in servers])
    staleness: list[int] = []
    samples, waiting, started = 0, 0.0, time.perf_counter()
    while replies[0].more:
        parameters = np.concatenate([reply.parameters for reply in replies]) if len(servers) > 1 else replies[0][0]
        batch = partition.take(batches.take(), (features, target))
        # The client detects values that are not finite at the end of the epoch.
        with np.errstate(over="ignore", invalid="ignore"):
            gradient, _ = model.gradient(parameters, as_rows(batch[features]), batch[target])
        samples, following = samples + following, batches.following
        pushed = [
            server.push(partition.rank, reply.version, gradient[part], following)
            for server, reply, part in zip(servers, replies, bounds, strict=True)
        ]
        pushing_ended = time.perf_counter()
        replies = answers(servers, pushed)
        waiting += time.perf_counter() - pushing_ended
        staleness.append(max(reply.staleness for reply in replies))
    partition.mark_trained()
    partition.note_waiting(waiting)
    seconds = max(time.perf_counter() - started, 1e-9)
    return Work(staleness, samples / seconds, seconds)


def survey(partition: Partition, n_classes: int | None, *, features: str, target: str) -> tuple[NDArray[Any], int]:
    """Return a partition's distinct labels (none if the model has no classes) and its number of samples.

    Runs as a task on each worker.

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
    return np.unique(np.concatenate(labels)) if labels else np.empty(0), len(partition)


def total_loss(
    partition: Partition, model: Model, parameters: Parameters, *, features: str, target: str
) -> tuple[float, int]:
    """Return the sum of the losses of a partition's samples, and their number. Runs as a task on each worker."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in partition.batches(EVALUATION_ROWS):
            total += model.loss(parameters, as_rows(batch[features]), batch[target]) * len(batch[target])
    return total, len(partition)
