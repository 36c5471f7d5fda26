"""Parallel SGD for linear regression, which averages models once an epoch, or gradients in every step."""

from __future__ import annotations

import math
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import BEGINNING, prefetch, row_kernel
from dshuffle.runtime import Epoch, Partition, Shuffler, gathered
from dshuffle.store import Dataset
from dshuffle.training.fit import (
    FLOATS,
    NUMBERS,
    FitOptions,
    History,
    Steps,
    Trained,
    batching_of,
    check_array,
    check_converging,
    check_step,
    in_passes,
    in_steps,
    run_epochs,
    trainer,
)

Weights = NDArray[np.float64]

AHEAD = 8
"""Number of samples between prefetching a row and using it."""


@trainer(None)
def fit_linear_regression(
    shuffler: Shuffler,
    *,
    epochs: int,
    step: float,
    average: str = "models",
    batch_size: int = 1,
    measure_error: bool = True,
    features: str = "x",
    target: str = "y",
    **options: Unpack[FitOptions],
) -> History[Weights]:
    """Fit ``y = x @ weights`` by parallel SGD.

    Parameters
    ----------
    shuffler
        Shuffler with any sharding, assignment and delivery.
    epochs
        Number of passes over the whole dataset.
    step
        Step of the first epoch. Below ``2 / max ||x_j||^2``, no single update can overshoot.
    average
        ``"models"``: one local pass on every worker per epoch, then the models are averaged. ``"gradients"``: in every
        step, the gradients of one mini-batch per worker are averaged, as PyTorch's DistributedDataParallel does.
    batch_size
        With ``"gradients"``, the largest number of samples of one worker in a step. Models are averaged after steps of
        one sample each.
    measure_error
        Whether to compute the error on the whole dataset after every epoch, in a second pass. Otherwise it is NaN.
    features, target
        Names of arrays in the dataset: ``(q, m)``, float32 or float64, and ``(q,)`` numbers.
    **options
        Options of all trainers: see :class:`~dshuffle.training.FitOptions`.

    Returns
    -------
    History
        ``model`` are the weights. A point's ``error`` is ``||X w - y|| / ||y||`` over the whole dataset.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, the arrays do not suit a linear regression, or the weights diverge.

    Notes
    -----
    The workers visit rows in the order of the partition, which the shuffler draws again every epoch.

    References
    ----------
    Chung et al. (2017), section 5.1, equation 4; see docs/papers.md. We differ in three ways. The weights start at zero
    instead of at random, so that runs can be compared. The workers measure the residual, which does not need the true
    weights. The average weights each worker by its number of samples, which for equal shares is the paper's plain mean.

    M. Zinkevich, M. Weimer, L. Li and A. Smola, "Parallelized stochastic gradient descent", NIPS 2010, averages once at
    the end.
    """
    as_integer("batch_size", batch_size, 1)
    check_step(step)
    if average not in ("models", "gradients"):
        raise InvalidParameter.of("average", average, "models or gradients")
    if average == "models" and batch_size != 1:
        raise InvalidParameter.of("batch_size", batch_size, '1 with average="models"')
    check_dataset(shuffler.dataset, features, target)

    def train(epoch: Epoch, number: int, weights: Any, factor: float) -> Trained:
        size, error = step * factor, math.nan
        if average == "gradients":
            weights = in_steps(epoch, gradient_steps, weights, batch_size, size, features, target)
        else:
            local, counts = in_passes(epoch, local_pass, weights, size, features, target)
            # The mean can overflow near the largest float.
            with np.errstate(over="ignore", invalid="ignore"):
                # Dividing by the largest count gives weights of exactly 1 for equal shares: bit for bit the plain mean.
                weights = np.average(local, axis=0, weights=np.divide(counts, max(counts)))
        check_converging(f"step={size:g}", number, weights)
        if measure_error:
            wrong, total = np.sum(gathered(epoch.map(residual, weights, features, target)), axis=0)
            check_converging(f"step={size:g}", number, wrong)
            if total == 0:
                raise InvalidParameter.of("target", target, "an array with at least one non-zero value")
            error = math.sqrt(wrong / total)
        return Trained(weights, error)

    return run_epochs(shuffler, "fit_linear_regression", None, train, epochs, **options)


def local_pass(
    partition: Partition, weights: Weights | None, step: float, features: str = "x", target: str = "y"
) -> Weights:
    """Run one SGD pass over a partition, starting from the common weights (None for zeros)."""
    own: Weights
    own, *samples = _regression(partition, weights, features, target)
    visit(own, *samples, own, -step, 1)
    return own


def gradient_steps(
    partition: Partition, weights: Weights | None, batch_size: int, step: float, features: str, target: str
) -> Steps:
    """Take the steps of one rank, with mini-batches of the gradient of half of the squared residual."""
    own, *samples, slots = _regression(partition, weights, features, target)
    batching = batching_of(partition, batch_size, 1)
    for number in range(len(batching)):
        chosen, gradient = slots[batching.positions(number)], np.zeros(own.size)
        visit(own, *samples, chosen, gradient, 1.0, len(chosen))
        mean = yield gradient, len(chosen)
        # A step that overflows gives weights that are not finite, which the client checks.
        with np.errstate(over="ignore", invalid="ignore"):
            own -= step * mean
    return own


