"""Parallel SGD for scikit-learn's estimators: a local pass on every worker an epoch, then averaging."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.runtime import Partition, Shuffler, gathered
from dshuffle.training.fit import EarlyStopping, History, OnEpoch, Recorder, Validate
from dshuffle.training.inputs import EVALUATION_ROWS, check_finite, check_names
from dshuffle.training.monitoring import timed
from dshuffle.training.schedules import Schedule

BATCH_ROWS = 4096
"""Rows of one call of ``partial_fit``: results depend on it."""
COEFFICIENTS = ("coef_", "intercept_", "coefs_", "intercepts_")
STEPS = ("eta0", "learning_rate_init")
"""What scikit-learn calls the step: linear models, networks."""
FIXED = ("constant", "adaptive")
"""Learning rates of scikit-learn that use the step as it is."""


def fit_parallel_sgd(
    shuffler: Shuffler,
    estimator: Any,
    *,
    epochs: int,
    features: str = "x",
    target: str = "y",
    classes: ArrayLike | None = None,
    batch_rows: int = BATCH_ROWS,
    seed: int = 0,
    schedule: Schedule | None = None,
    validate: Validate[Any] | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
) -> History[Any]:
    """Train a scikit-learn estimator by one ``partial_fit`` pass on every worker an epoch, then averaging.

    Parameters
    ----------
    shuffler
        Any sharding, assignment and delivery.
    estimator
        With ``partial_fit`` and coefficients that can be averaged: ``SGDClassifier``, ``SGDRegressor``,
        ``MLPClassifier``, ``MLPRegressor`` and their kin. It is left as it is; one that is fitted already is where
        training starts.
    epochs
        Passes over the whole dataset.
    features, target
        Arrays of the dataset: ``(q, m)`` numbers; ``(q,)`` integer or boolean labels for a classifier, floats
        otherwise.
    classes
        All labels there are. By default they are looked for in the first epoch.
    batch_rows
        Rows of one call of ``partial_fit``.
    seed
        Takes the place of a ``random_state`` of None: all copies must start from the same numbers.
    schedule
        Factor by epoch on the estimator's step (``eta0`` or ``learning_rate_init``), which must then be one without a
        schedule of its own; by default whatever the estimator has, which need not be constant.
    validate
        Called with the averaged estimator after every epoch; its metrics become the point's ``validation``.
    early_stopping
        When to end before ``epochs``.
    on_epoch
        Called with each epoch's point as soon as it is known.

    Returns
    -------
    History
        ``weights`` is the fitted estimator. A point's ``error`` is that of the averaged estimator over the whole
        dataset: of a classifier the fraction of wrong labels, of a regressor ``||prediction - y|| / ||y||``.

    Raises
    ------
    InvalidParameter
        The estimator cannot be trained like this, the arrays are nothing for it, labels are not in ``classes``,
        features are not finite, or the coefficients diverge.

    Notes
    -----
    Coefficients are averaged with the samples of each worker as weights. Counters of updates (``t_``) go on as those
    of rank 0; the memory of a network's optimiser (momentum, Adam's moments) begins anew every epoch, as it is that
    of a path which the average has not taken.

    References
    ----------
    M. Zinkevich, M. Weimer, L. Li and A. Smola, "Parallelized stochastic gradient descent", NIPS 2010, which averages
    once at the end; paper 000 (UberShuffle), section 5.1, averages once an epoch.
    """
    as_integer("epochs", epochs, 1)
    as_integer("batch_rows", batch_rows, 1)
    model = _prepared(estimator, seed)
    step_name = None if schedule is None else _step_name(model)
    first_step = 0.0 if step_name is None else float(model.get_params()[step_name])
    known = None if classes is None else _checked_classes(np.unique(np.asarray(classes)), None)
    recorder = Recorder(validate, early_stopping, on_epoch)
    for number, epoch in enumerate(shuffler.epochs(epochs)):
        if schedule is not None:
            model.set_params(**{str(step_name): first_step * schedule(number)})
        if is_classifier(model) and number == 0:
            found = gathered(epoch.map(labels_of, target))
            labels = np.unique(np.concatenate([values for values, _ in found]))
            known = _checked_classes(labels, sum(count for _, count in found)) if known is None else known
            if not np.isin(labels, known).all():
                raise InvalidParameter.of(
                    "classes",
                    known.tolist(),
                    f"all labels of {target}: {_some(np.setdiff1d(labels, known))} is missing",
                )
        futures = epoch.map(timed, local_fit, model, known, batch_rows, features=features, target=target)
        fitted = recorder.speeds.collect(futures)
        model = averaged([one for one, _ in fitted], [count for _, count in fitted])
        if not all(np.isfinite(array).all() for array in coefficients(model)):
            raise _diverged(number)
        futures = epoch.map(wrongness, model, features=features, target=target)
        wrong, total = np.sum(gathered(futures), axis=0)
        if total == 0:
            raise InvalidParameter.of("target", target, "an array with a value other than zero")
        if recorder.add(model, float(wrong / total) if is_classifier(model) else math.sqrt(wrong / total)):
            break
    return recorder.history(model)


def is_classifier(estimator: Any) -> bool:
    """Whether ``partial_fit`` wants to know the classes."""
    return "classes" in inspect.signature(estimator.partial_fit).parameters


def labels_of(partition: Partition, target: str) -> tuple[NDArray[Any], int]:
    """The distinct labels of a partition, and how many samples it has; a task on each worker."""
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
    batch_rows: int = BATCH_ROWS,
    *,
    features: str = "x",
    target: str = "y",
) -> tuple[Any, int]:
    """One pass of a copy of the model over a partition, and its samples; a task on each worker."""
    if len(partition) == 0:
        raise InvalidParameter.of("partition", partition.rank, "one with samples", "Use fewer workers.")
    # Workers that are threads of one process may have been given the same object.
    own = copy.deepcopy(model)
    vars(own).pop("_optimizer", None)
    options = {} if classes is None else {"classes": classes}
    first = 0
    for batch in partition.batches(batch_rows):
        rows, targets = checked_rows(batch, features, target, partition.sample_ids[first:])
        try:
            # Overflow is told by values that are not finite.
            with np.errstate(over="ignore", invalid="ignore"):
                own.partial_fit(rows, targets, **options)
        except ValueError as error:
            if "overflow" in str(error):  # scikit-learn's linear models look for it themselves
                raise _diverged(partition.epoch) from error
            raise
        first += len(rows)
    return own, len(partition)


def wrongness(partition: Partition, model: Any, *, features: str = "x", target: str = "y") -> tuple[float, float]:
    """Wrong labels and samples of a partition, or ``(||prediction - y||^2, ||y||^2)``; a task on each worker."""
    wrong = total = 0.0
    for batch in partition.batches(EVALUATION_ROWS):
        predicted, wanted = model.predict(batch[features]), batch[target]
        if is_classifier(model):
            wrong, total = wrong + np.count_nonzero(predicted != wanted), total + len(wanted)
        else:
            wrong += float(np.sum((predicted - wanted.astype(np.float64)) ** 2))
            total += float(np.sum(wanted.astype(np.float64) ** 2))
    return wrong, total


def coefficients(estimator: Any) -> list[NDArray[Any]]:
    """The arrays that are averaged, not copied.

    Raises
    ------
    InvalidParameter
        The fitted estimator has none.
    """
    found: list[NDArray[Any]] = []
    for name in COEFFICIENTS:
        value = getattr(estimator, name, [])
        found += value if isinstance(value, list) else [value]
    if not found:
        raise InvalidParameter.of("estimator", estimator, f"one with {' or '.join(COEFFICIENTS)}, to be averaged")
    return found


def averaged(models: Sequence[Any], samples: Sequence[int]) -> Any:
    """The first of some fitted models, with the mean of all coefficients weighted by samples."""
    each = [coefficients(model) for model in models]
    mean = copy.deepcopy(models[0])
    weights = np.asarray(samples) / np.sum(samples)
    for arrays in zip(coefficients(mean), *each, strict=True):
        arrays[0][...] = np.tensordot(weights, np.stack(arrays[1:]), axes=1)
    return mean


def _prepared(estimator: Any, seed: int) -> Any:
    """A copy that can be trained in parallel."""
    if not hasattr(estimator, "partial_fit"):
        raise InvalidParameter.of(
            "estimator",
            estimator,
            "one with partial_fit",
            "Take SGDClassifier, SGDRegressor, MLPClassifier or MLPRegressor (solver sgd or adam).",
        )
    parameters = estimator.get_params()
    if parameters.get("average"):
        raise InvalidParameter.of("estimator.average", parameters["average"], "False", "Workers are averaged instead.")
    if parameters.get("early_stopping"):
        raise InvalidParameter.of("estimator.early_stopping", True, "False", "Give early_stopping= to the fit.")
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
                    f"one of {', '.join(FIXED)} beside a schedule",
                    "Others have a schedule of their own.",
                )
            return name
    raise InvalidParameter.of("estimator", model, f"one with {' or '.join(STEPS)} beside a schedule")


def _checked_classes(classes: NDArray[Any], n_samples: int | None) -> NDArray[Any]:
    if len(classes) < 2:
        raise InvalidParameter.of("classes", classes.tolist(), "at least two labels")
    if n_samples is not None and len(classes) == n_samples:
        raise InvalidParameter.of("target", f"{n_samples} distinct labels", "an array of labels that occur again")
    return classes


def _some(values: NDArray[Any]) -> str:
    return ", ".join(map(str, values[:5].tolist())) + (", ..." if len(values) > 5 else "")


def _array(partition: Partition, name: str, parameter: str) -> NDArray[Any]:
    check_names(partition.names, **{parameter: name})
    return partition[name]


def checked_rows(
    batch: Mapping[str, NDArray[Any]], features: str, target: str, sample_ids: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The features and the target of a batch, if they are finite numbers of the right shape.

    Raises
    ------
    InvalidParameter
        Naming the parameter, and the sample if it is one.
    """
    check_names(batch, features=features, target=target)
    for parameter, name, dimensions in (("features", features, 2), ("target", target, 1)):
        array = batch[name]
        if array.ndim != dimensions or array.dtype.kind not in "biuf":
            raise InvalidParameter.of(
                parameter, name, f"a {dimensions}-D array of numbers (it is {array.ndim}-D, {array.dtype})"
            )
        check_finite(parameter, name, array, sample_ids)
    return batch[features], batch[target]


def _diverged(epoch: int) -> InvalidParameter:
    return InvalidParameter.of(
        "estimator",
        "the one given",
        "one whose coefficients stay finite",
        f"They diverged in epoch {epoch}: take a smaller step, or scale the features.",
    )
