"""Parallel SGD for linear regression, which averages models once an epoch, or gradients in every step."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import BEGINNING, prefetch, row_kernel
from dshuffle.planning.batching import UNEVEN, Batching
from dshuffle.runtime import Group, Partition, Shuffler, gathered
from dshuffle.store import Dataset
from dshuffle.training.fit import (
    CONSTANT,
    Decay,
    EarlyStopping,
    History,
    OnEpoch,
    Recorder,
    Schedule,
    Validate,
    raises_once,
    timed,
)
from dshuffle.training.inputs import check_names, check_step, diverged

Weights = NDArray[np.float64]

AVERAGES = ("models", "gradients")

AHEAD = 8
"""Number of samples between prefetching a row and using it."""
REMEDY = (
    "take a smaller step (below 2 / the largest squared norm of a row), or look for NaN and infinite values in the data"
)


@raises_once
def fit_linear_regression(
    shuffler: Shuffler,
    *,
    epochs: int,
    step: float,
    step_decay: float = 1.0,
    average: Literal["models", "gradients"] = "models",
    batch_size: int = 1,
    measure_error: bool = True,
    features: str = "x",
    target: str = "y",
    truth: NDArray[np.floating[Any]] | None = None,
    schedule: Schedule = CONSTANT,
    validate: Validate[Weights] | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
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
    step_decay
        Factor on the step after every epoch, in (0, 1]; short for ``schedule=Decay(step_decay)``.
    average
        ``"models"``: one local pass on every worker per epoch, then the models are averaged. ``"gradients"``: in every
        step, the gradients of one mini-batch per worker are averaged, as PyTorch's DistributedDataParallel does.
    batch_size
        With ``"gradients"``, the largest number of samples of one worker in a step. Models are averaged after steps of
        one sample each.
    measure_error
        Whether to compute the error on the whole dataset after every epoch, in a second pass. Otherwise it is NaN.
    features, target
        Names of arrays in the dataset: ``(q, m)``, float32 or float64, and ``(q,)``, also integers.
    truth
        True weights ``(m,)``, if they are known.
    schedule
        Factor on the step by epoch, such as :class:`~dshuffle.training.Linear`. Use it instead of ``step_decay``.
    validate
        Function that is called with the weights after every epoch. The metrics that it returns become the point's
        ``validation``.
    early_stopping
        Rule that ends the fit before ``epochs``.
    on_epoch
        Function that is called with the :class:`~dshuffle.report.TrainingPoint` of each epoch as soon as it is known.

    Returns
    -------
    History
        A point's ``error`` is ``||X w - y|| / ||y||`` over the whole dataset, and its ``weight_error`` is
        ``||w - truth|| / ||truth||``.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, the arrays do not suit a linear regression, ``truth`` does not have the shape of
        the weights, or the weights diverge.

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
    as_integer("epochs", epochs, 1)
    as_integer("batch_size", batch_size, 1)
    check_step(step)
    if average not in AVERAGES:
        raise InvalidParameter.of("average", average, f"one of {', '.join(AVERAGES)}")
    if average == "models" and batch_size != 1:
        raise InvalidParameter.of("batch_size", batch_size, '1 with average="models"')
    if not 0 < step_decay <= 1:
        raise InvalidParameter.of("step_decay", step_decay, "in (0, 1]")
    if schedule != CONSTANT and step_decay != 1:
        raise InvalidParameter.of("step_decay", step_decay, "1.0 when a schedule is given", "Pass one of them.")
    factor = Decay(step_decay) if schedule == CONSTANT else schedule
    if isinstance(shuffler, Shuffler):  # not a stand-in without a dataset
        check_dataset(shuffler.dataset, features, target)
    recorder = Recorder(validate, early_stopping, on_epoch)
    weights: Weights | None = recorder.begin(shuffler, "fit_linear_regression", None, step=step)
    for number, epoch in recorder.epochs(shuffler, epochs):
        size = step * factor(number)
        if average == "gradients":
            weights = _in_step(epoch, weights, batch_size, size, features=features, target=target)
        else:
            passes = epoch.map(timed, local_pass, weights, size, features=features, target=target)
            local, counts = zip(*recorder.speeds.collect(passes), strict=True)
            if not all(np.isfinite(weights_of_rank).all() for weights_of_rank in local):
                raise diverged(size, number, what="weights", remedy=REMEDY)
            # The mean can overflow near the largest float. The residual is then not finite.
            with np.errstate(over="ignore", invalid="ignore"):
                # Dividing by the largest count gives weights of exactly 1 for equal shares: bit for bit the plain mean.
                weights = np.average(local, axis=0, weights=np.divide(counts, max(counts)))
        if not np.isfinite(weights).all():
            raise diverged(size, number, what="weights", remedy=REMEDY)
        if truth is not None and np.shape(truth) != weights.shape:
            raise InvalidParameter.because(
                "truth", f"its shape is {np.shape(truth)}", f"Pass an array of shape {weights.shape}."
            )
        error = math.nan
        if measure_error:
            sums = np.sum(gathered(epoch.map(residual, weights, features=features, target=target)), axis=0)
            if not np.isfinite(sums).all():
                raise diverged(size, number, what="weights", remedy=REMEDY)
            if sums[1] == 0:
                raise InvalidParameter.of("target", target, "an array with at least one non-zero value")
            error = math.sqrt(sums[0] / sums[1])
        distance = None if truth is None else _distance(weights, truth)
        if recorder.add(weights, error, distance):
            break
    assert weights is not None
    return recorder.history(weights)


def local_pass(
    partition: Partition, weights: Weights | None, step: float, *, features: str = "x", target: str = "y"
) -> tuple[Weights, int]:
    """Run one SGD pass over a partition, starting from the common weights (None for zeros). Runs on each worker."""
    if len(partition) == 0:
        raise InvalidParameter.because("partition", f"rank {partition.rank} has no samples", "Use fewer workers.")
    own, *samples = _regression(partition, weights, features, target)
    sgd_pass(own, *samples, step)
    return own, len(partition)


def _in_step(epoch: Any, *args: Any, **kwargs: Any) -> Weights:
    """Take the steps of an epoch on all workers together; see :func:`gradient_steps`."""
    if hasattr(epoch, "in_step"):  # all ranks are in this process
        [weights, *_] = epoch.in_step(gradient_steps, *args, **kwargs)
    else:
        [weights, *_] = epoch.together(_averaged_by_group, *args, **kwargs)
    return np.asarray(weights)


def _averaged_by_group(partition: Partition, group: Group, *args: Any, **kwargs: Any) -> Weights | None:
    """Run the steps of one rank as a task, and return its weights on rank 0: all ranks have the same."""
    partition.mark_trained(0)
    steps = gradient_steps(partition, *args, **kwargs)
    gradient, count = next(steps)
    while True:
        try:
            gradient, count = steps.send(group.mean(gradient, count))
        except StopIteration as end:
            partition.mark_trained()
            return end.value if group.rank == 0 else None


def gradient_steps(
    partition: Partition,
    weights: Weights | None,
    batch_size: int,
    step: float,
    *,
    features: str = "x",
    target: str = "y",
) -> Generator[tuple[Weights, int], Weights, Weights]:
    """Take the steps of one rank: yield the mean gradient of each mini-batch and its size, and get that of all ranks.

    The gradient is that of half of the squared residual, so a mini-batch of one row is a step of :func:`sgd_pass`.
    """
    own, rows, first, targets, place, slots = _regression(partition, weights, features, target)
    batching = Batching(len(partition), *partition.shares, batch_size, UNEVEN, partition.unequal)
    for number in range(len(batching)):
        chosen, gradient = slots[batching.positions(number)], np.zeros(own.size)
        add_gradient(own, rows, first, targets, place, chosen, gradient)
        # A step that overflows gives weights that are not finite, which the client checks.
        with np.errstate(over="ignore", invalid="ignore"):
            own -= step * (yield gradient, len(chosen))
    return own


def residual(partition: Partition, weights: Weights, *, features: str = "x", target: str = "y") -> tuple[float, float]:
    """Return ``(||X w - y||^2, ||y||^2)`` over a partition. Runs as a task on each worker."""
    wrong, total = squared_residual(*_regression(partition, weights, features, target))
    return wrong, total


@row_kernel(
    "(f8[::1], Array(f4, 2, 'C', True), i8, Array(f4, 2, 'C', True), i8, Array(i8, 1, 'C', True), f8)",
    "(f8[::1], Array(f4, 2, 'C', True), i8, Array(f8, 2, 'C', True), i8, Array(i8, 1, 'C', True), f8)",
    "(f8[::1], Array(f8, 2, 'C', True), i8, Array(f8, 2, 'C', True), i8, Array(i8, 1, 'C', True), f8)",
)
def sgd_pass(weights, rows, first, targets, place, slots, step):  # type: ignore[no-untyped-def]
    """Apply equation 4, ``w -= step * a (a . w - y)``, to every sample in turn, in place.

    Parameters
    ----------
    weights
        ``(m,)`` float64, changed in place.
    rows, first
        ``(s, k)`` float32 or float64. ``rows[slot, first : first + m]`` are the features of a sample.
    slots
        ``(n,)`` int64, the slots of the samples in training order.
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


