"""Models with one flat vector of parameters, for trainers that send gradients."""

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
    """Loss that is a mean over samples, and its gradient. Immutable, as it is sent to all workers."""

    @property
    def n_classes(self) -> int | None:
        """Number of classes, with targets in ``[0, n_classes)``; None if targets are arbitrary numbers."""

    def first(self, n_features: int, seed: int) -> Parameters:
        """Return the initial parameters, ``(p,)``."""

    def gradient(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> tuple[Parameters, float]:
        """Return the mean gradient of the loss over a mini-batch, a new ``(p,)`` array, and the mean loss."""

    def loss(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> float:
        """Return the mean loss over some samples."""


@dataclass(frozen=True, slots=True)
class SoftmaxRegression:
    """Multinomial logistic regression: cross-entropy of ``softmax(x @ W + b)``.

    Parameters
    ----------
    n_classes
        Number of classes. Labels are integers from 0 to ``n_classes - 1``.

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
        """Return zeros for any seed, as the loss is convex: ``W`` row by row, then ``b``."""
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
        """Return the most likely class of each row, ``(n,)``."""
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
    """Linear regression: half the squared error of ``x @ w + b``, or of ``x @ w``.

    Parameters
    ----------
    intercept
        Whether the model has ``b``, its last parameter.

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
        """Return zeros for any seed."""
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
        """Return the predicted values, ``(n,)``."""
        values: NDArray[np.float64] = rows @ parameters[: rows.shape[1]]
        return values + parameters[-1] if self.intercept else values


def as_rows(values: NDArray[Any]) -> Rows:
    """Return ``(n, ...)`` numbers as ``(n, m)`` floats. float32 is kept, all other dtypes become float64."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    return flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float64)


def _labels(targets: NDArray[Any]) -> NDArray[np.intp]:
    """Return targets as integer indices. Booleans would act as a mask."""
    return np.asarray(targets, np.intp)


def check_labels(target: str, labels: NDArray[Any], n_samples: int, n_classes: int) -> None:
    """Check that labels suit a model.

    Parameters
    ----------
    target
        Name of the array.
    labels
        Distinct values of all samples.
    n_samples, n_classes
        Number of samples, and number of classes of the model.

    Raises
    ------
    InvalidParameter
        Labels are not integers, all distinct, or not in ``[0, n_classes)``.
    """
    if labels.dtype.kind not in "biu":
        raise InvalidParameter.of(
            "target", target, f"an array of integers or booleans (it is {labels.dtype})", "Number the classes from 0."
        )
    if len(labels) == n_samples:
        raise InvalidParameter.of(
            "target", target, f"an array whose labels occur more than once (its {n_samples} labels are all distinct)"
        )
    outside = labels[(labels < 0) | (labels >= n_classes)]
    if len(outside):
        allowed = f"an array of labels in [0, {n_classes}) (it contains {outside[0]})"
        hint = "Number the classes from 0, and set n_classes of the model to their number."
        raise InvalidParameter.of("target", target, allowed, hint)
