"""Parallel SGD for scikit-learn estimators: one local pass per epoch on every worker, then averaging."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter, TrainingDiverged
from dshuffle.runtime import Partition, Shuffler, gathered
from dshuffle.store import Dataset
from dshuffle.training.fit import EarlyStopping, History, OnEpoch, Recorder, Schedule, Validate, raises_once, timed
from dshuffle.training.inputs import EVALUATION_ROWS, check_finite, check_names

BATCH_ROWS = 4096
"""Rows per call of ``partial_fit``, for estimators that take a step with every row."""
NETWORK_BATCH_ROWS = 32
"""Rows per call of ``partial_fit``, for estimators that take a step with every batch."""
COEFFICIENTS = ("coef_", "intercept_", "coefs_", "intercepts_")
STEPS = ("eta0", "learning_rate_init")
"""Names of the step in scikit-learn: linear models, neural networks."""
FIXED = ("constant", "adaptive")
"""Learning rates of scikit-learn that leave the step unchanged in ``partial_fit``."""


@raises_once
def fit_parallel_sgd(
    shuffler: Shuffler,
    estimator: Any,
    *,
    epochs: int,
    features: str = "x",
    target: str = "y",
    classes: ArrayLike | None = None,
    batch_rows: int | None = None,
    seed: int = 0,
    schedule: Schedule | None = None,
    validate: Validate[Any] | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
) -> History[Any]:
    """Train a scikit-learn estimator by one ``partial_fit`` pass on every worker per epoch, then averaging.

    Parameters
    ----------
    shuffler
        Shuffler with any sharding, assignment and delivery.
    estimator
        Estimator with ``partial_fit`` and coefficients that can be averaged, such as ``SGDClassifier``,
        ``SGDRegressor``, ``MLPClassifier`` or ``MLPRegressor``. It is not modified. If it is already fitted, training
        starts from its coefficients.
    epochs
        Number of passes over the whole dataset.
    features, target
        Names of arrays in the dataset: ``(q, m)`` numbers; ``(q,)`` integer or boolean labels for a classifier, floats
        otherwise.
    classes
        All class labels. By default they are collected from the dataset in the first epoch.
    batch_rows
        Rows per call of ``partial_fit``. None is the ``batch_size`` of estimators that have one, such as
        ``MLPClassifier``, or 32 if that is ``"auto"``: such an estimator takes one step per batch, and needs many steps
        between averages to learn. For other estimators, which take a step with every row, None is 4,096.
    seed
        Replacement for a ``random_state`` of None. All copies must start from the same random numbers.
    schedule
        Factor on the estimator's step (``eta0`` or ``learning_rate_init``) by epoch. The estimator's learning rate must
        then be ``"constant"`` or ``"adaptive"``. By default the estimator keeps its own learning rate, which need not
        be constant.
    validate
        Function that is called with the averaged estimator after every epoch. The metrics that it returns become the
        point's ``validation``.
    early_stopping
        Rule that ends the fit before ``epochs``.
    on_epoch
        Function that is called with the :class:`~dshuffle.report.TrainingPoint` of each epoch as soon as it is known.

    Returns
    -------
    History
        ``model`` is the fitted estimator. A point's ``error`` is the error of the averaged estimator over the whole
        dataset: the fraction of wrong labels for a classifier, ``||prediction - y|| / ||y||`` for a regressor.

    Raises
    ------
    InvalidParameter
        The estimator cannot be trained in parallel, the arrays do not suit it, labels are not in ``classes``, features
        are not finite, or the coefficients diverge.

    Notes
    -----
    The average weights each worker by its number of samples. Update counters (``t_``) continue from those of rank 0.
    The optimizer state of a network (momentum, Adam's moments) is reset every epoch, because it belongs to one worker's
    path and not to the average.

    References
    ----------
    Chung et al. (2017), section 5.1, average once an epoch; see docs/papers.md. M. Zinkevich, M. Weimer, L. Li and A.
    Smola, "Parallelized stochastic gradient descent", NIPS 2010, averages once at the end.
    """
    as_integer("epochs", epochs, 1)
    model = _prepared(estimator, seed)
    batch_rows = _default_batch_rows(model) if batch_rows is None else as_integer("batch_rows", batch_rows, 1)
    step_name = None if schedule is None else _step_name(model)
    first_step = 0.0 if step_name is None else float(model.get_params()[step_name])
    if isinstance(shuffler, Shuffler):  # not a stand-in without a dataset
        check_arrays(shuffler.dataset, features, target)
    all_labels = None if classes is None else _checked_classes(np.unique(np.asarray(classes)), None)
    recorder = Recorder(validate, early_stopping, on_epoch)
    model = recorder.begin(shuffler, "fit_parallel_sgd", model, batch_rows=batch_rows)
    labels = None
    for number, epoch in recorder.epochs(shuffler, epochs):
        if schedule is not None:
            model.set_params(**{str(step_name): first_step * schedule(number)})
        if is_classifier(model) and labels is None:
            surveys = gathered(epoch.map(labels_of, target))
            labels = np.unique(np.concatenate([values for values, _ in surveys]))
            all_labels = (
                _checked_classes(labels, sum(count for _, count in surveys)) if all_labels is None else all_labels
            )
            if not np.isin(labels, all_labels).all():
                raise InvalidParameter.of(
                    "classes",
                    all_labels.tolist(),
                    f"a list of all labels of {target}",
                    f"Add {_some(np.setdiff1d(labels, all_labels))}.",
                )
        futures = epoch.map(timed, local_fit, model, all_labels, batch_rows, features=features, target=target)
        fitted = recorder.speeds.collect(futures)
        model = averaged([part for part, _ in fitted], [count for _, count in fitted])
        if not all(np.isfinite(array).all() for array in coefficients(model)):
            raise _diverged(number)
        futures = epoch.map(wrongness, model, features=features, target=target)
        wrong, total = np.sum(gathered(futures), axis=0)
        if total == 0:
            raise InvalidParameter.of("target", target, "an array with at least one non-zero value")
        if recorder.add(model, float(wrong / total) if is_classifier(model) else math.sqrt(wrong / total)):
            break
    return recorder.history(model)


def is_classifier(estimator: Any) -> bool:
    """Return whether the estimator's ``partial_fit`` takes ``classes``."""
    return "classes" in inspect.signature(estimator.partial_fit).parameters


def labels_of(partition: Partition, target: str) -> tuple[NDArray[Any], int]:
    """Return the distinct labels and the number of samples of a partition. Runs as a task on each worker."""
    labels = _array(partition, target, "target")
    if labels.dtype.kind not in "biu" or labels.ndim != 1:
        raise InvalidParameter.of(
            "target", target, f"a 1-D array of integers or booleans (it is {labels.ndim}-D, {labels.dtype})"
        )
    return np.unique(labels), len(labels)


def local_fit(
    partition: Partition,
    model: Any,
    classes: NDArray[Any] | None,
    batch_rows: int,
    *,
    features: str = "x",
    target: str = "y",
) -> tuple[Any, int]:
    """Train a copy of the model for one pass over a partition. Runs as a task on each worker."""
    if len(partition) == 0:
        raise InvalidParameter.because("partition", f"rank {partition.rank} has no samples", "Use fewer workers.")
    # Workers in one process may share the same object.
    own = copy.deepcopy(model)
    vars(own).pop("_optimizer", None)
    options = {} if classes is None else {"classes": classes}
    batch_size = getattr(own, "batch_size", None)
    first = 0
    for batch in partition.batches(batch_rows):
        rows, targets = checked_rows(batch, features, target, partition.sample_ids[first:])
        if isinstance(batch_size, int):  # scikit-learn warns of a batch size above the number of rows
            own.batch_size = min(batch_size, len(rows))
        try:
            # Overflow leads to coefficients that are not finite, which the client checks.
            with np.errstate(over="ignore", invalid="ignore"):
                own.partial_fit(rows, targets, **options)
        except ValueError as error:
            if "overflow" in str(error):  # scikit-learn's linear models check for overflow themselves
                raise _diverged(partition.epoch) from error
            raise
        first += len(rows)
    if batch_size is not None:
        own.batch_size = batch_size
    return own, len(partition)


def wrongness(partition: Partition, model: Any, *, features: str = "x", target: str = "y") -> tuple[float, float]:
    """Return a partition's wrong labels and samples, or for a regressor ``(||prediction - y||^2, ||y||^2)``.

    Runs as a task on each worker.
    """
    wrong = total = 0.0
    for batch in partition.batches(EVALUATION_ROWS):
        predicted, truth = model.predict(batch[features]), batch[target]
        if is_classifier(model):
            wrong, total = wrong + np.count_nonzero(predicted != truth), total + len(truth)
        else:
            wrong += float(np.sum((predicted - truth.astype(np.float64)) ** 2))
            total += float(np.sum(truth.astype(np.float64) ** 2))
    return wrong, total


def coefficients(estimator: Any) -> list[NDArray[Any]]:
    """Return the estimator's coefficient arrays, without copying them."""
    arrays: list[NDArray[Any]] = []
    for name in COEFFICIENTS:
        value = getattr(estimator, name, [])
        arrays += value if isinstance(value, list) else [value]
    if not arrays:
        raise InvalidParameter.of("estimator", estimator, f"an estimator with {' or '.join(COEFFICIENTS)}")
    return arrays


def averaged(models: Sequence[Any], samples: Sequence[int]) -> Any:
    """Return a copy of the first fitted model with the sample-weighted mean of all models' coefficients."""
    each = [coefficients(model) for model in models]
    mean = copy.deepcopy(models[0])
    weights = np.asarray(samples) / np.sum(samples)
    for arrays in zip(coefficients(mean), *each, strict=True):
        arrays[0][...] = np.tensordot(weights, np.stack(arrays[1:]), axes=1)
    return mean


def _default_batch_rows(estimator: Any) -> int:
    batch_size = getattr(estimator, "batch_size", None)
    if batch_size is None:
        return BATCH_ROWS
    return NETWORK_BATCH_ROWS if batch_size == "auto" else as_integer("estimator.batch_size", batch_size, 1)


def _prepared(estimator: Any, seed: int) -> Any:
    """Return a copy of the estimator that can be trained in parallel."""
    if not hasattr(estimator, "partial_fit"):
        raise InvalidParameter.of(
            "estimator",
            estimator,
            "an estimator with partial_fit",
            "Use SGDClassifier, SGDRegressor, MLPClassifier or MLPRegressor (solver sgd or adam).",
        )
    parameters = estimator.get_params()
    if parameters.get("average"):
        hint = "The coefficients of the workers are averaged instead."
        raise InvalidParameter.of("estimator.average", parameters["average"], "False", hint)
    if parameters.get("early_stopping"):
        raise InvalidParameter.of("estimator.early_stopping", True, "False", "Pass early_stopping to the fit.")
    model = copy.deepcopy(estimator)
    if parameters.get("random_state", 0) is None:
        model.set_params(random_state=seed)
    return model


def _step_name(model: Any) -> str:
    parameters = model.get_params()
    for name in STEPS:
        if name in parameters:
            if parameters.get("learning_rate", FIXED[0]) not in FIXED:
                raise InvalidParameter.of(
                    "estimator.learning_rate",
                    parameters["learning_rate"],
                    f"one of {', '.join(FIXED)} when a schedule is given",
                    "Other learning rates have a schedule of their own.",
                )
            return name
    raise InvalidParameter.of("estimator", model, f"an estimator with {' or '.join(STEPS)} when a schedule is given")


def _checked_classes(classes: NDArray[Any], n_samples: int | None) -> NDArray[Any]:
    if len(classes) < 2:
        raise InvalidParameter.of("classes", classes.tolist(), "a list of at least two labels")
    if n_samples is not None and len(classes) == n_samples:
        raise InvalidParameter.because(
            "target",
            f"its {n_samples} samples have {n_samples} distinct labels",
            "Choose an array whose labels occur more than once.",
        )
    return classes


def _some(values: NDArray[Any]) -> str:
    return ", ".join(map(str, values[:5].tolist())) + (", ..." if len(values) > 5 else "")


def _array(partition: Partition, name: str, parameter: str) -> NDArray[Any]:
    check_names(partition.names, **{parameter: name})
    return partition[name]


def checked_rows(
    batch: Mapping[str, NDArray[Any]], features: str, target: str, sample_ids: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the features and the target of a batch, if they are finite numbers of the right shape."""
    check_names(batch, features=features, target=target)
    for parameter, name, dimensions in (("features", features, 2), ("target", target, 1)):
        _check_shape(parameter, name, dimensions, batch[name].ndim, batch[name].dtype)
        check_finite(parameter, name, batch[name], sample_ids)
    return batch[features], batch[target]


def check_arrays(dataset: Dataset, features: str, target: str) -> None:
    """Check the shapes and dtypes of the features and the target, before any task runs."""
    check_names(dataset.arrays, features=features, target=target)
    for parameter, name, dimensions in (("features", features, 2), ("target", target, 1)):
        array = dataset.arrays[name]
        _check_shape(parameter, name, dimensions, 1 + len(array.shape), array.dtype)


def _check_shape(parameter: str, name: str, dimensions: int, n_axes: int, dtype: np.dtype[Any]) -> None:
    if n_axes != dimensions or dtype.kind not in "biuf":
        hint = "Write them as rows: x.reshape(len(x), -1) for an array x, or a Dask array." if n_axes > 2 else ""
        allowed = f"a {dimensions}-D array of numbers (it is {n_axes}-D, {dtype})"
        raise InvalidParameter.of(parameter, name, allowed, hint)


def _diverged(epoch: int) -> TrainingDiverged:
    return TrainingDiverged.because(
        "estimator",
        f"its coefficients diverged in epoch {epoch}",
        "Take a smaller step, or scale the features.",
    )
