"""Synchronous SGD: gradients are averaged over all workers in every step."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.runtime import Epoch, Partition, Shuffler
from dshuffle.training.fit import (
    NUMBERS,
    WHOLE,
    FitOptions,
    History,
    Steps,
    Trained,
    batching_of,
    check_array,
    check_batch,
    check_converging,
    check_step,
    in_steps,
    measured,
    run_epochs,
    trainer,
)

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
    def n_parameters(self) -> int:
        """Length of the parameter vector."""
        weights = sum((size + 1) * units for size, units in itertools.pairwise(self.sizes))
        return weights + self.n_statistics // 2

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
        for means_and_variances in self._running(statistics):
            means_and_variances[1] = 1
        return statistics

    def scores(self, parameters: Vector, statistics: Vector, rows: ArrayLike) -> Rows:
        """Return the ``(n, classes)`` logits of ``(n, features)`` rows, computed with the running statistics."""
        values, running = np.asarray(rows, np.float64), iter(self._running(statistics))
        *hidden, (last, _, offsets) = self._layers(parameters)
        for weights, factors, biases in hidden:
            values = values @ weights
            if self.batch_norm:
                means, variances = next(running)
                values = (values - means) / np.sqrt(variances + EPSILON) * factors
            values = np.maximum(values + biases, 0)
        return values @ last + offsets

    def gradient(self, parameters: Vector, rows: ArrayLike, labels: ArrayLike) -> tuple[float, Vector, Vector]:
        """Return the mean loss over a mini-batch, its gradient, and the means and variances of every hidden unit.

        Parameters
        ----------
        parameters
            ``(n_parameters,)``.
        rows, labels
            ``(n, features)`` numbers and ``(n,)`` integers.

        Returns
        -------
        tuple
            Loss; gradient ``(n_parameters,)``; statistics ``(n_statistics,)``.
        """
        values, classes = np.asarray(rows, np.float64), np.asarray(labels, np.int64)

        def mean(values: Rows) -> Rows:  # np.mean adds in another order if there is only one unit
            return np.add.reduceat(values, [0], axis=0) / len(values)

        layers = self._layers(parameters)
        inputs, normal, inverse, statistics = [values], [], [], [np.empty(0)]
        for weights, factors, biases in layers[:-1]:
            values = values @ weights
            if self.batch_norm:
                means = mean(values)
                values = values - means
                variances = mean(values**2)
                inverse.append(1 / np.sqrt(variances + EPSILON))
                normal.append(values * inverse[-1])
                statistics += [means[0], variances[0]]
                values = normal[-1] * factors
            values = np.maximum(values + biases, 0)
            inputs.append(values)
        scores, own = values @ layers[-1][0] + layers[-1][2], (np.arange(len(classes)), classes)
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        sums = chances.sum(axis=1, keepdims=True)
        loss, back = float((np.log(sums[:, 0]) - scores[own]).mean()), chances / sums
        back[own] -= 1
        back /= len(classes)
        gradient = np.empty(self.n_parameters)
        for layer, (weights, factors, biases) in reversed(list(enumerate(self._layers(gradient)))):
            hidden = layer < len(layers) - 1
            if hidden:
                back = back @ layers[layer + 1][0].T * (inputs[layer + 1] > 0)
            biases[...] = back.sum(axis=0)
            if hidden and self.batch_norm:
                factors[...] = np.einsum("ij,ij->j", back, normal[layer])
                back = back * layers[layer][1]
                along = mean(back * normal[layer])
                back = (back - mean(back) - normal[layer] * along) * inverse[layer]
            weights[...] = inputs[layer].T @ back
        return loss, gradient, np.concatenate(statistics)

    def _layers(self, vector: Vector) -> list[tuple[Rows, Vector, Vector]]:
        """Return views of a parameter vector: weights, factors and biases of every layer."""
        shapes: list[tuple[int, ...]] = []
        for sizes in itertools.pairwise(self.sizes):
            shapes += [sizes, (sizes[1] * self.batch_norm,), sizes[1:]]
        shapes[-2] = (0,)
        views = iter(_views(vector, shapes))
        return list(zip(views, views, views, strict=True))

    def _running(self, statistics: Vector) -> list[Rows]:
        """Return views of a vector of running statistics: means and variances of every hidden layer."""
        return _views(statistics, [(2, units) for units in self.sizes[1:-1] if self.batch_norm])


def _views(vector: Vector, shapes: list[tuple[int, ...]]) -> list[NDArray[np.float64]]:
    """Return parts of a vector as arrays of these shapes."""
    parts = np.split(vector, np.cumsum([math.prod(shape) for shape in shapes]))
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=False)]


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


@trainer("gradients")
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
    **options: Unpack[FitOptions],
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
    **options
        Options of all trainers: see :class:`~dshuffle.training.FitOptions`.

    Returns
    -------
    History
        ``model`` is the :class:`TrainedNetwork`. A point's ``error`` is the fraction of wrong labels over the whole
        dataset after the epoch, predicted with the running statistics.

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
    >>> len(history.points)
    2
    """
    as_integer("batch_size", batch_size, 1)
    check_step(step)
    check_array("features", features, shuffler.dataset.arrays, 2, NUMBERS)
    check_array("target", target, shuffler.dataset.arrays, 1, WHOLE)
    [width] = shuffler.dataset.arrays[features].shape
    if width != network.sizes[0]:
        raise InvalidParameter.of("network.sizes[0]", network.sizes[0], f"{width}, the width of {features}")
    first = TrainedNetwork(network, network.first_parameters(as_integer("seed", seed)), network.first_statistics())

    def train(epoch: Epoch, number: int, model: TrainedNetwork, factor: float) -> Trained:
        model = in_steps(epoch, network_steps, model, batch_size, step * factor, features, target)
        check_converging(f"step={step:g}", number, model.parameters, model.statistics)
        wrong, total = measured(epoch, _wrong_labels, model, features, target)
        return Trained(model, wrong / total)

    return run_epochs(shuffler, "fit_synchronous_sgd", first, train, epochs, **options)


def network_steps(
    partition: Partition, model: TrainedNetwork, batch_size: int, step: float, features: str, target: str
) -> Steps:
    """Take the steps of one rank, with the gradients of its mini-batches."""
    network, parameters, statistics = model.network, model.parameters, model.statistics
    batching = batching_of(partition, batch_size, 2 if network.n_statistics else 1)
    for number in range(len(batching)):
        positions = batching.positions(number)
        batch, ids = partition.take(positions, (features, target)), partition.sample_ids[positions]
        rows, labels = check_batch(batch, ids, features, target, network.sizes[-1])
        # A step that overflows gives parameters that are not finite, which the client checks.
        with np.errstate(over="ignore", invalid="ignore"):
            _, gradient, seen = network.gradient(parameters, rows, labels)
            statistics = (1 - MOMENTUM) * statistics + MOMENTUM * seen
        mean = yield gradient, len(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            parameters = parameters - step * mean
    if network.n_statistics:
        statistics = yield statistics, len(partition)
    return TrainedNetwork(network, parameters, statistics)


def _wrong_labels(model: TrainedNetwork, rows: Rows, labels: Labels) -> tuple[float, float]:
    return int(np.count_nonzero(model.predict(rows) != labels)), len(labels)
