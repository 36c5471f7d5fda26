"""The loop of all trainers: options, history, early stopping, checkpoints, what combines ranks, checks and metrics."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import CheckpointError, InvalidParameter, TrainingDiverged
from dshuffle.planning.batching import UNEVEN, Batching
from dshuffle.records import slow_rank_of
from dshuffle.redaction import short_repr
from dshuffle.report import TrainingPoint
from dshuffle.runtime import Epoch, Group, Partition, Shuffler, gathered
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)

Schedule = Callable[[int], float]
"""Function from the epoch, counted from 0, to a factor on the step."""


@dataclass(frozen=True, slots=True)
class Decay:
    """Multiply the step by a factor after every epoch. A factor of 1 keeps it constant.

    Parameters
    ----------
    factor
        Factor in (0, 1].

    Raises
    ------
    InvalidParameter
        The factor is outside (0, 1].

    References
    ----------
    Chung et al. (2017), section 5.1, where steps decay by 0.9 an epoch; see docs/papers.md.

    Examples
    --------
    >>> [Decay(0.5)(epoch) for epoch in range(3)]
    [1.0, 0.5, 0.25]
    """

    factor: float = 0.9

    def __post_init__(self) -> None:
        _check_fraction("factor", self.factor)

    def __call__(self, epoch: int) -> float:
        """Return ``factor ** epoch``."""
        return float(self.factor**epoch)


@dataclass(frozen=True, slots=True)
class Linear:
    """Decrease the step linearly over the first epochs, then keep it constant.

    Parameters
    ----------
    last
        Fraction of the first step that remains at the end, in (0, 1].
    epochs
        Number of epochs until the step reaches ``last``, including the first one.

    Raises
    ------
    InvalidParameter
        A parameter is out of range.

    Examples
    --------
    >>> [Linear(0.5, epochs=3)(epoch) for epoch in range(5)]
    [1.0, 0.75, 0.5, 0.5, 0.5]
    """

    last: float
    epochs: int

    def __post_init__(self) -> None:
        _check_fraction("last", self.last)
        as_integer("epochs", self.epochs, 2)

    def __call__(self, epoch: int) -> float:
        """Return the factor in an epoch."""
        return 1 - (1 - self.last) * min(1.0, epoch / (self.epochs - 1))


def _check_fraction(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise InvalidParameter.of(name, value, "in (0, 1]")


CONSTANT = Decay(1.0)
"""Keep the step of the first epoch."""

Model = TypeVar("Model")
OnEpoch = Callable[[TrainingPoint], None]
Validate = Callable[[Any], Mapping[str, Any]]
"""Function from a model to its metrics by name: numbers, or arrays or tensors of one number."""
Steps = Generator[tuple[NDArray[Any], float], Any, Any]
"""The steps of one rank: yields arrays with their weights, gets their means over all ranks, and returns the model."""


@dataclass(frozen=True, slots=True, repr=False)
class History(Generic[Model]):
    """Result of a fit: its points, the fitted model and measurements.

    Parameters
    ----------
    points
        One point per epoch: epoch, seconds since the start of the fit, error after the epoch, validation metrics.
    model
        Fitted model: ``(n_features,)`` weights of a linear regression; for other trainers see their documentation. A
        model that was passed to the fit is not modified.
    stopped_early
        Whether early stopping ended the fit.
    staleness
        For an asynchronous fit, ``(ranks, most + 1)`` number of pushes of each rank by their staleness: the number of
        updates by other workers between a pull and its push.
    batch_size
        Batch size of all workers of an asynchronous fit together, which may have been rounded.
    """

    points: tuple[TrainingPoint, ...]
    model: Model
    stopped_early: bool = False
    staleness: NDArray[np.int64] | None = None
    batch_size: int | None = None

    def __repr__(self) -> str:
        last = f": error {self.points[-1].error:.4g} after {self.points[-1].seconds:.3g} s" if self.points else ""
        return f"<History of {len(self.points)} epochs{', stopped early' * self.stopped_early}{last}>"


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """End a fit once a metric has not improved for some epochs.

    Parameters
    ----------
    patience
        Number of epochs without improvement after which to stop.
    least_change
        Threshold of an improvement. Only a larger change of the metric counts.
    metric
        ``"error"``, or the name of a validation metric.
    highest
        Whether higher values of the metric are better, as for an accuracy.

    Raises
    ------
    InvalidParameter
        A parameter is out of range; on first use, no point has this metric.

    Examples
    --------
    >>> stopping = EarlyStopping(patience=2)
    >>> points = [TrainingPoint(epoch=e, seconds=e, error=error) for e, error in enumerate([3.0, 1.0, 2.0, 1.0])]
    >>> [stopping.is_due(points[:count]) for count in (1, 2, 3, 4)]
    [False, False, False, True]
    """

    patience: int = 3
    least_change: float = 0.0
    metric: str = "error"
    highest: bool = False

    def __post_init__(self) -> None:
        as_integer("patience", self.patience, 1)
        if not 0 <= self.least_change < math.inf:
            raise InvalidParameter.of("least_change", self.least_change, "a finite number >= 0")

    def is_due(self, points: Sequence[TrainingPoint]) -> bool:
        """Return whether training should end after these points."""
        best, best_epoch = math.inf, 0
        for number, point in enumerate(points):
            values = {**point.validation, "error": point.error}
            if self.metric not in values:
                hint = "Pass a validate function that returns this metric."
                raise InvalidParameter.of("metric", self.metric, f"one of {', '.join(sorted(values))}", hint)
            value = -values[self.metric] if self.highest else values[self.metric]
            if value < best - self.least_change:
                best, best_epoch = value, number
        return len(points) - 1 - best_epoch >= self.patience


class FitOptions(TypedDict, total=False):
    """Options of all trainers.

    Parameters
    ----------
    schedule
        Factor on the step by epoch, such as :class:`Decay`. By default the step is constant.
    validate
        Function that is called with the model after every epoch, in the client's process. The metrics that it returns,
        by name, become the point's ``validation``.
    early_stopping
        Rule that ends the fit before ``epochs``, such as :class:`EarlyStopping`.
    on_epoch
        Function that is called with the :class:`~dshuffle.report.TrainingPoint` of each epoch as soon as it is known.
    """

    schedule: Schedule
    validate: Validate | None
    early_stopping: EarlyStopping | None
    on_epoch: OnEpoch | None


Trainer = TypeVar("Trainer", bound=Callable[..., History[Any]])


def trainer(averages: str | None) -> Callable[[Trainer], Trainer]:
    """Show the options of all trainers in a trainer's signature, in place of its ``**options``.

    ``averages`` is what the trainer averages: ``"models"``, ``"gradients"``, or None if an option or nothing says it.
    """

    def decorated(fit: Trainer) -> Trainer:
        signature, shared = inspect.signature(fit), inspect.signature(run_epochs).parameters
        *own, _ = signature.parameters.values()
        signature = signature.replace(parameters=[*own, *(shared[name] for name in FitOptions.__annotations__)])
        vars(fit).update(__signature__=signature, averages=averages)
        return fit

    return decorated


@dataclass(frozen=True, slots=True)
class SavedFit:
    """A fit after one of its epochs, attached to the state of its session."""

    trainer: str
    points: tuple[TrainingPoint, ...]
    model: Any


class Trained(NamedTuple):
    """What an epoch gives: the model, its error, and what a checkpoint keeps if not the model."""

    model: Any
    error: float
    saved: Any = None


def run_epochs(
    shuffler: Any,
    trainer: str,
    model: Any,
    train: Callable[[Any, int, Any, float], Trained],
    epochs: int,
    *,
    restored: Callable[[Any], Any] = lambda saved: saved,
    kept: bool = True,
    schedule: Schedule = CONSTANT,
    validate: Validate | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
) -> History[Any]:
    """Train with ``train(epoch, number, model, factor)`` in every epoch, from a model or from that of a saved fit.

    Parameters
    ----------
    shuffler
        A shuffler, or a stand-in with epochs but no states.
    restored
        Makes the model of what a checkpoint keeps.
    kept
        Whether checkpoints keep the fit.
    """
    as_integer("epochs", epochs, 1)
    for name, function in (("validate", validate), ("on_epoch", on_epoch)):
        if function is not None and not callable(function):
            raise InvalidParameter.of(name, function, "None, or a function of one argument")
    session = shuffler if isinstance(shuffler, Shuffler) else None
    before, n_before = (session.epoch, len(session.records)) if session else (None, 0)
    points: list[TrainingPoint] = []
    saved = session.attached if kept and session and before is None else None
    if isinstance(saved, SavedFit):
        if saved.trainer != trainer:
            raise CheckpointError(
                f"the state has a model of {saved.trainer}, and {trainer} cannot continue with it. Use that trainer, "
                "or remove the checkpoint to begin again"
            )
        points, model = list(saved.points), restored(saved.model)

    def is_due() -> bool:
        return early_stopping is not None and early_stopping.is_due(points)

    started = time.perf_counter() - (points[-1].seconds if points else 0.0)
    stopped = bool(points) and is_due()
    try:
        for epoch in shuffler.epochs(0 if stopped else max(0, epochs - len(points))):
            number = len(points)
            model, error, state = train(epoch, number, model, schedule(number))
            seconds = time.perf_counter() - started
            metrics = numbers_of(validate(model)) if validate else {}
            points.append(TrainingPoint(epoch=number, seconds=seconds, error=error, validation=metrics))
            if kept and session:
                saved = SavedFit(trainer, tuple(points), model if state is None else state)
                session.attach(saved, session.epoch)
            if on_epoch:
                on_epoch(points[-1])
            if stopped := is_due():
                break
    except Exception:
        # It ends the fit, and moving on or closing must not raise it again: the user of a trainer has no epoch to
        # accept it. Before the first epoch, the tasks are not those of the fit.
        if session and session.epoch != before:
            session.accept()
        raise
    if session and (words := slow_rank_of(session.records[n_before:])):
        logger.warning("dshuffle: %s", words)
    return History(tuple(points), model, stopped)


def timed(partition: Partition, fn: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Return ``fn(partition, *args)``, which trains on all samples, and their number."""
    if len(partition) == 0:
        raise InvalidParameter.because("partition", f"rank {partition.rank} has no samples", "Use fewer workers.")
    partition.mark_trained(0)
    value = fn(partition, *args)
    partition.mark_trained()
    return value, len(partition)


