"""A small neural network in NumPy: dense layers, batch norm, softmax cross-entropy, one parameter vector."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter

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
