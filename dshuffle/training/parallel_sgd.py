"""Parallel SGD for scikit-learn estimators: one local pass per epoch on every worker, then averaging."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.runtime import Epoch, Partition, Shuffler, gathered
from dshuffle.training.fit import (
    NUMBERS,
    WHOLE,
    FitOptions,
    History,
    Trained,
    check_array,
    check_batch,
    check_converging,
    in_passes,
    measured,
    run_epochs,
    trainer,
)

BATCH_ROWS = 4096
"""Rows per call of ``partial_fit``, for estimators that take a step with every row."""
NETWORK_BATCH_ROWS = 32
"""Rows per call of ``partial_fit``, for estimators that take a step with every batch."""
COEFFICIENTS = ("coef_", "intercept_", "coefs_", "intercepts_")


@trainer("models")
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
    **options: Unpack[FitOptions],
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
    **options
        Options of all trainers: see :class:`~dshuffle.training.FitOptions`. A ``schedule`` needs an estimator whose
        learning rate is ``"constant"`` or ``"adaptive"``, and is a factor on ``eta0`` or ``learning_rate_init``. By
        default the estimator keeps its own learning rate, which need not be constant.

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
    model = _prepared(estimator, seed)
    parameters, classifies = model.get_params(), is_classifier(model)
    if batch_rows is None:
        size = parameters.get("batch_size", BATCH_ROWS)
        batch_rows = NETWORK_BATCH_ROWS if size == "auto" else size
    as_integer("batch_rows", batch_rows, 1)
    if options.get("schedule") is None:
        options.pop("schedule", None)
    step_name = _step_name(model) if options.get("schedule") else ""
    check_array("features", features, shuffler.dataset.arrays, 2, NUMBERS)
    check_array("target", target, shuffler.dataset.arrays, 1, WHOLE if classifies else NUMBERS)
    labels = None if classes is None else np.unique(classes)

    def train(epoch: Epoch, number: int, model: Any, factor: float) -> Trained:
        nonlocal labels
        if step_name:
            model.set_params(**{step_name: parameters[step_name] * factor})
        if classifies:
            if labels is None:
                labels = np.unique(np.concatenate(gathered(epoch.map(labels_of, target))))
            if len(labels) < 2:
                raise InvalidParameter.of("classes", labels.tolist(), "a list of at least two labels")
        model = averaged(*in_passes(epoch, local_fit, model, labels, batch_rows, features, target))
        check_converging("estimator", number, *coefficients(model))
        wrong, total = measured(epoch, wrongness, model, features, target)
        if total == 0:
            raise InvalidParameter.of("target", target, "an array with at least one non-zero value")
        return Trained(model, wrong / total if classifies else math.sqrt(wrong / total))

    return run_epochs(shuffler, "fit_parallel_sgd", model, train, epochs, **options)


def is_classifier(estimator: Any) -> bool:
    """Return whether the estimator's ``partial_fit`` takes ``classes``."""
    return "classes" in inspect.signature(estimator.partial_fit).parameters


def labels_of(partition: Partition, target: str) -> NDArray[Any]:
    """Return the distinct labels of a partition."""
    return np.unique(partition[target])


def local_fit(
    partition: Partition, model: Any, classes: NDArray[Any] | None, batch_rows: int, features: str, target: str
) -> Any:
    """Train a copy of the model for one pass over a partition."""
    # Workers in one process may share the same object.
    own = copy.deepcopy(model)
    vars(own).pop("_optimizer", None)
    options = {} if classes is None else {"classes": classes}
    batch_size = getattr(own, "batch_size", None)
    first = 0
    for batch in partition.batches(batch_rows):
        rows, targets = check_batch(batch, partition.sample_ids[first:], features, target)
        if classes is not None and len(unknown := np.setdiff1d(targets, classes)):
            hint = f"Add {unknown[0]}."
            raise InvalidParameter.of("classes", classes.tolist(), f"a list of all labels of {target}", hint)
        if isinstance(batch_size, int):  # scikit-learn warns of a batch size above the number of rows
            own.batch_size = min(batch_size, len(rows))
        try:
            # Overflow leads to coefficients that are not finite, which the client checks.
            with np.errstate(over="ignore", invalid="ignore"):
                own.partial_fit(rows, targets, **options)
        except ValueError as error:
            if "overflow" in str(error):  # scikit-learn's linear models check for overflow themselves
                check_converging("estimator", partition.epoch, np.inf)
            raise
        first += len(rows)
    if batch_size is not None:
        own.batch_size = batch_size
    return own


def wrongness(model: Any, rows: NDArray[Any], targets: NDArray[Any]) -> tuple[float, float]:
    """Return wrong labels and samples, or for a regressor ``(||prediction - y||^2, ||y||^2)``."""
    predicted = model.predict(rows)
    if is_classifier(model):
        return int(np.count_nonzero(predicted != targets)), len(targets)
    numbers = targets.astype(np.float64)
    return np.sum((predicted - numbers) ** 2), np.sum(numbers**2)


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
    mean = copy.deepcopy(models[0])
    weights = np.asarray(samples) / np.sum(samples)
    for own, *each in zip(coefficients(mean), *map(coefficients, models), strict=True):
        own[...] = np.tensordot(weights, np.stack(each), axes=1)
    return mean


def _prepared(estimator: Any, seed: int) -> Any:
    """Return a copy of the estimator that can be trained in parallel."""
    if not hasattr(estimator, "partial_fit"):
        hint = "Use SGDClassifier, SGDRegressor, MLPClassifier or MLPRegressor (solver sgd or adam)."
        raise InvalidParameter.of("estimator", estimator, "an estimator with partial_fit", hint)
    parameters = estimator.get_params()
    for name, hint in (
        ("average", "The coefficients of the workers are averaged instead."),
        ("early_stopping", "Pass it to the fit instead."),
    ):
        if parameters.get(name):
            raise InvalidParameter.of(f"estimator.{name}", parameters[name], "False", hint)
    model = copy.deepcopy(estimator)
    if parameters.get("random_state", 0) is None:
        model.set_params(random_state=seed)
    return model


def _step_name(model: Any) -> str:
    parameters = model.get_params()
    if (rate := parameters.get("learning_rate", "constant")) not in ("constant", "adaptive"):
        hint = "Other learning rates have a schedule of their own."
        raise InvalidParameter.of("estimator.learning_rate", rate, "constant or adaptive with a schedule", hint)
    for name in ("eta0", "learning_rate_init"):
        if name in parameters:
            return name
    raise InvalidParameter.of("estimator", model, "an estimator with eta0 or learning_rate_init for a schedule")
