"""History, early stopping and progress bar, shared by all trainers."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

from dshuffle.checks import as_integer
from dshuffle.errors import CheckpointError, InvalidParameter
from dshuffle.notebook import html_summary
from dshuffle.redaction import short_repr
from dshuffle.report import TrainingPoint
from dshuffle.report.progress import progress_bar
from dshuffle.runtime import Epoch, Shuffler
from dshuffle.training.monitoring import EpochBreakdown, WorkerSpeeds
from dshuffle.training.parameter_server.staleness import Staleness
from dshuffle.units import ERROR_DIGITS, METRIC_DIGITS, human_numbers, human_seconds

logger = logging.getLogger(__name__)

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
    points
        Its points so far.
    model
        What it continues with.
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

    Raises
    ------
    InvalidParameter
        If ``validate`` or ``on_epoch`` is not a function of one argument.
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

        Raises
        ------
        CheckpointError
            If another trainer or another kind of ``optimizer`` made it.
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

        Raises
        ------
        InvalidParameter
            If ``validate`` does not return a number for each metric.
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
    """Return what a validate function has returned as plain numbers.

    Raises
    ------
    InvalidParameter
        If it is not a mapping from names to one number each.

    Examples
    --------
    >>> import numpy as np
    >>> numbers_of({"accuracy": np.float32(0.5)})
    {'accuracy': 0.5}
    >>> numbers_of({"losses": np.ones(2)})
    Traceback (most recent call last):
    dshuffle.errors.InvalidParameter: validate is not allowed: it returned {'losses': array([1., 1.])}. It must return \
a mapping from the name of each metric to one number.
    """

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
