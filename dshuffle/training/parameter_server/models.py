"""Models as one flat vector of parameters: what trainers that move gradients need, and no more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter

Parameters = NDArray[np.floating[Any]]
Rows = NDArray[Any]


class Model(Protocol):
    """A loss that is a mean over samples, and its gradient. Immutable: it travels to all workers."""

    @property
    def n_classes(self) -> int | None:
        """Targets are integers in ``[0, n_classes)``; None if they are any numbers."""

    def first(self, n_features: int, seed: int) -> Parameters:
        """``(p,)``: where training starts."""

    def gradient(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> tuple[Parameters, float]:
        """Means over a mini-batch: the ``(p,)`` gradient of the loss, a new array, and the loss."""

    def loss(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> float:
        """The mean loss over some samples."""


@dataclass(frozen=True, slots=True)
class SoftmaxRegression:
    """Multinomial logistic regression: cross-entropy of ``softmax(x @ W + b)``.

    Parameters
    ----------
    n_classes
        Labels are integers from 0 to one less.

    Raises
    ------
    InvalidParameter
        There are fewer than two classes.

    Examples
    --------
    >>> model = SoftmaxRegression(2)
    >>> rows, labels = np.array([[1.0], [-1.0]]), np.array([0, 1])
    >>> gradient, loss = model.gradient(model.first(n_features=1, seed=0), rows, labels)
    >>> gradient, round(loss, 4)
    (array([-0.5,  0.5,  0. ,  0. ]), 0.6931)
    >>> model.predict(-gradient, rows)
    array([0, 1])
    """

    n_classes: int

    def __post_init__(self) -> None:
        as_integer("n_classes", self.n_classes, 2)

    def first(self, n_features: int, seed: int) -> Parameters:
        """Zeros, whatever the seed: the loss is convex. ``W`` row by row, then ``b``."""
        return np.zeros((n_features + 1) * self.n_classes)

    def gradient(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> tuple[Parameters, float]:
        """See :class:`Model`."""
        wrong, losses = self._probabilities(parameters, rows, targets)
        wrong[np.arange(len(rows)), _labels(targets)] -= 1
        wrong /= len(rows)
        gradient = np.empty((rows.shape[1] + 1, self.n_classes))
        np.dot(rows.T, wrong, out=gradient[:-1])
        wrong.sum(axis=0, out=gradient[-1])
        return gradient.ravel(), float(losses.mean())

    def loss(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> float:
        """See :class:`Model`."""
        return float(self._probabilities(parameters, rows, targets)[1].mean())

    def predict(self, parameters: Parameters, rows: Rows) -> NDArray[np.int64]:
        """``(n,)``: the most likely class of each row."""
        classes: NDArray[np.int64] = self._scores(parameters, rows).argmax(axis=1)
        return classes

    def _scores(self, parameters: Parameters, rows: Rows) -> NDArray[np.float64]:
        weights = parameters.reshape(-1, self.n_classes)
        scores: NDArray[np.float64] = rows @ weights[:-1] + weights[-1]
        return scores

    def _probabilities(
        self, parameters: Parameters, rows: Rows, targets: NDArray[Any]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        scores = self._scores(parameters, rows)
        scores -= scores.max(axis=1, keepdims=True)
        own = scores[np.arange(len(rows)), _labels(targets)]
        np.exp(scores, out=scores)
        sums = scores.sum(axis=1, keepdims=True)
        scores /= sums
        return scores, np.log(sums[:, 0]) - own


@dataclass(frozen=True, slots=True)
class LinearModel:
    """Linear regression: half the squared error of ``x @ w + b``, or without ``b``.

    Parameters
    ----------
    intercept
        Whether there is ``b``, the last parameter.

    Examples
    --------
    >>> model = LinearModel()
    >>> model.gradient(np.zeros(2), np.array([[1.0], [3.0]]), np.array([1.0, 2.0]))
    (array([-3.5, -1.5]), 1.25)
    """

    intercept: bool = True

    @property
    def n_classes(self) -> None:
        """See :class:`Model`."""
        return None

    def first(self, n_features: int, seed: int) -> Parameters:
        """Zeros, whatever the seed."""
        return np.zeros(n_features + self.intercept)

    def gradient(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> tuple[Parameters, float]:
        """See :class:`Model`."""
        wrong = self.predict(parameters, rows) - targets
        gradient = np.empty(len(parameters))
        np.dot(wrong, rows, out=gradient[: rows.shape[1]])
        if self.intercept:
            gradient[-1] = wrong.sum()
        gradient /= len(rows)
        return gradient, float(wrong @ wrong) / (2 * len(rows))

    def loss(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> float:
        """See :class:`Model`."""
        wrong = self.predict(parameters, rows) - targets
        return float(wrong @ wrong) / (2 * len(rows))

    def predict(self, parameters: Parameters, rows: Rows) -> NDArray[np.float64]:
        """``(n,)`` values."""
        values: NDArray[np.float64] = rows @ parameters[: rows.shape[1]]
        return values + parameters[-1] if self.intercept else values


def as_rows(values: NDArray[Any]) -> Rows:
    """``(n, ...)`` numbers as ``(n, m)`` floats: float64, or float32 where they are that."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    return flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float64)


def _labels(targets: NDArray[Any]) -> NDArray[np.intp]:
    """Targets that can be indices: booleans as they are would be a mask."""
    return np.asarray(targets, np.intp)


def check_labels(target: str, labels: NDArray[Any], n_samples: int, n_classes: int) -> None:
    """Refuse what are no labels of a model.

    Parameters
    ----------
    target
        What the array is called.
    labels
        The distinct values of all samples.
    n_samples, n_classes
        How many samples there are, and how many classes the model has.

    Raises
    ------
    InvalidParameter
        Values are not integral, all distinct, or not in ``[0, n_classes)``.
    """
    if labels.dtype.kind not in "biu":
        raise InvalidParameter.of(
            "target", target, f"an array of integers or booleans (it is {labels.dtype})", "Number the classes."
        )
    if len(labels) == n_samples:
        raise InvalidParameter.of(
            "target", target, f"an array of labels that occur again ({n_samples} samples have {n_samples})"
        )
    outside = labels[(labels < 0) | (labels >= n_classes)]
    if len(outside):
        hint = "Number the classes from 0, and give the model as many."
        raise InvalidParameter.of("target", target, f"labels in [0, {n_classes}); {outside[0]} is among them", hint)
