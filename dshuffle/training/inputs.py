"""Checks of what trainers get, and metrics on held-out samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter, TrainingDiverged
from dshuffle.runtime import Shuffler
from dshuffle.store import Dataset
from dshuffle.training.fit import Validate


def check_step(step: float) -> float:
    """Return the step if it is valid."""
    if not (math.isfinite(step) and step > 0):
        raise InvalidParameter.of("step", step, "a finite number > 0")
    return step


def check_fixed_workers(shuffler: Shuffler, trainer: str) -> None:
    """Refuse a shuffler whose workers may change."""
    if shuffler.elastic:
        raise InvalidParameter.because(
            "shuffler",
            f"{trainer} needs the same number of workers in all epochs",
            "Leave out elastic=True.",
        )


def diverged(
    step: float,
    epoch: int,
    *,
    what: str = "parameters",
    remedy: str = "take a smaller step, or scale the features",
) -> TrainingDiverged:
    """Return the error to raise when the parameters of a fit are no longer finite."""
    return TrainingDiverged.of(
        "step", step, f"small enough for the {what} to stay finite", f"They diverged in epoch {epoch}: {remedy}."
    )


EVALUATION_ROWS = 1024
"""Rows per batch of an evaluation, so that a network's activations fit in memory. Results do not depend on it."""


def check_names(names: Iterable[str], /, *, hint: str = "", **chosen: str) -> None:
    """Check that arrays exist."""
    array_names = sorted(names)
    for parameter, name in chosen.items():
        if name not in array_names:
            raise InvalidParameter.of(parameter, name, f"one of the dataset's arrays: {', '.join(array_names)}", hint)


def check_encryption(address: str, plain_tcp: bool) -> None:
    """Refuse to send gradients of a cluster that uses TLS without encryption, unless that is wanted."""
    if address.startswith("tls://") and not plain_tcp:
        raise InvalidParameter.because(
            "plain_tcp=False",
            "this cluster uses TLS, but PyTorch's gloo sends gradients without encryption",
            "Use plain_tcp=True in a network that you trust, or fit_parameter_server.",
        )


def check_finite(parameter: str, name: str, values: NDArray[Any], sample_ids: NDArray[np.integer]) -> None:
    """Check that all values are finite.

    Parameters
    ----------
    values
        ``(n, ...)`` numbers.
    """
    finite = np.isfinite(values).reshape(len(values), math.prod(values.shape[1:])).all(axis=1)
    if not finite.all():
        sample = sample_ids[int(np.argmin(finite))]
        raise InvalidParameter.of(parameter, name, f"an array of finite values (sample {sample} is not finite)")


def checked_width(
    arrays: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], n_classes: int | None, *, features: str, target: str
) -> int:
    """Return the number of features per sample, if a model can be trained on arrays of these shapes and dtypes."""
    check_names(arrays, features=features, target=target)
    dtype, shape = arrays[features]
    if not shape or dtype.kind not in "biuf":
        allowed = f"an array of rows of numbers (it is {len(shape) + 1}-D, {dtype})"
        raise InvalidParameter.of("features", features, allowed)
    dtype, target_shape = arrays[target]
    if target_shape or dtype.kind not in ("biuf" if n_classes is None else "biu"):
        numbers = "numbers" if n_classes is None else "integers or booleans"
        allowed = f"a 1-D array of {numbers} (it is {len(target_shape) + 1}-D, {dtype})"
        raise InvalidParameter.of("target", target, allowed)
    return math.prod(shape)


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