@row_kernel(
    "(f8[::1], Array(f4, 2, 'C', True), i8, Array(f4, 2, 'C', True), i8, Array(i8, 1, 'C', True), f8[::1])",
    "(f8[::1], Array(f4, 2, 'C', True), i8, Array(f8, 2, 'C', True), i8, Array(i8, 1, 'C', True), f8[::1])",
    "(f8[::1], Array(f8, 2, 'C', True), i8, Array(f8, 2, 'C', True), i8, Array(i8, 1, 'C', True), f8[::1])",
)
def add_gradient(weights, rows, first, targets, place, slots, gradient):  # type: ignore[no-untyped-def]
    """Add the mean gradient of half of the squared residual; parameters as in :func:`sgd_pass`."""
    for i in range(slots.size):
        if i + AHEAD < slots.size:
            _prefetch(rows, slots[i + AHEAD], first, weights.size)
            _prefetch(targets, slots[i + AHEAD], place, 1)
        row = _row(rows, slots[i], first, weights.size)
        wrong = (_dot(weights, row) - targets[slots[i], place]) / slots.size
        for j in range(weights.size):
            gradient[j] += wrong * row[j]


@row_kernel(
    "(f8[::1], Array(f4, 2, 'C', True), i8, Array(f4, 2, 'C', True), i8, Array(i8, 1, 'C', True))",
    "(f8[::1], Array(f4, 2, 'C', True), i8, Array(f8, 2, 'C', True), i8, Array(i8, 1, 'C', True))",
    "(f8[::1], Array(f8, 2, 'C', True), i8, Array(f8, 2, 'C', True), i8, Array(i8, 1, 'C', True))",
)
def squared_residual(weights, rows, first, targets, place, slots):  # type: ignore[no-untyped-def]
    """Return ``sum (a . w - y)^2`` and ``sum y^2`` over samples; parameters as in :func:`sgd_pass`."""
    wrong = total = 0.0
    for i in range(slots.size):
        if i + AHEAD < slots.size:
            _prefetch(rows, slots[i + AHEAD], first, weights.size)
            _prefetch(targets, slots[i + AHEAD], place, 1)
        truth = float(targets[slots[i], place])
        wrong += (_dot(weights, _row(rows, slots[i], first, weights.size)) - truth) ** 2
        total += truth**2
    return wrong, total


