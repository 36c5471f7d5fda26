"""Synchronous SGD: gradients are averaged over all workers in every step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning.batching import UNEVEN, Batching
from dshuffle.runtime import Group, Partition, Shuffler, gathered
from dshuffle.training.fit import (
    CONSTANT,
    EarlyStopping,
    EpochBreakdown,
    History,
    OnEpoch,
    PhaseSeconds,
    Recorder,
    Schedule,
    Validate,
    raises_once,
    with_records,
)
from dshuffle.training.inputs import EVALUATION_ROWS, check_names, check_step, diverged
from dshuffle.training.parallel_sgd import check_arrays, checked_rows

Vector = NDArray[np.float64]
Rows = NDArray[np.float64]
Labels = NDArray[np.int64]

EPSILON = 1e-5
MOMENTUM = 0.1
"""Fraction of the running statistics that is replaced after every mini-batch."""


@dataclass(frozen=True, slots=True)
class Network:
    """Shape of a classifier: dense layers with ReLU between them, and batch norm before each ReLU.

    Parameters
    ----------
    sizes
        Number of features, units of every hidden layer, number of classes.
    batch_norm
        Whether hidden layers normalize each unit over the mini-batch of a worker.

    Raises
    ------
    InvalidParameter
        There are fewer than two sizes, or a size is not an integer of at least 1 (2 for the classes).

    Notes
    -----
    All parameters are in one float64 vector, so that averaging over workers takes one array. For every layer it has the
    weights ``(inputs, units)``, with batch norm the factors ``(units,)``, then the biases ``(units,)``. The running
    statistics are one vector as well: for every hidden layer the means ``(units,)`` and the variances ``(units,)``.

    References
    ----------
    S. Ioffe and C. Szegedy, "Batch normalization", ICML 2015. We use biased variances, both in training and in the
    running statistics.

    Examples
    --------
    >>> network = Network((64, 32, 10))
    >>> network.n_parameters, network.n_statistics
    (2442, 64)
    >>> parameters = network.first_parameters(seed=0)
    >>> scores = network.scores(parameters, network.first_statistics(), np.zeros((5, 64)))
    >>> scores.shape
    (5, 10)
    """

    sizes: tuple[int, ...]
    batch_norm: bool = True

    def __post_init__(self) -> None:
        if len(self.sizes) < 2:
            raise InvalidParameter.of("sizes", self.sizes, "at least two sizes: features and classes")
        for number, size in enumerate(self.sizes):
            as_integer(f"sizes[{number}]", size, 2 if number == len(self.sizes) - 1 else 1)

    @property
    def n_features(self) -> int:
        """Number of features, the columns of the input rows."""
        return self.sizes[0]

    @property
    def n_classes(self) -> int:
        """Number of classes. Labels are 0 to ``n_classes - 1``."""
        return self.sizes[-1]

    @property
    def n_parameters(self) -> int:
        """Length of the parameter vector."""
        return sum(math.prod(shape) for shape in self._shapes())

    @property
    def n_statistics(self) -> int:
        """Length of the vector of running statistics; 0 without batch norm."""
        return 2 * sum(self.sizes[1:-1]) if self.batch_norm else 0

    def first_parameters(self, seed: int) -> Vector:
        """Return initial parameters: normal weights of variance ``2 / inputs``, factors 1 and biases 0.

        References
        ----------
        He et al. (2015), for the variance of the weights.
        """
        rng = np.random.default_rng(seed)
        parameters = np.zeros(self.n_parameters)
        for layer, (weights, factors, _) in enumerate(self._layers(parameters)):
            gain = 2 if layer < len(self.sizes) - 2 else 1
            weights[...] = rng.standard_normal(weights.shape) * math.sqrt(gain / len(weights))
            factors[...] = 1
        return parameters

    def first_statistics(self) -> Vector:
        """Return initial running statistics: means 0 and variances 1."""
        statistics = np.zeros(self.n_statistics)
        for _, variances in self._running(statistics):
            variances[...] = 1
        return statistics

    def scores(self, parameters: Vector, statistics: Vector, rows: ArrayLike) -> Rows:
        """Return the ``(n, classes)`` logits of ``(n, features)`` rows, computed with the running statistics."""
        values = np.asarray(rows, np.float64)
        running = list(self._running(statistics))
        for layer, (weights, factors, biases) in enumerate(self._layers(parameters)):
            values = values @ weights
            if layer < len(self.sizes) - 2:
                if self.batch_norm:
                    means, variances = running[layer]
                    values = (values - means) / np.sqrt(variances + EPSILON) * factors
                values = np.maximum(values + biases, 0)
            else:
                values = values + biases
        return values

    def gradient(
        self, parameters: Vector, rows: ArrayLike, labels: ArrayLike, starts: ArrayLike = (0,)
    ) -> tuple[float, Vector, NDArray[np.float64]]:
        """Return the mean loss over some rows, its gradient, and the statistics of their mini-batches.

        Parameters
        ----------
        parameters
            ``(n_parameters,)``.
        rows, labels
            ``(n, features)`` numbers and ``(n,)`` integers.
        starts
            Start of each worker's mini-batch, ascending from 0. Batch norm normalizes within a mini-batch. By default
            all rows are one mini-batch. With several mini-batches, one call does the work of several workers and
            returns the mean of their gradients, weighted by their rows.

        Returns
        -------
        tuple
            Loss; gradient ``(n_parameters,)``; ``(len(starts), n_statistics)`` means and variances of every unit.
        """
        first = np.asarray(starts, np.int64)
        values, classes = np.asarray(rows, np.float64), np.asarray(labels, np.int64)
        counts = np.diff(np.append(first, len(values)))
        layers = list(self._layers(parameters))
        inputs, normal, inverse = [], [], []
        statistics = np.empty((len(first), self.n_statistics))
        column = 0
        for weights, factors, biases in layers[:-1]:
            inputs.append(values)
            values = values @ weights
            if self.batch_norm:
                means = _group_means(values, first, counts)
                values = values - np.repeat(means, counts, axis=0)
                variances = _group_means(values**2, first, counts)
                inverse.append(1 / np.sqrt(np.repeat(variances, counts, axis=0) + EPSILON))
                normal.append(values * inverse[-1])
                statistics[:, column : column + 2 * len(biases)] = np.hstack([means, variances])
                column += 2 * len(biases)
                values = normal[-1] * factors
            values = np.maximum(values + biases, 0)
        inputs.append(values)
        scores = values @ layers[-1][0] + layers[-1][2]
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        each = np.arange(len(classes))
        # A probability that underflowed to 0 is clipped to the smallest positive number.
        loss = -float(np.mean(np.log(np.maximum(chances[each, classes], np.finfo(np.float64).tiny))))
        back = chances
        back[each, classes] -= 1
        back /= len(classes)

        gradient = np.empty(self.n_parameters)
        slots = list(self._layers(gradient))
        for layer in reversed(range(len(layers))):
            weights, factors, biases = slots[layer]
            if layer < len(layers) - 1:
                back = back * (inputs[layer + 1] > 0)
            biases[...] = back.sum(axis=0)
            if layer < len(layers) - 1 and self.batch_norm:
                factors[...] = np.einsum("ij,ij->j", back, normal[layer])
                back = back * layers[layer][1]
                along = _group_means(back * normal[layer], first, counts)
                back = back - np.repeat(_group_means(back, first, counts), counts, axis=0)
                back = (back - normal[layer] * np.repeat(along, counts, axis=0)) * inverse[layer]
            weights[...] = inputs[layer].T @ back
            if layer:
                back = back @ layers[layer][0].T
        return loss, gradient, statistics

    def _shapes(self) -> Iterator[tuple[int, ...]]:
        """Yield the shapes of weights, factors and biases of every layer."""
        for layer, (size, units) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            hidden = layer < len(self.sizes) - 2
            yield from ((size, units), (units if hidden and self.batch_norm else 0,), (units,))

    def _layers(self, vector: Vector) -> Iterator[tuple[Rows, Vector, Vector]]:
        """Yield views of a parameter vector: weights, factors and biases of every layer."""
        views, start = [], 0
        for shape in self._shapes():
            views.append(vector[start : start + math.prod(shape)].reshape(shape))
            start += math.prod(shape)
        yield from zip(views[::3], views[1::3], views[2::3], strict=True)

    def _running(self, statistics: Vector) -> Iterator[tuple[Vector, Vector]]:
        """Yield views of a vector of running statistics: means and variances of every hidden layer."""
        start = 0
        for units in self.sizes[1:-1] if self.batch_norm else ():
            yield statistics[start : start + units], statistics[start + units : start + 2 * units]
            start += 2 * units


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class TrainedNetwork:
    """A network with its parameters and running statistics.

    Examples
    --------
    >>> network = Network((2, 3))
    >>> TrainedNetwork(network, network.first_parameters(0), network.first_statistics()).predict(np.eye(2)).shape
    (2,)
    """

    network: Network
    parameters: Vector
    statistics: Vector

    def __repr__(self) -> str:
        return f"<TrainedNetwork {self.network.sizes}, {len(self.parameters)} parameters>"

    def scores(self, rows: ArrayLike) -> Rows:
        """Return the ``(n, classes)`` logits of ``(n, features)`` rows."""
        return self.network.scores(self.parameters, self.statistics, rows)

    def predict(self, rows: ArrayLike) -> Labels:
        """Return the most likely label of each row, ``(n,)``."""
        labels: Labels = self.scores(rows).argmax(axis=1)
        return labels


def _group_means(values: Rows, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> Rows:
    """Return the mean over the rows of each group: ``(groups, columns)``."""
    sums: Rows = np.add.reduceat(values, starts, axis=0)
    return sums / counts[:, np.newaxis]


@raises_once
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
    """Train a network by synchronous SGD: in every step, average the gradients of one mini-batch per worker.

    Parameters
    ----------
    shuffler
        Shuffler with any sharding, assignment and delivery.
    network
        Shape of the network. Its parameters are drawn from ``seed``.
    epochs
        Number of passes over the whole dataset.
    batch_size
        Largest number of samples of one worker in one step; at most the smallest share. Every sample is trained on
        exactly once an epoch. All workers take ``ceil(largest share / batch_size)`` mini-batches, and a worker's
        mini-batches differ by at most one sample. (In :func:`fit_parameter_server` it is the number of samples of all
        workers together.)
    step
        Step of the first epoch.
    seed
        Seed of the initial parameters.
    features, target
        Names of arrays in the dataset: ``(q, features)`` numbers and ``(q,)`` integer (or boolean) labels from 0.
    schedule
        Factor on the step by epoch.
    validate
        Function that is called with the network after every epoch. The metrics that it returns become the point's
        ``validation``.
    early_stopping
        Rule that ends the fit before ``epochs``.
    on_epoch
        Function that is called with the :class:`~dshuffle.report.TrainingPoint` of each epoch as soon as it is known.

    Returns
    -------
    History
        ``model`` is the :class:`TrainedNetwork`. A point's ``error`` is the fraction of wrong labels over the whole
        dataset after the epoch, predicted with the running statistics. ``breakdown`` is the time spent in each phase.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, the arrays do not suit the network (the message names the sample, if there is one),
        or the parameters diverge.
    WorkerLost
        A worker has left the cluster.

    Notes
    -----
    Gradients are weighted by the number of samples, so a step follows equation 1 even if mini-batches differ in size.
    They are averaged on the worker of rank 0 (see :meth:`dshuffle.Epoch.together`). Its link carries the gradients of
    all workers in every step, which suits networks of up to about a million parameters. For larger networks use
    :func:`dshuffle.training.torch_ddp.fit_torch_ddp`.

    Batch norm is local: it normalizes over the worker's own mini-batch, as is usual. For this reason it matters which
    samples a worker has. Without batch norm, the averaged gradient does not depend on which worker has which sample of
    the global mini-batch. Running statistics are averaged over the workers at the end of the epoch.

    All workers wait for the slowest one in every step. A worker that is much slower than the others is logged.

    References
    ----------
    Nguyen et al. (2022), equation 1 and Figure 5; see docs/papers.md.

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
    if isinstance(shuffler, Shuffler):  # not a stand-in without a dataset
        check_arrays(shuffler.dataset, features, target)
        _check_width(network, features, shuffler.dataset.arrays[features].shape[0])
    model = TrainedNetwork(network, network.first_parameters(as_integer("seed", seed)), network.first_statistics())
    recorder: Recorder[TrainedNetwork] = Recorder(validate, early_stopping, on_epoch)
    model = recorder.begin(shuffler, "fit_synchronous_sgd", model, batch_size=batch_size, step=step)
    breakdown: dict[int, EpochBreakdown] = {}  # keyed by the shuffler's epoch number
    names = {"features": features, "target": target}
    for number, epoch in recorder.epochs(shuffler, epochs):
        done = epoch.together(train, model, batch_size, step * schedule(number), **names)
        [model] = [result for result, _, _ in done if result is not None]
        recorder.speeds.add(
            [count / max(seconds.own, 1e-9) for _, count, seconds in done],
            seconds=max(seconds.own for _, _, seconds in done),
        )
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
    """Train for one epoch, in step with all other ranks. Runs as a task on each worker."""
    partition.mark_trained(0)
    network = model.network
    check_names(partition.names, features=features, target=target)
    batching = checked_batching(network, len(partition), partition.shares, batch_size, unequal=partition.unequal)
    parameters, statistics = model.parameters, model.statistics
    batches = forward_backward = gradient_exchange = 0.0
    clock = time.perf_counter()
    for number in range(len(batching)):
        positions = batching.positions(number)
        batch = partition.take(positions, (features, target))
        rows, labels = checked_batch(network, batch, features, target, partition.sample_ids[positions])
        batches, clock = _lap(batches, clock)
        # A step that overflows gives parameters that are not finite, which the client checks.
        with np.errstate(over="ignore", invalid="ignore"):
            _, gradient, seen = network.gradient(parameters, rows, labels)
            if network.n_statistics:
                statistics = (1 - MOMENTUM) * statistics + MOMENTUM * seen[0]
            forward_backward, clock = _lap(forward_backward, clock)
            parameters = parameters - step * group.mean(gradient, len(rows))
        gradient_exchange, clock = _lap(gradient_exchange, clock)
    if network.n_statistics:
        statistics = group.mean(statistics, len(partition))
    gradient_exchange, clock = _lap(gradient_exchange, clock)
    partition.mark_trained()
    seconds = PhaseSeconds(batches=batches, forward_backward=forward_backward, gradient_exchange=gradient_exchange)
    return TrainedNetwork(network, parameters, statistics) if group.rank == 0 else None, len(partition), seconds


