"""Runs of pipelines: in this thread, or in the background with progress and cancellation."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from distributed import Client
from distributed.protocol.pickle import dumps, loads

from dshuffle import report
from dshuffle.compare import Way, count_training_workers
from dshuffle.compare.comparison import comparison_of, result_of
from dshuffle.compare.mixing_of_ways import QualityOfWays
from dshuffle.errors import ClusterError
from dshuffle.kernels import compile_kernels
from dshuffle.noninferiority import PairedRuns, PairedTest
from dshuffle.notebook import html_summary
from dshuffle.pipeline.clusters import ClusterSource
from dshuffle.pipeline.outlook import Outlook
from dshuffle.pipeline.pairs import metric_of, numbers_in, pairs_of
from dshuffle.pipeline.training import Training
from dshuffle.records import EpochRecord
from dshuffle.redaction import hide_secrets
from dshuffle.report import Comparison, TrainingPoint, WayResult
from dshuffle.report.progress import Advance
from dshuffle.runtime import Partition, Shuffler, gathered, retrying
from dshuffle.runtime.client.cluster_view import cluster_info, run_on_workers
from dshuffle.runtime.measure.measurement import measure_workers
from dshuffle.runtime.session_spec import SessionOptions, WorkerFacts
from dshuffle.store import Dataset
from dshuffle.training import History

logger = logging.getLogger(__name__)

MEASURING_SECONDS = 3.0
"""Time in which a cluster is measured for the predictions of a report."""

ON_CLIENT = ("on_epoch", "validate", "early_stopping")
"""Options of a training that the workers do not need."""

WARM_UP_EPOCHS = 2
"""The first epoch is loaded, and the second one exchanged."""


class Runnable(Protocol):
    """What a run needs of a :class:`dshuffle.Pipeline`, which has started it."""

    @property
    def training(self) -> Training:
        """What to train."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways of shuffling."""

    @property
    def cluster(self) -> ClusterSource:
        """Where to run."""

    @property
    def options(self) -> SessionOptions:
        """The options of the sessions."""

    @property
    def test(self) -> PairedTest | None:
        """What to compare in pairs of runs, if anything."""

    @property
    def checkpoint(self) -> str | None:
        """Where the state is written, if anywhere."""

    @property
    def report(self) -> str | None:
        """Folder of the report, if one is wanted."""

    def checked(self) -> Dataset:
        """Check the pipeline, and return its open dataset."""