def residual(partition: Partition, weights: Weights, features: str, target: str) -> Any:
    """Return ``(||X w - y||^2, ||y||^2)`` over a partition."""
    return squared_residual(*_regression(partition, weights, features, target))


@row_kernel(
    "(f8[::1], Array(f4, 2, 'C', True), i8, Array(f4, 2, 'C', True), i8, Array(i8, 1, 'C', True), f8[::1], f8, i8)",
    "(f8[::1], Array(f4, 2, 'C', True), i8, Array(f8, 2, 'C', True), i8, Array(i8, 1, 'C', True), f8[::1], f8, i8)",
    "(f8[::1], Array(f8, 2, 'C', True), i8, Array(f8, 2, 'C', True), i8, Array(i8, 1, 'C', True), f8[::1], f8, i8)",
)
def visit(weights, rows, first, targets, place, slots, out, scale, divisor):  # type: ignore[no-untyped-def]
    """Add ``scale * a (a . w - y) / divisor`` of each sample in turn to ``out``: a gradient, or the weights themselves.

    Parameters
    ----------
    weights, out
        ``(m,)`` float64. With ``out`` the weights and ``scale`` a negative step, this is equation 4.
    rows, first
        ``(s, k)`` float32 or float64. ``rows[slot, first : first + m]`` are the features of a sample.
    slots
        ``(n,)`` int64, the slots of the samples in training order.
    """
    for i in range(slots.size):
        _ahead(rows, first, targets, place, slots, i, weights.size)
        row = rows[slots[i], first : first + weights.size]
        pull = scale * ((_dot(weights, row) - targets[slots[i], place]) / divisor)
        for j in range(out.size):
            out[j] += pull * row[j]


@row_kernel(
    "(f8[::1], Array(f4, 2, 'C', True), i8, Array(f4, 2, 'C', True), i8, Array(i8, 1, 'C', True))",
    "(f8[::1], Array(f4, 2, 'C', True), i8, Array(f8, 2, 'C', True), i8, Array(i8, 1, 'C', True))",
    "(f8[::1], Array(f8, 2, 'C', True), i8, Array(f8, 2, 'C', True), i8, Array(i8, 1, 'C', True))",
)
def squared_residual(weights, rows, first, targets, place, slots):  # type: ignore[no-untyped-def]
    """Return ``sum (a . w - y)^2`` and ``sum y^2`` over samples; parameters as in :func:`visit`."""
    wrong = total = 0.0
    for i in range(slots.size):
        _ahead(rows, first, targets, place, slots, i, weights.size)
        truth = float(targets[slots[i], place])
        wrong += (_dot(weights, rows[slots[i], first : first + weights.size]) - truth) ** 2
        total += truth**2
    return wrong, total


@row_kernel(inline="always")
def _dot(weights, row):  # type: ignore[no-untyped-def]
    """Return ``row . weights``, from four partial sums in an order that is the same on every machine.

    The row is a view that is indexed from zero: an index such as ``first + j`` could be negative, which costs a test
    per item.
    """
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


@row_kernel(inline="always")
def _ahead(rows, first, targets, place, slots, i, count):  # type: ignore[no-untyped-def]
    """Prefetch the values of a later sample."""
    if i + AHEAD < slots.size:
        _prefetch(rows, slots[i + AHEAD], first, count)
        _prefetch(targets, slots[i + AHEAD], place, 1)


@row_kernel(inline="always")
def _prefetch(rows, slot, first, count):  # type: ignore[no-untyped-def]
    """Prefetch a sample's values, at most the first ``BEGINNING`` bytes."""
    line = np.uint64(rows.ctypes.data) + np.uint64(slot * rows.strides[0] + first * rows.itemsize)
    end = line + np.uint64(min(count * rows.itemsize, BEGINNING))
    while line < end:
        prefetch(line)
        line += np.uint64(64)


def _regression(partition: Partition, weights: Weights | None, features: str, target: str) -> tuple[Any, ...]:
    """Return a copy of the weights, and the location of the samples for the kernels, which do not check it."""
    [width] = partition.dtype(features)[1]
    own = np.zeros(width) if weights is None else weights.copy()
    if own.shape != (width,):  # the saved ones of a fit on another array
        raise InvalidParameter.of("weights.shape", own.shape, f"({width},), the width of {features}")
    rows, first, slots = partition.rows(features)
    targets, place, _ = partition.rows(target)
    if targets.dtype not in (np.float32, np.float64):  # kernels are compiled for these only
        targets, place = targets[:, place : place + 1].astype(np.float64), 0
        targets.flags.writeable = False
    return own, rows, first, targets, place, slots


def check_dataset(dataset: Dataset, features: str, target: str) -> None:
    """Check that a linear regression can use these two arrays."""
    check_array("features", features, dataset.arrays, 2, FLOATS)
    check_array("target", target, dataset.arrays, 1, NUMBERS)
