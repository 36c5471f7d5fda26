"""Parallel SGD for linear regression: paper 000, section 5.1, equation 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numba
import numpy as np
from distributed import Future
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.runtime import Partition, Shuffler
from dshuffle.training.history import EarlyStopping, History, OnEpoch, Recorder, Validate
from dshuffle.training.schedules import Decay, Schedule
from dshuffle.training.speeds import timed

Weights = NDArray[np.float64]

# Rows that a task holds beside its partition: a few MB at a thousand features.
BATCH_ROWS = 4096


def fit_linear_regression(
    shuffler: Shuffler,
    *,
    epochs: int,
    step: float,
    step_decay: float = 1.0,
    features: str = "x",
    target: str = "y",
    truth: NDArray[np.floating[Any]] | None = None,
    schedule: Schedule | None = None,
    validate: Validate[Weights] | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
) -> History[Weights]:
    """Fit ``y = x @ weights`` by one local SGD pass on every worker an epoch, then averaging.

    Parameters
    ----------
    shuffler
        Any sharding, assignment and delivery.
    epochs
        Passes over the whole dataset.
    step
        Step of the first epoch; below ``2 / max ||x_j||^2`` no single update can overshoot.
    step_decay
        Factor on the step after every epoch, in (0, 1]: short for ``schedule=Decay(step_decay)``.
    features, target
        Arrays of the dataset: ``(q, m)`` and ``(q,)``, float32 or float64.
    truth
        ``(m,)`` the true weights, where they are known.
    schedule
        Factor on the step by epoch, such as :class:`~dshuffle.training.Linear`; instead of ``step_decay``.
    validate
        Called with the weights after every epoch; its metrics become the point's ``validation``.
    early_stopping
        When to end before ``epochs``.
    on_epoch
        Called with each epoch's point as soon as it is known.

    Returns
    -------
    History
        A point's ``error`` is ``||X w - y|| / ||y||`` over the whole dataset, and its ``weight_error`` is
        ``||w - truth|| / ||truth||``.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, the arrays are no regression, or the step makes the weights diverge.

    Notes
    -----
    Differences from the paper: the weights start at zero instead of at random, so that runs can be compared;
    the workers measure the residual, which needs no true weights. Rows are visited in the partition's own
    order, which the shuffler redraws every epoch.

    References
    ----------
    Paper 000 (UberShuffle), section 5.1, equation 4. M. Zinkevich, M. Weimer, L. Li and A. Smola,
    "Parallelized stochastic gradient descent", NIPS 2010, which averages once at the end; the paper averages
    once an epoch.
    """
    if epochs < 1:
        raise InvalidParameter.of("epochs", epochs, "an integer >= 1")
    check_step(step)
    if not 0 < step_decay <= 1:
        raise InvalidParameter.of("step_decay", step_decay, "in (0, 1]")
    if schedule is not None and step_decay != 1:
        raise InvalidParameter.of("step_decay", step_decay, "1.0 beside a schedule", "Give one of them.")
    factor = schedule or Decay(step_decay)
    weights: Weights | None = None
    recorder = Recorder(validate, early_stopping, on_epoch)
    for number, epoch in enumerate(shuffler.epochs(epochs)):
        size = step * factor(number)
        passes = epoch.map(timed, local_pass, weights, size, features=features, target=target)
        local = recorder.speeds.collect(passes)
        if not all(np.isfinite(one).all() for one in local):
            raise _diverged(size, number)
        # Near the largest float the mean overflows: the residual tells.
        with np.errstate(over="ignore", invalid="ignore"):
            weights = np.mean(local, axis=0)
        sums = np.sum(_results(epoch.map(residual, weights, features=features, target=target)), axis=0)
        if not np.isfinite(sums).all():
            raise _diverged(size, number)
        if sums[1] == 0:
            raise InvalidParameter.of("target", target, "an array with a value other than zero")
        distance = None if truth is None else _distance(weights, truth)
        if recorder.add(weights, math.sqrt(sums[0] / sums[1]), distance):
            break
    assert weights is not None
    return recorder.history(weights)


def local_pass(
    partition: Partition, weights: Weights | None, step: float, *, features: str = "x", target: str = "y"
) -> Weights:
    """One SGD pass over a partition from the common weights (``None``: zeros); a task on each worker."""
    own = None if weights is None else weights.copy()
    for batch in partition.batches(BATCH_ROWS):
        rows, targets = _regression(batch, features, target)
        if own is None:
            own = np.zeros(rows.shape[1])
        sgd_pass(own, rows, targets, step)
    if own is None:
        raise InvalidParameter.of("partition", partition.rank, "one with samples", "Use fewer workers.")
    return own


def residual(partition: Partition, weights: Weights, *, features: str = "x", target: str = "y") -> tuple[float, float]:
    """``(||X w - y||^2, ||y||^2)`` over a partition; a task on each worker."""
    wrong = total = 0.0
    for batch in partition.batches(BATCH_ROWS):
        rows, targets = _regression(batch, features, target)
        # Weights near the largest float overflow here: the caller tells by the infinite sum.
        with np.errstate(over="ignore", invalid="ignore"):
            difference = rows @ weights - targets
            wrong += float(difference @ difference)
            total += float(targets @ targets)
    return wrong, total


@numba.njit(nogil=True, cache=True)
def sgd_pass(weights, rows, targets, step):  # type: ignore[no-untyped-def]
    """Equation 4 for every row in turn, in place: ``w -= step * a (a . w - y)``.

    Parameters
    ----------
    weights
        ``(m,)`` float64, changed in place.
    rows, targets
        ``(n, m)`` float32 or float64 and ``(n,)`` float64, both contiguous.
    step
        The step size.
    """
    for i in range(rows.shape[0]):
        product = 0.0
        for j in range(weights.size):
            product += rows[i, j] * weights[j]
        pull = step * (product - targets[i])
        for j in range(weights.size):
            weights[j] -= pull * rows[i, j]


def _regression(
    batch: dict[str, NDArray[Any]], features: str, target: str
) -> tuple[NDArray[np.floating[Any]], NDArray[np.float64]]:
    check_regression({name: (array.dtype, array.ndim) for name, array in batch.items()}, features, target)
    # Contiguous and writeable copies where need be: then the kernel has two signatures only.
    return np.require(batch[features], requirements=["C", "W"]), np.require(batch[target], np.float64, ["C", "W"])


def check_regression(arrays: Mapping[str, tuple[np.dtype[Any], int]], features: str, target: str) -> None:
    """Raise :class:`InvalidParameter` unless a linear regression can use these two arrays.

    Parameters
    ----------
    arrays
        Name -> dtype and number of dimensions, samples included.
    features, target
        The names chosen.
    """
    for parameter, name, dimensions in (("features", features, 2), ("target", target, 1)):
        if name not in arrays:
            raise InvalidParameter.of(
                parameter,
                name,
                f"one of the dataset's arrays: {', '.join(sorted(arrays))}",
                f"Name another with {parameter}= (--{parameter}).",
            )
        dtype, found = arrays[name]
        if dtype not in (np.float32, np.float64) or found != dimensions:
            raise InvalidParameter.of(
                parameter,
                name,
                f"a {dimensions}-D array of float32 or float64 (it is {found}-D, {dtype})",
                f"Name another array with {parameter} (--{parameter} on the command line).",
            )


def _distance(weights: Weights, truth: NDArray[np.floating[Any]]) -> float:
    return float(np.linalg.norm(weights - truth) / np.linalg.norm(truth))


def _results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result() for future in futures]


def check_step(step: float) -> float:
    """The step, if it is one.

    Raises
    ------
    InvalidParameter
        If it is not a finite number above 0.
    """
    if not (math.isfinite(step) and step > 0):
        raise InvalidParameter.of("step", step, "a finite number > 0")
    return step


def _diverged(step: float, epoch: int) -> InvalidParameter:
    return InvalidParameter.of(
        "step",
        step,
        "small enough for the weights to stay finite",
        f"They diverged in epoch {epoch}: take a smaller step (below 2 / the largest squared norm of a row), "
        "or look for NaN and infinite values in the data.",
    )
