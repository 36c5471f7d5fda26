"""The loop of all trainers: history, schedules, early stopping, validation, checkpoints, and what combines ranks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import CheckpointError, InvalidParameter
from dshuffle.notebook import html_summary
from dshuffle.records import slow_rank_in_words
from dshuffle.redaction import short_repr
from dshuffle.report import TrainingPoint
from dshuffle.report.progress import progress_bar
from dshuffle.runtime import Epoch, Group, Partition, Shuffler, gathered
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

Model = TypeVar("Model")
OnEpoch = Callable[[TrainingPoint], None]
Validate = Callable[[Model], Mapping[str, Any]]
"""Function from a model to its metrics by name: numbers, or arrays or tensors of one number. It runs in the client's
process after every epoch."""
Work = Sequence[Sequence[float]]
"""For each rank, its samples and its seconds; or its samples and the three columns of ``History.breakdown``."""
Steps = Generator[tuple[NDArray[Any], float], NDArray[Any], tuple[Model, float, float]]
"""The steps of one rank: yields arrays with their weights, gets their means over all ranks, and returns the model and
the seconds of gathering mini-batches and of computing."""


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
        Samples per second that each rank trained on, the median over epochs. A warning says for which rank the others
        wait, if it is much slower.
    breakdown
        For trainers that take steps together, ``(ranks, 3)`` seconds in every epoch: of gathering mini-batches, of
        computing gradients, and of averaging them, including the wait for slower ranks and the update of the weights.
    staleness
        For an asynchronous fit, ``(ranks, most + 1)`` number of pushes of each rank by their staleness: the number of
        updates by other workers between a pull and its push. If parameters are split over several servers, it is the
        largest staleness at any of them.
    batch_size
        Batch size of all workers of an asynchronous fit together, which may have been rounded.
    """

    points: tuple[TrainingPoint, ...]
    model: Model
    stopped_early: bool = False
    worker_rates: tuple[float, ...] = ()
    breakdown: tuple[NDArray[np.float64], ...] = ()
    staleness: NDArray[np.int64] | None = None
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
            values = {**point.validation, "error": point.error}
            if self.metric not in values:
                hint = "Pass a validate function that returns this metric."
                raise InvalidParameter.of("metric", self.metric, f"one of {', '.join(sorted(values))}", hint)
            value = -values[self.metric] if self.highest else values[self.metric]
            if value < best - self.least_change:
                best, best_epoch = value, number
        return len(points) - 1 - best_epoch >= self.patience


@dataclass(frozen=True, slots=True)
class SavedFit:
    """A fit after one of its epochs, attached to the state of its session."""

    trainer: str
    points: tuple[TrainingPoint, ...]
    model: Any
    settings: Mapping[str, Any] = field(default_factory=dict)


class Watch(NamedTuple):
    """Options that all trainers have."""

    schedule: Schedule
    validate: Callable[[Any], Mapping[str, Any]] | None
    early_stopping: EarlyStopping | None
    on_epoch: OnEpoch | None


class Trained(NamedTuple):
    """What an epoch gives: the model, its error, what each rank did, and what a checkpoint keeps if not the model."""

    model: Any
    error: float
    work: Work
    saved: Any = None