@row_kernel(inline="always")
def _row(rows, slot, first, count):  # type: ignore[no-untyped-def]
    """Return a view of a sample's values.

    Kernels index the view from zero. An index such as ``first + j`` could be negative, which costs a test per item.
    """
    return rows[slot, first : first + count]


@row_kernel(inline="always")
def _dot(weights, row):  # type: ignore[no-untyped-def]
    """Return ``row . weights``, from four partial sums in an order that is the same on every machine."""
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
def _prefetch(rows, slot, first, count):  # type: ignore[no-untyped-def]
    """Prefetch a sample's values, at most the first ``BEGINNING`` bytes."""
    line = np.uint64(rows.ctypes.data) + np.uint64(slot * rows.strides[0] + first * rows.itemsize)
    end = line + np.uint64(min(count * rows.itemsize, BEGINNING))
    while line < end:
        prefetch(line)
        line += np.uint64(64)


def _regression(
    partition: Partition, weights: Weights | None, features: str, target: str
) -> tuple[Weights, NDArray[Any], int, NDArray[Any], int, NDArray[np.int64]]:
    """Check the arrays, and return a copy of the weights and the location of the samples for the kernels.

    The kernels do not check their arguments.
    """
    arrays = {name: partition.dtype(name) for name in partition.names}
    check_regression({name: (dtype, 1 + len(shape)) for name, (dtype, shape) in arrays.items()}, features, target)
    [width] = partition.dtype(features)[1]
    own = np.zeros(width) if weights is None else weights.copy()
    if own.shape != (width,):
        raise InvalidParameter.of("weights.shape", own.shape, f"({width},), the width of {features}")
    rows, first, slots = partition.rows(features)
    targets, place, _ = partition.rows(target)
    if targets.dtype.kind != "f":  # kernels are compiled for floats only
        targets, place = targets[:, place : place + 1].astype(np.float64), 0
        targets.flags.writeable = False
    return own, rows, first, targets, place, slots


def check_dataset(dataset: Dataset, features: str, target: str) -> None:
    """Raise :class:`InvalidParameter` unless a linear regression can use these arrays of the dataset."""
    arrays = {name: (info.dtype, 1 + len(info.shape)) for name, info in dataset.arrays.items()}
    check_regression(arrays, features, target)


def check_regression(arrays: Mapping[str, tuple[np.dtype[Any], int]], features: str, target: str) -> None:
    """Raise :class:`InvalidParameter` unless a linear regression can use these two arrays."""
    hint = "Choose other arrays with features and target (--features and --target on the command line)."
    check_names(arrays, hint=hint, features=features, target=target)
    for parameter, name, dimensions in (("features", features, 2), ("target", target, 1)):
        dtype, n_dimensions = arrays[name]
        allowed = "float32 or float64" if parameter == "features" else "float32, float64 or integers"
        whole = parameter == "target" and dtype.kind in "biu"
        if (dtype not in (np.float32, np.float64) and not whole) or n_dimensions != dimensions:
            raise InvalidParameter.of(
                parameter,
                name,
                f"a {dimensions}-D array of {allowed} (it is {n_dimensions}-D, {dtype})",
                f"Choose another array with {parameter} (--{parameter} on the command line), or store this one in "
                "that form (see docs/from-your-files.md).",
            )


def _distance(weights: Weights, truth: NDArray[np.floating[Any]]) -> float:
    return float(np.linalg.norm(weights - truth) / np.linalg.norm(truth))