def wrong_labels(
    partition: Partition, model: TrainedNetwork, *, features: str = "x", target: str = "y"
) -> tuple[int, int]:
    """Return the number of wrong labels and the number of samples of a partition. Runs on each worker."""
    wrong = 0
    for batch in partition.batches(EVALUATION_ROWS):
        with np.errstate(over="ignore", invalid="ignore"):
            wrong += int(np.count_nonzero(model.predict(batch[features]) != batch[target]))
    return wrong, len(partition)


def checked_batching(
    network: Network, n_own: int, shares: tuple[int, int], batch_size: int, *, unequal: bool = False
) -> Batching:
    """Return the mini-batches of a rank: the same number on every rank, each sample in exactly one of them."""
    least = 2 if network.n_statistics else 1
    batching = Batching(n_own, *shares, batch_size, UNEVEN, unequal, least)
    if batch_size < least or shares[0] // len(batching) < least:
        raise InvalidParameter.of(
            "batch_size",
            batch_size,
            "large enough to give every mini-batch at least 2 samples for batch norm",
            f"Workers have {shares[0]} to {shares[1]} samples. Use larger batches, fewer workers, or no batch norm.",
        )
    return batching


def checked_batch(
    network: Network,
    batch: Mapping[str, NDArray[Any]],
    features: str,
    target: str,
    sample_ids: NDArray[np.int64],
) -> tuple[NDArray[Any], Labels]:
    """Return the rows and labels of a mini-batch, if the network can be trained on them."""
    rows, labels = checked_rows(batch, features, target, sample_ids)
    _check_width(network, features, rows.shape[1])
    if labels.dtype.kind not in "biu":
        raise InvalidParameter.of(
            "target", target, f"an array of integer labels (it is {labels.dtype})", "Convert the labels to integers."
        )
    in_range = (labels >= 0) & (labels < network.n_classes)
    if not in_range.all():
        bad = int(np.argmin(in_range))
        hint = "The last entry of network.sizes is the number of classes."
        raise InvalidParameter.of(
            f"{target}[{sample_ids[bad]}]", labels[bad].item(), f"a label in [0, {network.n_classes})", hint
        )
    return rows, labels.astype(np.int64)


def _check_width(network: Network, features: str, width: int) -> None:
    if width != network.n_features:
        raise InvalidParameter.of("network.sizes[0]", network.n_features, f"{width}, the width of {features}")


def _lap(seconds: float, since: float) -> tuple[float, float]:
    """Return ``seconds`` plus the time since ``since``, and the current time."""
    now = time.perf_counter()
    return seconds + now - since, now
