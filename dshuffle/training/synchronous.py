"""Synchronous SGD: gradients are averaged over all workers in every step (paper 004, equation 1)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning.batching import UNEVEN, Batching
from dshuffle.runtime import Group, Partition, Shuffler, gathered
from dshuffle.training.fit import EarlyStopping, History, OnEpoch, Recorder, Validate
from dshuffle.training.inputs import EVALUATION_ROWS, check_names, check_step, diverged
from dshuffle.training.mlp import MOMENTUM, Labels, Network, TrainedNetwork
from dshuffle.training.monitoring import EpochBreakdown, PhaseSeconds, with_records
from dshuffle.training.parallel_sgd import checked_rows
from dshuffle.training.schedules import CONSTANT, Schedule


def fit_synchronous_sgd(
    shuffler: Shuffler,
    network: Network,
    *,
    epochs: int,
    batch_size: int,
    step: float,
    seed: int = 0,
    features: str = "x",
    target: str = "y",
    schedule: Schedule = CONSTANT,
    validate: Validate[TrainedNetwork] | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
) -> History[TrainedNetwork]:
    """Train a network by SGD; in every step each worker takes a mini-batch, and gradients are averaged over all.

    Parameters
    ----------
    shuffler
        Any sharding, assignment and delivery.
    network
        Its shape; the parameters are drawn from ``seed``.
    epochs
        Passes over the whole dataset.
    batch_size
        Samples of one worker in one step, at most; no more than the smallest partition has. Every sample is trained
        on exactly once an epoch: a worker with r samples takes ``ceil(largest partition / batch_size)`` mini-batches
        of them, equally many on all workers, which differ by one sample at most. (In :func:`fit_parameter_server` it is
        what all workers take together.)
    step
        Step of the first epoch.
    seed
        Of the first parameters.
    features, target
        Arrays of the dataset: ``(q, features)`` numbers and ``(q,)`` integer (or boolean) labels from 0.
    schedule
        Factor on the step by epoch.
    validate
        Called with the network after every epoch; its metrics become the point's ``validation``.
    early_stopping
        When to end before ``epochs``.
    on_epoch
        Called with each epoch's point as soon as it is known.

    Returns
    -------
    History
        ``weights`` is the :class:`TrainedNetwork`. A point's ``error`` is the fraction of wrong labels over the whole
        dataset after the epoch, by the running statistics. ``breakdown`` says where the seconds went.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, the arrays are nothing for the network (named by sample, where it is one), or the
        parameters diverge.
    WorkerLost
        A worker has left the cluster.

    Notes
    -----
    Gradients are weighted by samples, so that a step is the one of equation 1 also where mini-batches differ in size.
    They meet on the worker of rank 0 (see :meth:`dshuffle.Epoch.together`): its link carries the gradients of all
    workers in every step, which suits networks of up to a million parameters or so. For larger ones take
    :func:`dshuffle.training.torch_ddp.fit_torch_ddp`.

    Batch norm is every worker's own: it normalises over the worker's mini-batch, as is usual. That is why the samples
    that a worker has matter at all. Without batch norm the averaged gradient does not depend on who has which sample of
    the global mini-batch. Running statistics are averaged over the workers at the end of the epoch.

    All workers wait for the slowest one in every step; one that is much slower than the others is logged.

    References
    ----------
    Paper 004 (Nguyen et al., IPDPS 2022), equation 1 and Figure 5.

    Examples
    --------
    >>> import dshuffle
    >>> from distributed import Client
    >>> from dshuffle.synthetic import gaussian_blobs
    >>> dataset = dshuffle.create_dataset("memory://doc-sync", gaussian_blobs(400, n_features=5, n_classes=4))
    >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
    ...     with dshuffle.Shuffler(client, dataset) as shuffler:
    ...         history = fit_synchronous_sgd(shuffler, Network((5, 8, 4)), epochs=2, batch_size=20, step=0.3)
    >>> len(history.points), len(history.breakdown[0].ranks)
    (2, 2)
    """
    as_integer("epochs", epochs, 1)
    as_integer("batch_size", batch_size, 1)
    check_step(step)
    model = TrainedNetwork(network, network.first_parameters(as_integer("seed", seed)), network.first_statistics())
    recorder: Recorder[TrainedNetwork] = Recorder(validate, early_stopping, on_epoch)
    breakdown: dict[int, EpochBreakdown] = {}  # by the shuffler's numbers of epochs
    names = {"features": features, "target": target}
    for number, epoch in enumerate(shuffler.epochs(epochs)):
        done = epoch.together(train, model, batch_size, step * schedule(number), **names)
        [model] = [one for one, _, _ in done if one is not None]
        recorder.speeds.add([count / max(seconds.own, 1e-9) for _, count, seconds in done])
        breakdown[epoch.number] = EpochBreakdown(epoch=number, ranks=tuple(seconds for _, _, seconds in done))
        if not (np.isfinite(model.parameters).all() and np.isfinite(model.statistics).all()):
            raise diverged(step, number)
        futures = epoch.map(wrong_labels, model, **names)
        wrong, total = np.sum(gathered(futures), axis=0)
        if recorder.add(model, float(wrong / total)):
            break
    return recorder.history(model, with_records(breakdown, shuffler.records))


def train(
    partition: Partition,
    group: Group,
    model: TrainedNetwork,
    batch_size: int,
    step: float,
    *,
    features: str = "x",
    target: str = "y",
) -> tuple[TrainedNetwork | None, int, PhaseSeconds]:
    """One epoch's steps together with all other ranks; a task on each worker.

    Returns
    -------
    tuple
        The network (rank 0's, as all have the same), samples trained on, seconds.
    """
    network = model.network
    check_names(partition.names, features=features, target=target)
    batching = checked_batching(network, len(partition), partition.shares, batch_size)
    parameters, statistics = model.parameters, model.statistics
    batches = forward_backward = gradient_exchange = 0.0
    clock = time.perf_counter()
    for number in range(len(batching)):
        positions = batching.positions(number)
        batch = partition.take(positions, (features, target))
        rows, labels = checked_batch(network, batch, features, target, partition.sample_ids[positions])
        batches, clock = _lap(batches, clock)
        # A step that overflows is told by parameters that are not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            _, gradient, seen = network.gradient(parameters, rows, labels)
            if network.n_statistics:
                statistics = (1 - MOMENTUM) * statistics + MOMENTUM * seen[0]
            forward_backward, clock = _lap(forward_backward, clock)
            parameters = parameters - step * group.mean(gradient, len(rows))
        gradient_exchange, clock = _lap(gradient_exchange, clock)
    if network.n_statistics:
        statistics = group.mean(statistics)
    gradient_exchange, clock = _lap(gradient_exchange, clock)
    seconds = PhaseSeconds(batches=batches, forward_backward=forward_backward, gradient_exchange=gradient_exchange)
    return TrainedNetwork(network, parameters, statistics) if group.rank == 0 else None, len(partition), seconds


def wrong_labels(
    partition: Partition, model: TrainedNetwork, *, features: str = "x", target: str = "y"
) -> tuple[int, int]:
    """Samples of a partition that the network gets wrong, and all of them; a task on each worker."""
    wrong = 0
    for batch in partition.batches(EVALUATION_ROWS):
        with np.errstate(over="ignore", invalid="ignore"):
            wrong += int(np.count_nonzero(model.predict(batch[features]) != batch[target]))
    return wrong, len(partition)


def checked_batching(network: Network, n_own: int, shares: tuple[int, int], batch_size: int) -> Batching:
    """Equally many mini-batches on every rank, each sample in one of them.

    Raises
    ------
    InvalidParameter
        The batch size is larger than the smallest partition, or so small that batch norm gets single samples.
    """
    batching = Batching(n_own, *shares, batch_size, UNEVEN)
    if network.n_statistics and shares[0] // len(batching) < 2:
        raise InvalidParameter.of(
            "batch_size",
            batch_size,
            "such that every mini-batch has at least 2 samples beside batch norm",
            f"Workers have {shares[0]} to {shares[1]} samples; take larger batches, fewer workers, or no batch norm.",
        )
    return batching


def checked_batch(
    network: Network,
    batch: Mapping[str, NDArray[Any]],
    features: str,
    target: str,
    sample_ids: NDArray[np.int64],
) -> tuple[NDArray[Any], Labels]:
    """Rows and labels of a mini-batch, if the network can be trained on them.

    Raises
    ------
    InvalidParameter
        Naming the parameter, and the sample if it is one.
    """
    rows, labels = checked_rows(batch, features, target, sample_ids)
    if rows.shape[1] != network.n_features:
        raise InvalidParameter.of("network.sizes[0]", network.n_features, f"{rows.shape[1]}, the columns of {features}")
    if labels.dtype.kind not in "biu":
        raise InvalidParameter.of(
            "target", target, f"an array of integer labels (it is {labels.dtype})", "Convert labels that are floats."
        )
    known = (labels >= 0) & (labels < network.n_classes)
    if not known.all():
        bad = int(np.argmin(known))
        hint = "The last of network.sizes is the number of classes."
        raise InvalidParameter.of(
            f"{target}[{sample_ids[bad]}]", labels[bad].item(), f"a label in [0, {network.n_classes})", hint
        )
    return rows, labels.astype(np.int64)


def _lap(seconds: float, since: float) -> tuple[float, float]:
    """Seconds with what has passed since, and now."""
    now = time.perf_counter()
    return seconds + now - since, now
