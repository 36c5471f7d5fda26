"""History, early stopping and progress bar, shared by all trainers."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import numpy as np
from distributed import Future

from dshuffle.checks import as_integer
from dshuffle.errors import CheckpointError, InvalidParameter
from dshuffle.notebook import html_summary
from dshuffle.records import EpochRecord
from dshuffle.redaction import short_repr
from dshuffle.report import TrainingPoint
from dshuffle.report.progress import progress_bar
from dshuffle.runtime import Epoch, Partition, Shuffler, gathered
from dshuffle.training.parameter_server.slices import Staleness
from dshuffle.units import ERROR_DIGITS, METRIC_DIGITS, human_numbers, human_seconds

logger = logging.getLogger(__name__)


class Schedule(Protocol):
    """Function from the epoch to a factor on the step."""

    def __call__(self, epoch: int) -> float:
        """Return the factor on the step in an epoch, counted from 0."""
        ...


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
        if not 0 < self.factor <= 1:
            raise InvalidParameter.of("factor", self.factor, "in (0, 1]")

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
        if not 0 < self.last <= 1:
            raise InvalidParameter.of("last", self.last, "in (0, 1]")
        as_integer("epochs", self.epochs, 2)

    def __call__(self, epoch: int) -> float:
        """Return the factor in an epoch."""
        return 1 - (1 - self.last) * min(1.0, epoch / (self.epochs - 1))


CONSTANT = Decay(1.0)
"""Keep the step of the first epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Seconds that one rank spent in each phase of an epoch's steps.

    Parameters
    ----------
    batches
        Seconds of gathering mini-batches from the partition.
    forward_backward
        Seconds of computing losses and gradients.
    gradient_exchange
        Seconds of averaging gradients, including the wait for slower ranks, and of updating the weights.
    """

    batches: float = 0.0
    forward_backward: float = 0.0
    gradient_exchange: float = 0.0

    @property
    def own(self) -> float:
        """Seconds that depend on this rank alone."""
        return self.batches + self.forward_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBreakdown:
    """Time spent in each phase of an epoch.

    Parameters
    ----------
    epoch
        Epoch, counted from 0 at the start of the fit.
    ranks
        Seconds of each rank, in rank order.
    record
        Record of the exchange before this epoch: its total time, and the part that training could not hide
        (``waited_seconds``). None for the last epoch of a fit that stopped early, whose record the shuffler writes when
        it continues or is closed.
    """

    epoch: int
    ranks: tuple[PhaseSeconds, ...]
    record: EpochRecord | None = None

    @property
    def io(self) -> float:
        """I/O in Nguyen et al. (2022): gathering mini-batches (the mean over ranks) and waiting for the store."""
        return _mean([rank.batches for rank in self.ranks]) + self._waited(from_storage=True)

    @property
    def exchange(self) -> float:
        """EXCHANGE in Nguyen et al. (2022): waiting for samples of other workers that training does not hide."""
        return self._waited(from_storage=False)

    @property
    def forward_backward(self) -> float:
        """FW+BW in Nguyen et al. (2022), the mean over ranks."""
        return _mean([rank.forward_backward for rank in self.ranks])

    @property
    def gradient_exchange(self) -> float:
        """GE+WU in Nguyen et al. (2022), the mean over ranks."""
        return _mean([rank.gradient_exchange for rank in self.ranks])

    def _waited(self, *, from_storage: bool) -> float:
        record = self.record
        if record is None or record.reads_store != from_storage:
            return 0.0
        return record.waited_seconds


def with_records(breakdown: Mapping[int, EpochBreakdown], records: Sequence[EpochRecord]) -> tuple[EpochBreakdown, ...]:
    """Return each epoch's breakdown with its record, if there is one. Keys are the shuffler's epoch numbers."""
    by_epoch = {record.epoch: record for record in records}
    return tuple(replace(seconds, record=by_epoch.get(number)) for number, seconds in breakdown.items())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


SLOW = 2.0
"""A worker is slow if its rate is less than the median rate divided by this factor."""


NOTICEABLE = 0.5
"""Seconds of an epoch's longest task below which differences between workers are noise."""


