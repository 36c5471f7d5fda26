"""What a fit went through, the same for every trainer, and when it should end early.

A progress bar for trainers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.report import TrainingPoint
from dshuffle.report.progress import progress_bar
from dshuffle.training.monitoring import EpochBreakdown, WorkerSpeeds
from dshuffle.training.parameter_server.staleness import Staleness

Model = TypeVar("Model")
OnEpoch = Callable[[TrainingPoint], None]
Validate = Callable[[Model], Mapping[str, float]]
"""From a model to its metrics by name; runs in the client's process after every epoch."""


@dataclass(frozen=True, slots=True)
class History(Generic[Model]):
    """What a fit went through.

    Parameters
    ----------
    points
        One point an epoch: epoch, seconds since the fit began, error after it, validation metrics.
    weights
        What was fitted. Of a linear regression ``(n_features,)`` weights; of other trainers what they say.
    stopped_early
        Whether early stopping ended it.
    worker_rates
        Samples a second that each rank trained on, the median over epochs. A rank much slower than the others is
        logged as a warning, as every epoch waits for it.
    breakdown
        Where the seconds of every epoch went, if the trainer takes steps together.
    staleness
        Of an asynchronous fit how stale its pushes were.
    """

    points: tuple[TrainingPoint, ...]
    weights: Model
    stopped_early: bool = False
    worker_rates: tuple[float, ...] = ()
    breakdown: tuple[EpochBreakdown, ...] = ()
    staleness: Staleness | None = None


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """End a fit once a metric has not improved for some epochs.

    Parameters
    ----------
    patience
        Epochs without improvement after which to stop.
    least_change
        What counts as improvement: more than so much.
    metric
        ``"error"``, or the name of a validation metric.
    highest
        Whether more of the metric is better, as of an accuracy.

    Raises
    ------
    InvalidParameter
        A parameter is out of range; when first asked, the metric is none of the points'.

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
        """Whether training that went through these points should end."""
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
            known = ", ".join(["error", *sorted(point.validation)])
            raise InvalidParameter.of(
                "metric", self.metric, f"one of {known}", "Give a validate= that returns it by this name."
            )
        return point.validation[self.metric]


@dataclass(slots=True)
class Recorder(Generic[Model]):
    """Keeps the points of a fit that goes on; a trainer adds one after every epoch.

    Parameters
    ----------
    validate
        Gives the validation metrics of a model.
    early_stopping
        When to end.
    on_epoch
        Called with every point as soon as it is known: the progress bar's hook.
    """

    validate: Validate[Model] | None = None
    early_stopping: EarlyStopping | None = None
    on_epoch: OnEpoch | None = None
    points: list[TrainingPoint] = field(default_factory=list)
    stopped_early: bool = False
    speeds: WorkerSpeeds = field(default_factory=WorkerSpeeds)
    _started: float = field(default_factory=time.perf_counter)

    def add(self, model: Model, error: float, weight_error: float | None = None) -> bool:
        """Note the model after an epoch; whether early stopping is due."""
        seconds = time.perf_counter() - self._started
        validation = {} if self.validate is None else {k: float(v) for k, v in self.validate(model).items()}
        point = TrainingPoint(
            epoch=len(self.points), seconds=seconds, error=error, weight_error=weight_error, validation=validation
        )
        self.points.append(point)
        if self.on_epoch is not None:
            self.on_epoch(point)
        self.stopped_early = self.early_stopping is not None and self.early_stopping.is_due(self.points)
        return self.stopped_early

    def history(
        self, model: Model, breakdown: tuple[EpochBreakdown, ...] = (), staleness: Staleness | None = None
    ) -> History[Model]:
        """The points so far, with what was fitted."""
        self.speeds.warn()
        return History(
            points=tuple(self.points),
            weights=model,
            stopped_early=self.stopped_early,
            worker_rates=self.speeds.rates(),
            breakdown=breakdown,
            staleness=staleness,
        )


@contextmanager
def epoch_bar(epochs: int) -> Iterator[OnEpoch]:
    """Show how far a fit is, on the standard error: a live bar on a terminal, elsewhere a line an epoch.

    Parameters
    ----------
    epochs
        As given to the fit.

    Yields
    ------
    Callable
        For the fit's ``on_epoch``.

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
        metrics = "".join(f", {name} {value:.3g}" for name, value in point.validation.items())
        advance(point.epoch + 1, epochs, f"error {point.error:.3g}{metrics} after {point.seconds:.1f} s")

    with progress_bar() as advance:
        yield show
