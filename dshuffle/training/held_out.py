"""Metrics on held-out samples for ``validate``, each beside that of a predictor which has learned nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.store import Dataset
from dshuffle.training.fit import Validate

Model = TypeVar("Model")
Predict = Callable[[Model, NDArray[Any]], NDArray[Any]]
"""Function of a model and ``(n, m)`` rows to ``(n,)`` labels or numbers."""

MOST_SAMPLES = 10_000
"""Number of held-out samples to read. The error of a metric falls with its root, and they stay in memory."""


def accuracy_on(test: Dataset, predict: Predict[Model], *, features: str = "x", target: str = "y") -> Validate[Model]:
    """Make a ``validate`` that measures the accuracy on held-out samples.

    Parameters
    ----------
    test
        The held-out samples, such as the second part of :meth:`dshuffle.Dataset.split`. They are read once, here; of
        more than 10,000 samples, 10,000 evenly spaced ones.
    predict
        Function of the model and ``(n, m)`` rows that returns ``(n,)`` labels, such as ``TrainedNetwork.predict``.
    features, target
        Names of arrays in the dataset: ``(q, m)`` numbers, and ``(q,)`` integer labels.

    Returns
    -------
    Callable
        Function from a model to ``accuracy``, and ``accuracy_of_majority``: that of always predicting the most frequent
        held-out label.

    Examples
    --------
    >>> from dshuffle import create_dataset
    >>> rows = {"x": np.eye(4), "y": np.array([1, 1, 1, 0])}
    >>> dataset = create_dataset("memory://doc-accuracy", rows, overwrite=True)
    >>> validate = accuracy_on(dataset, lambda model, rows: np.full(len(rows), model))
    >>> validate(0)
    {'accuracy': 0.25, 'accuracy_of_majority': 0.75}
    """
    rows, labels = _read(test, features, target)
    majority = float(np.unique(labels, return_counts=True)[1].max() / len(labels))

    def accuracy(model: Model) -> dict[str, float]:
        return {"accuracy": float(np.mean(predict(model, rows) == labels)), "accuracy_of_majority": majority}

    return accuracy


def rmse_on(test: Dataset, predict: Predict[Model], *, features: str = "x", target: str = "y") -> Validate[Model]:
    """Make a ``validate`` that measures the root mean square error on held-out samples.

    Parameters
    ----------
    test
        The held-out samples, as for :func:`accuracy_on`.
    predict
        Function of the model and ``(n, m)`` rows that returns ``(n,)`` numbers.
    features, target
        Names of arrays in the dataset: ``(q, m)`` and ``(q,)`` numbers.

    Returns
    -------
    Callable
        Function from a model to ``rmse``, and ``rmse_of_mean``: that of always predicting the held-out mean.

    Examples
    --------
    >>> from dshuffle import create_dataset
    >>> rows = {"x": np.array([[1.0], [2.0], [3.0], [4.0]]), "y": np.array([1.0, 3.0, 1.0, 3.0])}
    >>> dataset = create_dataset("memory://doc-rmse", rows, overwrite=True)
    >>> rmse_on(dataset, lambda weights, rows: rows @ weights)(np.zeros(1))
    {'rmse': 2.23606797749979, 'rmse_of_mean': 1.0}
    """
    rows, values = _read(test, features, target)
    of_mean = float(np.std(values, dtype=np.float64))

    def rmse(model: Model) -> dict[str, float]:
        errors = predict(model, rows) - values.astype(np.float64)
        return {"rmse": float(np.sqrt(np.mean(errors**2))), "rmse_of_mean": of_mean}

    return rmse


def _read(test: Dataset, features: str, target: str) -> tuple[NDArray[Any], NDArray[Any]]:
    ids = np.linspace(0, test.n_samples - 1, min(MOST_SAMPLES, test.n_samples)).astype(np.int64)
    arrays = test.read_rows(ids)
    return arrays[features], arrays[target]