def timed(partition: Partition, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int, float]:
    """Return ``fn(partition, *args, **kwargs)``, which trains on all samples, their number, and the seconds.

    Runs as a task on each worker.
    """
    partition.mark_trained(0)
    started = time.perf_counter()
    value = fn(partition, *args, **kwargs)
    partition.mark_trained()
    return value, len(partition), max(time.perf_counter() - started, 1e-9)


@dataclass(slots=True)
class WorkerSpeeds:
    """Training rates of all workers, epoch by epoch.

    Parameters
    ----------
    epochs
        Samples per second of each rank in every epoch.
    emulated
        Whether the speeds were requested. Slow workers are then not logged.
    longest
        Seconds of the longest task of every epoch.
    """

    epochs: list[tuple[float, ...]] = field(default_factory=list)
    emulated: bool = False
    longest: list[float] = field(default_factory=list)

    def collect(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Return the values of :func:`timed` tasks, and record their rates as one epoch."""
        values, counts, seconds = zip(*gathered(futures), strict=True)
        self.add([count / spent for count, spent in zip(counts, seconds, strict=True)], seconds=max(seconds))
        return list(values)

    def add(self, rates: Sequence[float], seconds: float) -> None:
        """Record the samples per second of each rank in one epoch, and the seconds of its longest task."""
        self.epochs.append(tuple(rates))
        self.longest.append(seconds)

    def rates(self) -> tuple[float, ...]:
        """Return the samples per second of each rank: the median, as the first epoch compiles and imports.

        If the number of ranks has changed, epochs with the last number count.
        """
        alike = [rates for rates in self.epochs if len(rates) == len(self.epochs[-1])]
        return tuple(np.median(alike, axis=0).tolist()) if alike else ()

    def slow(self) -> dict[int, float]:
        """Return the ranks that are much slower than the median worker, and by which factor."""
        rates = self.rates()
        middle = float(np.median(rates)) if rates else 0.0
        return {rank: middle / rate for rank, rate in enumerate(rates) if rate * SLOW < middle}

    def warn(self) -> None:
        """Log a warning for each slow worker, as every epoch waits for it, unless the epochs are too short to tell."""
        usual = self.longest[1:] or self.longest  # the first epoch compiles and imports
        if self.emulated or not usual or np.median(usual) < NOTICEABLE:
            return
        for rank, times in self.slow().items():
            logger.warning("dshuffle: worker %d trained %.1f times slower than the median worker", rank, times)


Model = TypeVar("Model")
First = TypeVar("First")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
OnEpoch = Callable[[TrainingPoint], None]
Validate = Callable[[Model], Mapping[str, Any]]
"""Function from a model to its metrics by name: numbers, or arrays or tensors of one number. It runs in the client's
process after every epoch."""


def raises_once(fit: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a trainer, so that moving on or closing does not raise the errors of its tasks again.

    Their errors end the fit, and the user of a trainer has no :class:`~dshuffle.Epoch` to accept them.
    """

    @functools.wraps(fit)
    def fit_once(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        shuffler = kwargs.get("shuffler", args[0] if args else None)
        before = shuffler.epoch if isinstance(shuffler, Shuffler) else None
        try:
            return fit(*args, **kwargs)
        except Exception:
            if isinstance(shuffler, Shuffler) and shuffler.epoch != before:  # else the tasks are not those of the fit
                shuffler.accept()
            raise

    return fit_once


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
    worker_rates
        Samples per second that each rank trained on, the median over epochs. A rank that is much slower than the others
        is logged as a warning, as every epoch waits for it.
    breakdown
        Time spent in each phase of every epoch, for trainers that take steps together.
    staleness
        Staleness of the pushes of an asynchronous fit.
    batch_size
        Batch size of all workers of an asynchronous fit together, which may have been rounded.
    """

    points: tuple[TrainingPoint, ...]
    model: Model
    stopped_early: bool = False
    worker_rates: tuple[float, ...] = ()
    breakdown: tuple[EpochBreakdown, ...] = ()
    staleness: Staleness | None = None
    batch_size: int | None = None

    def __repr__(self) -> str:
        early = ", stopped early" if self.stopped_early else ""
        if not self.points:
            return f"<History of 0 epochs{early}>"
        first, last = self.points[0], self.points[-1]
        has_errors = not math.isnan(first.error) and not math.isnan(last.error)
        errors = f": error {' to '.join(human_numbers([first.error, last.error], ERROR_DIGITS))}" if has_errors else ""
        return f"<History of {len(self.points)} epochs{early}{errors} in {human_seconds(last.seconds)}>"

    def _repr_html_(self) -> str:
        metrics = sorted({name for point in self.points for name in point.validation})
        columns = [
            [str(point.epoch) for point in self.points],
            [human_seconds(point.seconds) for point in self.points],
            human_numbers([None if math.isnan(point.error) else point.error for point in self.points], ERROR_DIGITS),
            *(human_numbers([point.validation.get(name) for point in self.points], METRIC_DIGITS) for name in metrics),
        ]
        rows = list(zip(*columns, strict=True))
        facts = {"epochs": len(self.points), "stopped early": "yes" if self.stopped_early else "no"}
        return html_summary("History", facts, ("epoch", "seconds", "error", *metrics), rows)


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
        if not 0 <= self.least_change < float("inf"):
            raise InvalidParameter.of("least_change", self.least_change, "a finite number >= 0")

    def is_due(self, points: Sequence[TrainingPoint]) -> bool:
        """Return whether training should end after these points."""
        best, best_epoch = float("inf"), 0
        for number, point in enumerate(points):
            value = -self._value(point) if self.highest else self._value(point)
            if value < best - self.least_change:
                best, best_epoch = value, number
        return len(points) - 1 - best_epoch >= self.patience

    def _value(self, point: TrainingPoint) -> float:
        if self.metric == "error":
            return point.error
        if self.metric not in point.validation:
            metrics = ", ".join(["error", *sorted(point.validation)])
            raise InvalidParameter.of(
                "metric", self.metric, f"one of {metrics}", "Pass a validate function that returns this metric."
            )
        return point.validation[self.metric]


@dataclass(frozen=True, slots=True)
class SavedFit(Generic[Model]):
    """A fit after one of its epochs, attached to the state of its session.

    Parameters
    ----------
    trainer
        Name of the function that fits.
    settings
        What it was trained with, by name of the parameter.
    """

    trainer: str
    points: tuple[TrainingPoint, ...]
    model: Model
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Recorder(Generic[Model]):
    """Collect the points of a running fit. A trainer adds one after every epoch.

    If the fit runs on a :class:`~dshuffle.Shuffler`, every point and its model are attached to the session's state. A
    session that continues it then continues the fit.

    Parameters
    ----------
    validate
        Function from a model to its validation metrics.
    early_stopping
        Rule that ends the fit.
    on_epoch
        Function that is called with each point as soon as it is known, such as the progress bar.
    """

    validate: Validate[Model] | None = None
    early_stopping: EarlyStopping | None = None
    on_epoch: OnEpoch | None = None
    points: list[TrainingPoint] = field(default_factory=list)
    stopped_early: bool = False
    speeds: WorkerSpeeds = field(default_factory=WorkerSpeeds)
    _started: float = field(default_factory=time.perf_counter)
    _session: Shuffler | None = None
    _trainer: str = ""
    _settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_function("validate", self.validate, "the model")
        _check_function("on_epoch", self.on_epoch, "a TrainingPoint with epoch, seconds, error and validation")

    def begin(self, shuffler: object, trainer: str, first: First, **settings: Any) -> Model | First:
        """Return the model to begin with: ``first``, or that of a fit which this session continues.

        Warnings say which of the ``settings`` differ from those of that fit.
        """
        if not isinstance(shuffler, Shuffler):  # a stand-in without states, such as StoredOrder
            return first
        self._session, self._trainer, self._settings = shuffler, trainer, settings
        saved = shuffler.attached if shuffler.epoch is None else None  # otherwise it belongs to an earlier fit
        if not isinstance(saved, SavedFit):
            return first
        if saved.trainer != trainer:
            raise CheckpointError(
                f"the state has a model of {saved.trainer}, and {trainer} cannot continue with it. Use that trainer, "
                "or remove the checkpoint to begin again"
            )
        for name, before in getattr(saved, "settings", {}).items():  # earlier releases saved none
            if before == settings.get(name, before):
                continue
            if name == "optimizer":
                raise CheckpointError(
                    f"the state has an optimizer of the kind {before}, and make_optimizer makes one of the kind "
                    f"{settings[name]}. Use that kind, or begin again without the checkpoint"
                )
            logger.warning(
                "dshuffle: %s continues with %s=%s; before, it was %s", trainer, name, settings[name], before
            )
        self.points = list(saved.points)
        self._started -= saved.points[-1].seconds
        self.stopped_early = self.early_stopping is not None and self.early_stopping.is_due(self.points)
        model: Model = saved.model
        return model

    def epochs(self, shuffler: Shuffler, count: int) -> Iterator[tuple[int, Epoch]]:
        """Iterate over the epochs of a fit of ``count`` epochs that are left, with their numbers in the fit."""
        left = 0 if self.stopped_early else max(0, count - len(self.points))
        return enumerate(shuffler.epochs(left), start=len(self.points))

    def add(self, model: Model, error: float, weight_error: float | None = None, *, saved: Any = None) -> bool:
        """Record the model after an epoch, and return whether early stopping is due.

        ``saved`` is attached to the session in place of the model, if it is given.
        """
        seconds = time.perf_counter() - self._started
        validation = {} if self.validate is None else numbers_of(self.validate(model))
        point = TrainingPoint(
            epoch=len(self.points), seconds=seconds, error=error, weight_error=weight_error, validation=validation
        )
        self.points.append(point)
        if self._session is not None:
            kept = model if saved is None else saved
            self._session.attach(SavedFit(self._trainer, tuple(self.points), kept, self._settings), self._session.epoch)
        if self.on_epoch is not None:
            self.on_epoch(point)
        self.stopped_early = self.early_stopping is not None and self.early_stopping.is_due(self.points)
        return self.stopped_early

    def history(
        self,
        model: Model,
        breakdown: tuple[EpochBreakdown, ...] = (),
        staleness: Staleness | None = None,
        batch_size: int | None = None,
    ) -> History[Model]:
        """Return the points so far and the fitted model."""
        self.speeds.warn()
        return History(
            points=tuple(self.points),
            model=model,
            stopped_early=self.stopped_early,
            worker_rates=self.speeds.rates(),
            breakdown=breakdown,
            staleness=staleness,
            batch_size=batch_size,
        )


def _check_function(name: str, function: object, argument: str) -> None:
    if function is None:
        return
    allowed = f"None, or a function of one argument: {argument}"
    if not callable(function):
        raise InvalidParameter.of(name, function, allowed)
    try:
        signature = inspect.signature(function)
    except ValueError:  # functions in C may not have one
        return
    try:
        signature.bind(None)
    except TypeError:
        raise InvalidParameter.of(name, function, allowed, f"Its parameters are {signature}.") from None


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what a validate function has returned as plain numbers."""

    def number(value: Any) -> float:
        detach = getattr(value, "detach", None)  # PyTorch warns of a tensor that becomes a number with its graph
        return float(value if detach is None else detach())

    try:
        return {name: number(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidParameter.because(
            "validate",
            f"it returned {short_repr(metrics)}",
            "It must return a mapping from the name of each metric to one number.",
        ) from error


@contextmanager
def epoch_bar(epochs: int) -> Iterator[OnEpoch]:
    """Show the progress of a fit on standard error: a live bar on a terminal, otherwise one line per epoch.

    Parameters
    ----------
    epochs
        Number of epochs of the fit.

    Yields
    ------
    Callable
        Function to pass to the fit as ``on_epoch``.

    Raises
    ------
    InvalidParameter
        ``epochs`` is not an integer of at least 1.

    Examples
    --------
    >>> from dshuffle.report import TrainingPoint
    >>> with epoch_bar(2) as bar:  # fit_linear_regression(shuffler, epochs=2, step=0.1, on_epoch=bar)
    ...     for epoch in range(2):
    ...         bar(TrainingPoint(epoch=epoch, seconds=1.5, error=0.5))
    """
    as_integer("epochs", epochs, 1)

    def show(point: TrainingPoint) -> None:
        numbers = {**({} if math.isnan(point.error) else {"error": point.error}), **point.validation}
        words = ", ".join(f"{name} {human_numbers([value], 3)[0]}" for name, value in numbers.items())
        advance(point.epoch + 1, epochs, f"{words} after {point.seconds:.1f} s".lstrip())

    with progress_bar() as advance:
        yield show