def run_epochs(
    shuffler: Shuffler,
    trainer: str,
    model: Any,
    train: Callable[[Any, int, Any, float], Trained],
    epochs: int,
    watch: Watch,
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    restored: Callable[[Any], Any] = lambda saved: saved,
    kept: bool = True,
) -> History[Any]:
    """Train with ``train(epoch, number, model, factor)`` in every epoch, from a model or from that of a saved fit.

    Parameters
    ----------
    settings
        Warnings say which of them differ from those of the saved fit.
    restored
        Makes the model of what a checkpoint keeps.
    kept
        Whether checkpoints keep the fit.
    """
    as_integer("epochs", epochs, 1)
    for name, function in (("validate", watch.validate), ("on_epoch", watch.on_epoch)):
        if function is not None and not callable(function):
            raise InvalidParameter.of(name, function, "None, or a function of one argument")
    session = shuffler if isinstance(shuffler, Shuffler) else None  # a stand-in, such as StoredOrder, has no states
    before = None if session is None else session.epoch
    points: list[TrainingPoint] = []
    saved = session.attached if kept and session is not None and before is None else None
    if isinstance(saved, SavedFit):
        _check_saved(saved, trainer, settings)
        points, model = list(saved.points), restored(saved.model)

    def is_due() -> bool:
        return watch.early_stopping is not None and watch.early_stopping.is_due(points)

    started = time.perf_counter() - (points[-1].seconds if points else 0.0)
    stopped, works = bool(points) and is_due(), []
    try:
        for epoch in shuffler.epochs(0 if stopped else max(0, epochs - len(points))):
            number = len(points)
            trained = train(epoch, number, model, watch.schedule(number))
            seconds, model = time.perf_counter() - started, trained.model
            if trained.work:
                works.append(np.array(trained.work, np.float64))
            metrics = {} if watch.validate is None else numbers_of(watch.validate(model))
            points.append(TrainingPoint(epoch=number, seconds=seconds, error=trained.error, validation=metrics))
            if kept and session is not None:
                state = model if trained.saved is None else trained.saved
                session.attach(SavedFit(trainer, tuple(points), state, dict(settings)), session.epoch)
            if watch.on_epoch is not None:
                watch.on_epoch(points[-1])
            if stopped := is_due():
                break
    except Exception:
        # It ends the fit, and moving on or closing must not raise it again: the user of a trainer has no epoch to
        # accept it. Before the first epoch, the tasks are not those of the fit.
        if session is not None and session.epoch != before:
            session.accept()
        raise
    alike = [work for work in works if len(work) == len(works[-1])]  # workers may have joined or left
    own = [work[:, 1:3].sum(axis=1) for work in alike]
    if words := slow_rank_in_words([seconds.tolist() for seconds in own]):
        logger.warning("dshuffle: %s", words)
    rates = [work[:, 0] / np.maximum(seconds, 1e-9) for work, seconds in zip(alike, own, strict=True)]
    return History(
        tuple(points),
        model,
        stopped,
        tuple(np.median(rates, axis=0).tolist()) if rates else (),
        tuple(work[:, 1:] for work in works if work.shape[1:] == (4,)),
    )


def _check_saved(saved: SavedFit, trainer: str, settings: Mapping[str, Any]) -> None:
    """Check that this trainer can continue a fit."""
    if saved.trainer != trainer:
        raise CheckpointError(
            f"the state has a model of {saved.trainer}, and {trainer} cannot continue with it. Use that trainer, "
            "or remove the checkpoint to begin again"
        )
    for name, before in saved.settings.items():
        if (now := settings.get(name, before)) != before:
            if name == "optimizer":
                raise CheckpointError(
                    f"the state has an optimizer of the kind {before}, and make_optimizer makes one of the kind {now}. "
                    "Use that kind, or begin again without the checkpoint"
                )
            logger.warning("dshuffle: %s continues with %s=%s; before, it was %s", trainer, name, now, before)


def timed(partition: Partition, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int, float]:
    """Return ``fn(partition, *args, **kwargs)``, which trains on all samples, their number, and the seconds.

    Runs as a task on each worker.
    """
    if len(partition) == 0:
        raise InvalidParameter.because("partition", f"rank {partition.rank} has no samples", "Use fewer workers.")
    partition.mark_trained(0)
    started = time.perf_counter()
    value = fn(partition, *args, **kwargs)
    partition.mark_trained()
    return value, len(partition), time.perf_counter() - started


def in_passes(epoch: Epoch, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Any], Work]:
    """Train each rank alone, by a function of its partition; return the results, to combine, and the work."""
    done = gathered(epoch.map(timed, fn, *args, **kwargs))
    return [value for value, _, _ in done], [work for _, *work in done]


def in_steps(epoch: Any, steps: Callable[..., Steps[Model]], *args: Any, **kwargs: Any) -> tuple[Model, Work]:
    """Train all ranks together, by ``steps(partition, *args, **kwargs)``."""
    if hasattr(epoch, "in_step"):  # all ranks are in this process
        [(model, *_), *_] = epoch.in_step(steps, *args, **kwargs)
        return model, ()
    done = epoch.together(averaged, steps, *args, **kwargs)
    return done[0][0], [work for _, *work in done]


def averaged(
    partition: Partition, group: Group, steps: Callable[..., Steps[Model]], *args: Any, **kwargs: Any
) -> tuple[Model | None, int, float, float, float]:
    """Take the steps of one rank; return the model on rank 0, as all ranks have the same. Runs on each worker."""
    partition.mark_trained(0)
    started, rank = time.perf_counter(), steps(partition, *args, **kwargs)
    array, weight = next(rank)
    while True:
        try:
            array, weight = rank.send(group.mean(array, weight))
        except StopIteration as end:
            partition.mark_trained()
            model, gathering, computing = end.value
            exchanging = time.perf_counter() - started - gathering - computing
            return model if group.rank == 0 else None, len(partition), gathering, computing, exchanging


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what a validate function has returned as plain numbers."""
    try:  # PyTorch warns of a tensor that becomes a number with its graph
        return {name: float(getattr(value, "detach", lambda value=value: value)()) for name, value in metrics.items()}
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
