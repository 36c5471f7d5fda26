"""Parallel SGD for linear regression: paper 000, section 5.1, equation 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import BEGINNING, KERNEL, prefetch
from dshuffle.runtime import Partition, Shuffler, gathered
from dshuffle.training.fit import EarlyStopping, History, OnEpoch, Recorder, Validate
from dshuffle.training.inputs import check_names, check_step, diverged
from dshuffle.training.monitoring import timed
from dshuffle.training.schedules import CONSTANT, Decay, Schedule

Weights = NDArray[np.float64]

AHEAD = 8
"""Samples between asking for a row and using it."""
REMEDY = (
    "take a smaller step (below 2 / the largest squared norm of a row), or look for NaN and infinite values in the data"
)


def fit_linear_regression(
    shuffler: Shuffler,
    *,
    epochs: int,
    step: float,
    step_decay: float = 1.0,
    features: str = "x",
    target: str = "y",
    truth: NDArray[np.floating[Any]] | None = None,
    schedule: Schedule = CONSTANT,
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
        A parameter is out of range, the arrays are no regression, ``truth`` is not of the weights' shape, or the step
        makes the weights diverge.

    Notes
    -----
    Differences from the paper: the weights start at zero instead of at random, so that runs can be compared;
    the workers measure the residual, which needs no true weights; the average is weighted by samples, which for equal
    shares is the paper's plain mean. Rows are visited in the partition's own order, which the shuffler redraws every
    epoch.

    References
    ----------
    Paper 000 (UberShuffle), section 5.1, equation 4. M. Zinkevich, M. Weimer, L. Li and A. Smola,
    "Parallelized stochastic gradient descent", NIPS 2010, which averages once at the end; the paper averages
    once an epoch.
    """
    as_integer("epochs", epochs, 1)
    check_step(step)
    if not 0 < step_decay <= 1:
        raise InvalidParameter.of("step_decay", step_decay, "in (0, 1]")
    if schedule != CONSTANT and step_decay != 1:
        raise InvalidParameter.of("step_decay", step_decay, "1.0 beside a schedule", "Give one of them.")
    factor = Decay(step_decay) if schedule == CONSTANT else schedule
    weights: Weights | None = None
    recorder = Recorder(validate, early_stopping, on_epoch)
    for number, epoch in enumerate(shuffler.epochs(epochs)):
        size = step * factor(number)
        passes = epoch.map(timed, local_pass, weights, size, features=features, target=target)
        local, counts = zip(*recorder.speeds.collect(passes), strict=True)
        if not all(np.isfinite(one).all() for one in local):
            raise diverged(size, number, what="weights", remedy=REMEDY)
        # Near the largest float the mean overflows: the residual tells.
        with np.errstate(over="ignore", invalid="ignore"):
            # Divided by the largest they are ones for equal shares: the plain mean, to the last bit.
            weights = np.average(local, axis=0, weights=np.divide(counts, max(counts)))
        if truth is not None and np.shape(truth) != weights.shape:
            raise InvalidParameter.of("truth", f"an array of shape {np.shape(truth)}", f"of shape {weights.shape}")
        sums = np.sum(gathered(epoch.map(residual, weights, features=features, target=target)), axis=0)
        if not np.isfinite(sums).all():
            raise diverged(size, number, what="weights", remedy=REMEDY)
        if sums[1] == 0:
            raise InvalidParameter.of("target", target, "an array with a value other than zero")
        distance = None if truth is None else _distance(weights, truth)
        if recorder.add(weights, math.sqrt(sums[0] / sums[1]), distance):
            break
    assert weights is not None
    return recorder.history(weights)


def local_pass(
    partition: Partition, weights: Weights | None, step: float, *, features: str = "x", target: str = "y"
) -> tuple[Weights, int]:
    """One SGD pass over a partition from the common weights (``None``: zeros), and its samples; a task."""
    if len(partition) == 0:
        raise InvalidParameter.of("partition", partition.rank, "one with samples", "Use fewer workers.")
    own, *samples = _regression(partition, weights, features, target)
    sgd_pass(own, *samples, step)
    return own, len(partition)


def residual(partition: Partition, weights: Weights, *, features: str = "x", target: str = "y") -> tuple[float, float]:
    """``(||X w - y||^2, ||y||^2)`` over a partition; a task on each worker."""
    wrong, total = squared_residual(*_regression(partition, weights, features, target))
    return wrong, total


