"""Checks of what trainers get, and metrics on held-out samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import InvalidParameter, TrainingDiverged
from dshuffle.runtime import Epoch, Partition, Shuffler, gathered
from dshuffle.store import Dataset
from dshuffle.training.fit import Validate

NUMBERS, WHOLE, INTEGERS, FLOATS = "biuf", "biu", "iu", "f"
KINDS = {
    NUMBERS: "numbers",
    WHOLE: "integers or booleans",
    INTEGERS: "integers",
    FLOATS: "float32 or float64",
}
"""Kinds of dtypes, in words."""

EVALUATION_ROWS = 1024
"""Rows per batch of an evaluation, so that a network's activations fit in memory. Results do not depend on it."""


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


def check_converging(name: str, epoch: int, *parameters: ArrayLike) -> None:
    """Check that the parameters of a model are finite after an epoch."""
    if not all(np.isfinite(values).all() for values in parameters):
        raise TrainingDiverged.because(
            name,
            f"the model diverged in epoch {epoch}",
            "Take a smaller step, scale the features, or look for NaN and infinite values in the data.",
        )


def check_names(names: Iterable[str], /, **chosen: str) -> None:
    """Check that arrays exist."""
    array_names = sorted(names)
    for parameter, name in chosen.items():
        if name not in array_names:
            hint = f"Choose another one with {parameter} (--{parameter} on the command line)."
            raise InvalidParameter.of(parameter, name, f"one of the dataset's arrays: {', '.join(array_names)}", hint)


def check_arrays(source: Dataset | Partition | Mapping[str, NDArray[Any]], **chosen: tuple[str, int, str]) -> None:
    """Check arrays, by parameter: their names, numbers of axes (of -2: two or more) and kinds of dtypes."""
    if isinstance(source, Partition):
        forms = {name: source.dtype(name) for name in source.names}
    elif isinstance(source, Dataset):
        forms = {name: (info.dtype, info.shape) for name, info in source.arrays.items()}
    else:
        forms = {name: (array.dtype, array.shape[1:]) for name, array in source.items()}
    check_names(forms, **{parameter: name for parameter, (name, _, _) in chosen.items()})
    for parameter, (name, axes, kinds) in chosen.items():
        dtype, n_axes = forms[name][0], 1 + len(forms[name][1])
        fits = n_axes == axes or (axes < 0 and n_axes >= -axes)
        if not fits or dtype.kind not in kinds or (kinds == FLOATS and dtype.itemsize < 4):
            more = " or more" if axes < 0 else ""
            hint = "Write them as rows: x.reshape(len(x), -1) for an array x, or a Dask array." if n_axes > 2 else ""
            allowed = f"a {abs(axes)}-D{more} array of {KINDS[kinds]} (it is {n_axes}-D, {dtype})"
            raise InvalidParameter.of(parameter, name, allowed, hint)


def check_batch(
    batch: Mapping[str, NDArray[Any]],
    sample_ids: NDArray[np.integer],
    *,
    features: str,
    target: str,
    n_classes: int | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the features and the targets of samples, if they are finite and labels are in [0, n_classes)."""
    check_finite("features", features, batch[features], sample_ids)
    check_finite("target", target, batch[target], sample_ids)
    labels = batch[target]
    if n_classes is not None and ((labels < 0) | (labels >= n_classes)).any():
        bad = int(np.argmax((labels < 0) | (labels >= n_classes)))
        hint = "Number the classes from 0, and give the model their number."
        allowed = f"a label in [0, {n_classes})"
        raise InvalidParameter.of(f"{target}[{sample_ids[bad]}]", labels[bad].item(), allowed, hint)
    return batch[features], labels


def check_finite(parameter: str, name: str, values: NDArray[Any], sample_ids: NDArray[np.integer]) -> None:
    """Check that all values of ``(n, ...)`` numbers are finite."""
    finite = np.isfinite(values).reshape(len(values), math.prod(values.shape[1:])).all(axis=1)
    if not finite.all():
        sample = sample_ids[int(np.argmin(finite))]
        raise InvalidParameter.of(parameter, name, f"an array of finite values (sample {sample} is not finite)")


Model = TypeVar("Model")
Measure = Callable[[Model, NDArray[Any], NDArray[Any]], tuple[float, float]]
"""Function of a model, features and targets of some samples to two numbers, to be added up."""


def measured(
    epoch: Epoch, measure: Measure[Model], model: Model, *, features: str = "x", target: str = "y"
) -> tuple[float, float]:
    """Return the sums of a measure over the samples of all workers."""
    return tuple(np.sum(gathered(epoch.map(_measured, measure, model, features, target)), axis=0).tolist())


def _measured(
    partition: Partition, measure: Measure[Model], model: Model, features: str, target: str
) -> NDArray[np.float64]:
    sums = np.zeros(2)
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in partition.batches(EVALUATION_ROWS):
            sums += measure(model, batch[features], batch[target])
    return sums


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
    return lambda model: {
        "accuracy": float(np.mean(predict(model, rows) == labels)),
        "accuracy_of_majority": majority,
    }


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
    numbers, of_mean = values.astype(np.float64), float(np.std(values, dtype=np.float64))
    return lambda model: {
        "rmse": float(np.sqrt(np.mean((predict(model, rows) - numbers) ** 2))),
        "rmse_of_mean": of_mean,
    }


def _read(test: Dataset, features: str, target: str) -> tuple[NDArray[Any], NDArray[Any]]:
    ids = np.linspace(0, test.n_samples - 1, min(MOST_SAMPLES, test.n_samples)).astype(np.int64)
    arrays = test.read_rows(ids)
    return arrays[features], arrays[target]