@dataclass(frozen=True, slots=True, repr=False)
class TrainedWay:
    """Result of the training with one way of shuffling.

    Parameters
    ----------
    label
        Name of the way.
    value
        What the function of the training returned.
    records
        Measurements of the epochs of the last session. There is one session unless training was interrupted.
    n_workers
        Number of workers that trained.
    pairs
        Pairs of runs with the way and with one that reshuffles everything, if the pipeline has a test.
    reported
        What a function of your own has said of its epochs with ``on_epoch``.
    """

    label: str
    value: Any
    records: tuple[EpochRecord, ...]
    n_workers: int
    pairs: PairedRuns | None = None
    reported: tuple[TrainingPoint, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.label} on {self.n_workers} workers: {self.value!r:.200}>"

    @property
    def history(self) -> History[Any] | None:
        """The history of a trainer; None if a function of your own returned something else."""
        return self.value if isinstance(self.value, History) else None

    @property
    def model(self) -> Any:
        """The model of a trainer, or what a function of your own returned."""
        return self.value if self.history is None else self.history.model

    @property
    def points(self) -> tuple[TrainingPoint, ...]:
        """Errors and metrics after each epoch, as far as the function reports them."""
        return self.reported if self.history is None else self.history.points

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics after the last epoch, such as those of held-out samples: returned, or else the last ones reported."""
        returned = numbers_in(self.value)
        return returned or dict(self.points[-1].validation if self.points else {})


@dataclass(frozen=True, slots=True, repr=False)
class PipelineResult:
    """Result of a pipeline.

    Parameters
    ----------
    ways
        The result of every way, in the order of the pipeline.
    report
        The file of the report, if one was wanted.
    comparison
        The times, traffic and errors in the report.
    """

    ways: tuple[TrainedWay, ...]
    report: Path | None
    comparison: Comparison | None = None

    def __repr__(self) -> str:
        lines = [f"  {way!r}" for way in self.ways]
        return "\n".join(["<PipelineResult", *lines, f"  report: {self.report}>"])

    def _repr_html_(self) -> str:
        rows = [(way.label, way.n_workers, repr(way.value)[:200]) for way in self.ways]
        return html_summary("Pipeline", {"report": self.report or "none"}, ("way", "workers", "result"), rows)

    @property
    def model(self) -> Any:
        """The model of the first way."""
        return self.ways[0].model

    @property
    def history(self) -> History[Any] | None:
        """The history of the first way."""
        return self.ways[0].history

    @property
    def records(self) -> tuple[EpochRecord, ...]:
        """The records of the first way."""
        return self.ways[0].records


def execute(pipeline: Runnable, advance: Advance, check: Callable[[], None]) -> PipelineResult:
    """Run :func:`train`, and write the report, if one is wanted."""

    def write(comparison: Comparison) -> Path:
        return report.write_report(comparison, str(pipeline.report))

    return train(pipeline, advance, check, write=write)


def n_preparations(pipeline: Runnable, outlook: Outlook | None = None) -> int:
    """Number of steps before the first way: compile, wait for the cluster; for a report, read, measure and load."""
    if pipeline.report is None:
        return 2
    return 5 if outlook is None else 4


def train(
    pipeline: Runnable,
    advance: Advance,
    check: Callable[[], None],
    outlook: Outlook | None = None,
    write: Callable[[Comparison], Path] | None = None,
) -> PipelineResult:
    """Check a pipeline, start its cluster, and train with each of its ways.

    Parameters
    ----------
    advance
        Called with the number of preparations and epochs that are done, the number of all, and what is going on.
    check
        Called between epochs. It raises an error to end the run.
    outlook
        What was said before the run. If None, it is looked for, if a report is wanted.
    write
        Writes the report, if one is wanted, before the cluster is closed; None to leave that to the caller.
    """
    whole = pipeline.checked()
    training, dataset = pipeline.training.on(whole, pipeline.ways[0].choices.seed)
    prepared = n_preparations(pipeline, outlook)
    total, done = prepared + len(pipeline.ways) * pipeline.training.epochs, 0

    def count(done: int, most: int, text: str) -> None:
        check()
        advance(done, most, text)

    def say(text: str) -> None:
        count(done, total, text)

    say("loading compiled code; the first run compiles it")
    compile_kernels()
    done += 1
    say(f"waiting for {pipeline.cluster}")

    def waiting(text: str) -> None:
        say(f"waiting for {pipeline.cluster}: {text}")

    with pipeline.cluster.open(waiting) as client:
        done += 1
        if pipeline.report is not None:
            _check_loads(client, pipeline)
        measured, results = None, []
        if pipeline.report is not None:
            choice = pipeline.options.choice
            if outlook is None:
                say("reading some rows of the dataset")
                outlook = Outlook.of(dataset, training, pipeline.ways, count_training_workers(client, choice))
                outlook.tell()
                done += 1
            say("measuring the cluster")
            measured = measure_workers(client, choice, dataset, seconds=MEASURING_SECONDS).cluster
            done += 1
            say("loading code on the workers")
            _warm_up(pipeline, training, client, pipeline.ways[-1].dataset(dataset))
            done += 1
        shufflers: list[Shuffler] = []
        reported: dict[str, dict[int, TrainingPoint]] = {way.label: {} for way in pipeline.ways}
        for place, way in enumerate(pipeline.ways):
            say(way.label)

            def on_epoch(point: TrainingPoint, way: Way = way, before: int = done) -> None:
                nonlocal done
                reported[way.label][point.epoch] = point  # after an interruption, an epoch may run again
                done = before + point.epoch + 1  # a run that continues does not begin with the first epoch
                say(way.label)

            value, shuffler = _train(pipeline, training, client, way.dataset(dataset), way, on_epoch)
            points = tuple(reported[way.label].values())
            results.append(TrainedWay(way.label, value, tuple(shuffler.records), shuffler.n_workers, reported=points))
            shufflers.append(shuffler)
            # Also if the function does not say when an epoch ends.
            done = prepared + (place + 1) * pipeline.training.epochs
            say(way.label)
            if pipeline.test is not None:
                metric_of(value, pipeline.test.metric)  # now, and not after all ways
        if pipeline.test is not None:
            timed = [(way, result.records) for way, result in zip(pipeline.ways, results, strict=True)]
            tested = pairs_of(client, whole, pipeline.test, pipeline.training, pipeline.options, timed, check, count)
            results = [dataclasses.replace(result, pairs=tested.get(result.label)) for result in results]
        comparison, page = None, None
        if pipeline.report is not None and outlook is not None and _has_trained(results):
            target = pipeline.training.arrays.get("target")
            quality = QualityOfWays(dataset, target)
            compared: list[WayResult] = []
            for way, result, shuffler in zip(pipeline.ways, results, shufflers, strict=True):
                of_way = quality if way.copy is None else QualityOfWays(way.copy, target, in_random_order=True)
                pairs = {} if result.pairs is None else {training.averages: result.pairs}
                compared.append(result_of(way, shuffler, result.points, measured=measured, quality=of_way, pairs=pairs))
            comparison = comparison_of(
                client,
                dataset,
                compared,
                quality=quality,
                settings=training.facts,
                command=_command(),
                error_meaning=pipeline.training.error_meaning,
                stored_at_random=outlook.stored_at_random,
                outlook=outlook.sentences,
                error_at_start=pipeline.training.error_at_start,
                averages=training.averages,
            )
            page = None if write is None else write(comparison)
    return PipelineResult(tuple(results), page, comparison)


def _has_trained(results: Sequence[TrainedWay]) -> bool:
    """Whether an epoch has run. Otherwise the report of an earlier run stays."""
    if any(result.records for result in results):
        return True
    logger.warning("dshuffle: all epochs were done before, as the checkpoint says. No report is written.")
    return False


def _train(
    pipeline: Runnable,
    training: Training,
    client: Client,
    dataset: Dataset,
    way: Way,
    on_epoch: Callable[[TrainingPoint], None],
) -> tuple[Any, Shuffler]:
    """Train with one way, and return what the training returned, and the closed shuffler."""
    options = {**way.choices.keywords(), **pipeline.options.keywords()}
    if pipeline.checkpoint is None:
        with Shuffler(client, dataset, **options) as shuffler:
            return training.run(shuffler, on_epoch), shuffler

    def train(shuffler: Shuffler) -> tuple[Any, Shuffler]:
        if 0 < shuffler.next_epoch < pipeline.training.epochs:
            text = "dshuffle: training goes on with epoch %d, after %d of %d, from the checkpoint %s"
            done, every = shuffler.next_epoch, pipeline.training.epochs
            logger.info(text, done, done, every, pipeline.checkpoint)
        if shuffler.next_epoch > 0 and shuffler.attached is None:
            logger.warning(
                "dshuffle: epochs before %d are done, and no model was attached in them. Attach it after each epoch "
                "(Shuffler.attach), or load it in the function that trains.",
                shuffler.next_epoch,
            )
        return training.run(shuffler, on_epoch), shuffler

    workers, patience = pipeline.cluster.awaited
    return retrying(
        train,
        lambda: client,
        dataset,
        checkpoint=pipeline.checkpoint,
        min_workers=1 if pipeline.options.choice.is_restricted else workers,  # the cluster has waited for all
        patience=patience,
        **options,
    )


def _check_loads(client: Client, pipeline: Runnable) -> None:
    """Refuse functions of the user that the workers cannot load, before anything is prepared.

    Raises
    ------
    ClusterError
        If they cannot, for instance because a module is missing there.
    """
    given = {"fit": pipeline.training.fit, **pipeline.training.options}
    functions = [value for name, value in given.items() if callable(value) and name not in ON_CLIENT]
    if pipeline.training.is_trainer:
        functions.remove(pipeline.training.fit)
    present = WorkerFacts.of_all(cluster_info(client)["workers"])
    chosen = [worker.address for worker in present if pipeline.options.choice.allows(worker)]
    reasons = run_on_workers(client, _load_error, dumps(functions), workers=chosen)
    if failed := {address: reason for address, reason in reasons.items() if reason}:
        address, reason = next(iter(failed.items()))
        others = f" and {len(failed) - 1} others" if len(failed) > 1 else ""
        raise ClusterError(
            f"the worker {address}{others} cannot load the functions of the training: {reason}. Install what is "
            "missing there, or put it into the file of the pipeline",
            transient=False,
        )


def _load_error(pickled: bytes) -> str:
    """Why this worker cannot load what was pickled; empty if it can."""
    try:
        loads(pickled)
    except Exception as error:  # whatever the user's module raises
        return f"{type(error).__name__}: {error}"
    return ""


def _warm_up(pipeline: Runnable, training: Training, client: Client, dataset: Dataset) -> None:
    """Run two epochs, so that the first way does not pay for loading code and opening connections.

    A trainer of dshuffle trains in them. A function of the user, which may do other things as well, is only sent to the
    workers.
    """
    with Shuffler(client, dataset, **pipeline.ways[-1].choices.keywords(), **pipeline.options.keywords()) as shuffler:
        if training.is_trainer:
            training.with_epochs(WARM_UP_EPOCHS).run(shuffler, lambda _: None)
            return
        for epoch in shuffler.epochs(WARM_UP_EPOCHS):
            gathered(epoch.map(_only_load, fit=training.fit))


def _only_load(partition: Partition, fit: Callable[..., Any]) -> None:
    """Do nothing with a partition and a function that a worker has loaded."""


def _command() -> str:
    program, *arguments = sys.argv
    path = Path(program)
    own = path.name == "dshuffle" or (path.parent.name, path.name) == ("dshuffle", "__main__.py")
    return hide_secrets(shlex.join(["dshuffle", *arguments] if own else ["python", program, *arguments]))