@numba.njit(**KERNEL)
def sgd_pass(weights, rows, first, targets, place, slots, step):  # type: ignore[no-untyped-def]
    """Equation 4 for every sample in turn, in place: ``w -= step * a (a . w - y)``.

    Parameters
    ----------
    weights
        ``(m,)`` float64, changed in place.
    rows, first
        ``(s, k)`` float32 or float64: ``rows[slot, first : first + m]`` are the features of a sample.
    targets, place
        The same of its target: ``targets[slot, place]``.
    slots
        ``(n,)`` int64: the samples in training order.
    step
        The step size.
    """
    for i in range(slots.size):
        slot = slots[i]
        if i + AHEAD < slots.size:
            _prefetch(rows, slots[i + AHEAD], first, weights.size)
            _prefetch(targets, slots[i + AHEAD], place, 1)
        row = _row(rows, slot, first, weights.size)
        pull = step * (_dot(weights, row) - targets[slot, place])
        for j in range(weights.size):
            weights[j] -= pull * row[j]


@numba.njit(**KERNEL)
def squared_residual(weights, rows, first, targets, place, slots):  # type: ignore[no-untyped-def]
    """``sum (a . w - y)^2`` and ``sum y^2`` over samples given as in :func:`sgd_pass`."""
    wrong = total = 0.0
    for i in range(slots.size):
        if i + AHEAD < slots.size:
            _prefetch(rows, slots[i + AHEAD], first, weights.size)
            _prefetch(targets, slots[i + AHEAD], place, 1)
        wanted = float(targets[slots[i], place])
        wrong += (_dot(weights, _row(rows, slots[i], first, weights.size)) - wanted) ** 2
        total += wanted**2
    return wrong, total


@numba.njit(inline="always", **KERNEL)
def _row(rows, slot, first, count):  # type: ignore[no-untyped-def]
    """A sample's values, counted from zero: an index that is a sum might be negative, which costs a test an item."""
    return rows[slot, first : first + count]


@numba.njit(inline="always", **KERNEL)
def _dot(weights, row):  # type: ignore[no-untyped-def]
    """``row . weights`` by four sums at once, in an order that no machine changes."""
    a = b = c = d = 0.0
    whole = weights.size // 4 * 4
    for j in range(0, whole, 4):
        a += row[j] * weights[j]
        b += row[j + 1] * weights[j + 1]
        c += row[j + 2] * weights[j + 2]
        d += row[j + 3] * weights[j + 3]
    for j in range(whole, weights.size):
        a += row[j] * weights[j]
    return (a + b) + (c + d)


@numba.njit(inline="always", **KERNEL)
def _prefetch(rows, slot, first, count):  # type: ignore[no-untyped-def]
    """Begin to bring some of a sample's values from memory, the beginning of many."""
    line = np.uint64(rows.ctypes.data) + np.uint64(slot * rows.strides[0] + first * rows.itemsize)
    end = line + np.uint64(min(count * rows.itemsize, BEGINNING))
    while line < end:
        prefetch(line)
        line += np.uint64(64)


def _regression(
    partition: Partition, weights: Weights | None, features: str, target: str
) -> tuple[Weights, NDArray[Any], int, NDArray[Any], int, NDArray[np.int64]]:
    """A copy of the weights and where a regression's samples are, as the kernels take them, which check nothing."""
    arrays = {name: partition.dtype(name) for name in partition.names}
    check_regression({name: (dtype, 1 + len(shape)) for name, (dtype, shape) in arrays.items()}, features, target)
    [width] = partition.dtype(features)[1]
    own = np.zeros(width) if weights is None else weights.copy()
    if own.shape != (width,):
        raise InvalidParameter.of("weights.shape", own.shape, f"({width},), as {features} has it")
    rows, first, slots = partition.rows(features)
    targets, place, _ = partition.rows(target)
    return own, rows, first, targets, place, slots


def check_regression(arrays: Mapping[str, tuple[np.dtype[Any], int]], features: str, target: str) -> None:
    """Raise :class:`InvalidParameter` unless a linear regression can use these two arrays.

    Parameters
    ----------
    arrays
        Name -> dtype and number of dimensions, samples included.
    features, target
        The names chosen.
    """
    hint = "Name others with features and target (--features, --target)."
    check_names(arrays, hint=hint, features=features, target=target)
    for parameter, name, dimensions in (("features", features, 2), ("target", target, 1)):
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