def in_passes(epoch: Epoch, fn: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """Train each rank alone, by a function of its partition; return the results and the numbers of samples."""
    return tuple(zip(*gathered(epoch.map(timed, fn, *args)), strict=True))


def in_steps(epoch: Any, steps: Callable[..., Steps], *args: Any) -> Any:
    """Train all ranks together, by ``steps(partition, *args)``; return the model."""
    if hasattr(epoch, "in_step"):  # all ranks are in this process
        return epoch.in_step(steps, *args)
    return epoch.together(averaged, steps, *args)[0]


def averaged(partition: Partition, group: Group, steps: Callable[..., Steps], *args: Any) -> Any:
    """Take the steps of one rank; return the model on rank 0, as all ranks have the same."""
    partition.mark_trained(0)
    rank, mean = steps(partition, *args), None
    while True:
        try:
            mean = group.mean(*rank.send(mean))
        except StopIteration as end:
            partition.mark_trained()
            return end.value if group.rank == 0 else None


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what a validate function has returned as plain numbers."""
    try:  # PyTorch warns of a tensor that becomes a number with its graph
        return {name: float(value.detach() if hasattr(value, "detach") else value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        hint = "It must return a mapping from the name of each metric to one number."
        raise InvalidParameter.because("validate", f"it returned {short_repr(metrics)}", hint) from error


NUMBERS, WHOLE, INTEGERS, FLOATS = "biuf", "biu", "iu", "f"
KINDS = {NUMBERS: "numbers", WHOLE: "integers or booleans", INTEGERS: "integers", FLOATS: "float32 or float64"}
"""Kinds of dtypes, in words."""

EVALUATION_ROWS = 1024
"""Rows per batch of an evaluation, so that a network's activations fit in memory. Results do not depend on it."""


def check_step(step: float) -> float:
    """Return the step if it is valid."""
    if not 0 < step < math.inf:
        raise InvalidParameter.of("step", step, "a finite number > 0")
    return step


def check_fixed_workers(shuffler: Any, trainer: str) -> None:
    """Refuse a shuffler whose workers may change."""
    if shuffler.elastic:
        reason = f"{trainer} needs the same number of workers in all epochs"
        raise InvalidParameter.because("shuffler", reason, "Leave out elastic=True.")


def check_converging(name: str, epoch: int, *parameters: ArrayLike) -> None:
    """Check that the parameters of a model are finite after an epoch."""
    if not all(np.isfinite(values).all() for values in parameters):
        hint = "Take a smaller step, scale the features, or look for NaN and infinite values in the data."
        raise TrainingDiverged.because(name, f"the model diverged in epoch {epoch}", hint)


def check_name(parameter: str, name: str, arrays: Iterable[str]) -> None:
    """Check that an array exists."""
    if name not in (names := sorted(arrays)):
        hint = f"Choose another one with {parameter}."
        raise InvalidParameter.of(parameter, name, f"one of the dataset's arrays: {', '.join(names)}", hint)


def check_array(parameter: str, name: str, arrays: Mapping[str, Any], axes: int, kinds: str) -> None:
    """Check that an array is there, its number of axes (of -2: two or more) and the kind of its dtype.

    ``arrays`` have the dtype and the shape of a sample, such as those of a dataset.
    """
    check_name(parameter, name, arrays)
    dtype, n_axes = arrays[name].dtype, 1 + len(arrays[name].shape)
    fits = n_axes == axes or (axes < 0 and n_axes >= -axes)
    if not fits or dtype.kind not in kinds or (kinds == FLOATS and dtype.itemsize < 4):
        more = " or more" if axes < 0 else ""
        hint = "Write them as rows: x.reshape(len(x), -1) for an array x, or a Dask array." if n_axes > 2 else ""
        allowed = f"a {abs(axes)}-D{more} array of {KINDS[kinds]} (it is {n_axes}-D, {dtype})"
        raise InvalidParameter.of(parameter, name, allowed, hint)


def batching_of(partition: Partition, batch_size: int, least: int) -> Batching:
    """Return the mini-batches of a rank: the same number on every rank, each sample in exactly one of them."""
    smallest, largest = partition.shares
    batching = Batching(len(partition), smallest, largest, batch_size, UNEVEN, partition.unequal, least)
    if min(batch_size, smallest // len(batching)) < least:
        raise InvalidParameter.of(
            "batch_size",
            batch_size,
            f"large enough to give every mini-batch at least {least} samples for batch norm",
            f"Workers have {smallest} to {largest} samples. Use larger batches, fewer workers, or no batch norm.",
        )
    return batching


def check_batch(
    batch: Mapping[str, NDArray[Any]],
    sample_ids: NDArray[np.integer],
    features: str,
    target: str,
    n_classes: int | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the features and the targets of samples, if they are finite and labels are in [0, n_classes)."""
    check_finite("features", features, batch[features], sample_ids)
    check_finite("target", target, labels := batch[target], sample_ids)
    if n_classes is not None and (wrong := (labels < 0) | (labels >= n_classes)).any():
        bad = int(wrong.argmax())
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


Function = Callable[..., Any]


def measured(epoch: Epoch, measure: Function, model: Any, features: str, target: str) -> tuple[float, float]:
    """Return the sums over the samples of all workers of ``measure(model, features, targets)``, two numbers."""
    return tuple(np.sum(gathered(epoch.map(_measured, measure, model, features, target)), axis=0).tolist())


def _measured(partition: Partition, measure: Function, model: Any, features: str, target: str) -> NDArray[np.float64]:
    sums = np.zeros(2)
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in partition.batches(EVALUATION_ROWS):
            sums += measure(model, batch[features], batch[target])
    return sums


MOST_SAMPLES = 10_000
"""Number of held-out samples to read. The error of a metric falls with its root, and they stay in memory."""


def accuracy_on(test: Dataset, predict: Function, *, features: str = "x", target: str = "y") -> Validate:
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


def rmse_on(test: Dataset, predict: Function, *, features: str = "x", target: str = "y") -> Validate:
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
