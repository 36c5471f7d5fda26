"""A pipeline as one value: what to train on, how to shuffle it, how to train, and where. And how it is run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from distributed import Client
from numpy.typing import NDArray

from dshuffle import report
from dshuffle.compare import Way, count_training_workers
from dshuffle.compare.clusters import ClusterSource, LocalWorkers
from dshuffle.compare.comparison import check_copy, comparison_of, result_of
from dshuffle.compare.pairs import check_pairs, reference_of, run_in_pairs
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.kernels import load_kernels
from dshuffle.noninferiority import PairedRuns, PairedTest
from dshuffle.pipeline.training import Training
from dshuffle.planning import Choices, parse_assignment
from dshuffle.records import EpochRecord
from dshuffle.redaction import hide_secrets, short_repr
from dshuffle.report import Comparison, TrainingPoint
from dshuffle.report.progress import Advance, progress_bar
from dshuffle.report.summary import make_folder
from dshuffle.runtime import Partition, Shuffler, gathered, run_with_retries
from dshuffle.runtime.dataset_inputs import resolved
from dshuffle.runtime.measure.measurement import measure_workers
from dshuffle.runtime.session_spec import OPTION_NAMES, SessionOptions
from dshuffle.runtime.worker.worker_plugin import KERNELS
from dshuffle.store import Dataset, Place, as_dataset
from dshuffle.training import History
from dshuffle.training.fit import check_name

logger = logging.getLogger(__name__)

PairsByWay = Mapping[str, Mapping[str, PairedRuns]]
"""Pairs of runs by what the training averages, and by the label of the way."""

MEASURING_SECONDS = 1.5
"""Time in which a cluster is measured for the predictions of a report."""

WARM_UP_EPOCHS = 2
"""The first epoch is loaded, and the second one exchanged."""

SESSION = sorted(OPTION_NAMES - {"min_workers"})
"""Options of a session that a user may choose. How many workers to wait for is an option of the cluster."""


@dataclass(frozen=True, slots=True, repr=False)
class TrainedWay:
    """Result of the training with one strategy.

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
        Pairs of runs with the strategy and with one that reshuffles everything, if the pipeline has a test.
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
        numbers: dict[str, float] = {}
        last = self.points[-1].validation if self.points else {}
        for name, number in (self.value if isinstance(self.value, Mapping) else last).items():
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                numbers[str(name)] = float(number)
        return numbers or dict(last)


@dataclass(frozen=True, slots=True, repr=False)
class PipelineResult:
    """Result of a pipeline.

    Parameters
    ----------
    ways
        The result of every strategy, in the order of the pipeline.
    report
        The file of the report, if one was wanted.
    comparison
        The times, traffic and errors in the report.
    """

    ways: tuple[TrainedWay, ...]
    report: Path | None
    comparison: Comparison | None = None

    def __repr__(self) -> str:
        return "\n  ".join(["<PipelineResult", *map(repr, self.ways), f"report: {self.report}>"])

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


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Training on a dataset that is shuffled between workers, as one value.

    Nothing starts before :meth:`run` or :meth:`submit`. Both check the whole pipeline first.

    Parameters
    ----------
    dataset
        A :class:`dshuffle.Dataset`, or the URL or the Zarr store of one that this process and the workers can open.
    training
        The function that trains, with its options.
    shuffle
        The strategy: a :class:`dshuffle.Choices`, or the name of an assignment. Several strategies are trained with
        one after the other, and compared in the report.
    cluster
        Where to run: :class:`LocalWorkers` (the default), :class:`RunningScheduler`, :class:`BatchJobs`, or an object
        of your own with the members of a :class:`ClusterSource`.
    session
        Further parameters of :class:`dshuffle.Shuffler`, as a mapping: ``on_loss``, ``memory_limit``,
        ``cache_directory``, ... They are checked here, and kept as one value.
    checkpoint
        File or object of the state, as for :class:`dshuffle.Shuffler`. With it, training goes on if the session is
        lost, and another run of the pipeline continues where this one ended. Only with a single way.
    report
        Folder for a report of times, traffic and errors of every strategy, like that of ``dshuffle compare``.
    test
        A :class:`PairedTest`: each strategy is then compared with one that reshuffles everything, in pairs of runs that
        share the ``seed`` of the training, if its function has such a parameter.

    Raises
    ------
    InvalidParameter
        If a value is not allowed.

    Examples
    --------
    >>> import dshuffle
    >>> from dshuffle.synthetic import keyed_regression
    >>> _ = dshuffle.create_dataset("memory://doc-pipeline", keyed_regression(200, n_dense=4), overwrite=True)
    >>> pipeline = Pipeline(
    ...     "memory://doc-pipeline",
    ...     Training("linear_regression", epochs=3, step=0.1),
    ...     shuffle="partial:0.5",
    ...     cluster=LocalWorkers(2, processes=False),
    ... )
    >>> result = pipeline.run(progress=False)
    >>> len(result.history.points), len(result.records), result.model.shape
    (3, 3, (64,))
    """

    dataset: Dataset | Place
    training: Training
    shuffle: Choices | Way | str | Sequence[Choices | Way | str] = field(default_factory=Choices)
    cluster: ClusterSource = field(default_factory=LocalWorkers)
    session: SessionOptions | Mapping[str, Any] = field(default_factory=SessionOptions)
    checkpoint: str | Path | None = None
    report: str | Path | None = None
    test: PairedTest | None = None

    def __post_init__(self) -> None:
        for name, kinds, allowed in (
            ("training", Training, 'a Training, for example Training("linear_regression", step=0.1)'),
            ("test", PairedTest | None, "None or a PairedTest"),
            ("cluster", ClusterSource, "LocalWorkers, RunningScheduler or BatchJobs"),
            ("session", SessionOptions | Mapping, "a mapping of parameters of a Shuffler"),
        ):
            if not isinstance(getattr(self, name), kinds):
                raise InvalidParameter.of(name, getattr(self, name), allowed)
        session = self.session.keywords() if isinstance(self.session, SessionOptions) else self.session
        if unknown := sorted(session.keys() - set(SESSION)):
            raise InvalidParameter.of("session", unknown[0], f"a mapping with names among {', '.join(SESSION)}")
        several = isinstance(self.shuffle, Sequence) and not isinstance(self.shuffle, str)
        ways = tuple(map(as_way, self.shuffle if several else (self.shuffle,)))  # type: ignore[arg-type]
        labels, seeds = [way.label for way in ways], [way.choices.seed for way in ways]
        if not ways:
            raise InvalidParameter.of("shuffle", self.shuffle, "at least one strategy")
        if len({*labels}) < len(ways):
            hint = "Give them names: Way(label, ...)."
            raise InvalidParameter.of("shuffle", labels, "a sequence of strategies with different labels", hint)
        if len({*seeds}) > 1:
            raise InvalidParameter.of("shuffle", seeds, "a sequence of strategies with the same seed")
        if self.checkpoint is not None and len(ways) > 1:
            raise InvalidParameter.of("checkpoint", self.checkpoint, "None with several strategies")
        object.__setattr__(self, "shuffle", ways)
        object.__setattr__(self, "session", SessionOptions(**session))

    def __repr__(self) -> str:
        dataset = hide_secrets(self.dataset) if isinstance(self.dataset, str) else self.dataset
        labels = [way.label for way in self.ways]
        return f"Pipeline({dataset!r}, {self.training!r}, shuffle={labels}, cluster={self.cluster!r})"

    @property
    def ways(self) -> tuple[Way, ...]:
        """The strategies."""
        assert isinstance(self.shuffle, tuple)
        return self.shuffle

    @property
    def options(self) -> SessionOptions:
        """The options of the session."""
        assert isinstance(self.session, SessionOptions)
        return self.session

    @property
    def _n_workers(self) -> int | None:
        """Number of workers that train; None if only the cluster knows."""
        if self.options.workers is not None:
            return len(self.options.workers)
        return None if self.options.resources is not None else self.cluster.n_workers

    def check(self) -> Dataset:
        """Check all that can be checked before the cluster is started, and return the open dataset.

        Raises
        ------
        InvalidParameter
            If the pipeline cannot run. The message has all reasons.
        DatasetError
            If the dataset cannot be opened.
        """
        dataset, problems = as_dataset(self.dataset), list[str]()

        def collect(label: str, check: Callable[..., object], *args: Any) -> None:
            try:
                check(*args)
            except (InvalidParameter, OSError) as error:
                problems.append(f"{label}: {error}")

        for option, name in self.training.arrays.items():
            collect("training", check_name, option, name, dataset.arrays)

        def check_ways() -> None:
            _, part = self.training.on(dataset, self.ways[0].choices.seed)
            for way in self.ways:
                collect(way.label, self._check_way, dataset, part, way)

        collect("held-out samples", check_ways)
        collect("cluster", self.cluster.check)
        if self.test is not None:
            collect("test", self._check_test, self.test)
        if self.report is not None:
            collect(f"report={str(self.report)!r}", make_folder, self.report)
        if problems:
            raise InvalidParameter(f"this pipeline cannot run: {'; '.join(problems)}")
        return dataset

    def _check_way(self, dataset: Dataset, part: Dataset, way: Way) -> None:
        check_copy(way, dataset)
        if way.copy is not None and part is not dataset:
            raise InvalidParameter.because("copy", "it has the samples that are held out")
        choices = resolved(way.dataset(part), way.choices.with_one_delivery())
        self.options.check_way(dataclasses.replace(choices, delivery=way.choices.delivery))
        if (n_workers := self._n_workers) is not None:
            way.spec(way.dataset(part), n_workers)

    def _check_test(self, test: PairedTest) -> None:
        n_workers = self._n_workers
        check_pairs(2 if n_workers is None else n_workers, self.training.epochs)
        reference_of(self.ways)
        if all(way.choices.reshuffles_all for way in self.ways):
            labels = [way.label for way in self.ways]
            raise InvalidParameter.of("shuffle", labels, f"strategies to compare {test.metric} of, such as 'local'")

    def run(self, *, progress: bool | Advance = True) -> PipelineResult:
        """Run the pipeline, and wait for its result.

        Parameters
        ----------
        progress
            Whether to show progress on standard error. Or a function that is called between epochs, and while the run
            waits for its first workers, with the number of preparations and epochs that are done, of all, and what is
            going on. In pairs of runs: of pairs. An error that it raises ends the run; a checkpoint stays.

        Raises
        ------
        InvalidParameter
            If the pipeline cannot run.
        DShuffleError
            If the dataset cannot be read, or if the cluster is lost without a checkpoint.
        """
        if not callable(progress):
            with progress_bar() if progress else contextlib.nullcontext(lambda *_: None) as advance:
                return self.run(progress=advance)
        return train(self, progress, lambda comparison: report.write_report(comparison, str(self.report)))

    def submit(self, progress: bool | Advance = False) -> Future[PipelineResult]:
        """Check the pipeline, run it in a thread as :meth:`run` does, and return the future of its result."""
        self.check()
        pool = ThreadPoolExecutor(1, "dshuffle-pipeline")
        future = pool.submit(self.run, progress=progress)
        pool.shutdown(wait=False)
        return future


def as_way(way: Choices | Way | str) -> Way:
    """A strategy, from choices or the name of an assignment."""
    if isinstance(way, str):
        way = Choices(parse_assignment(way))
    if isinstance(way, Choices):
        return Way(way.label, way)
    if not isinstance(way, Way):
        raise InvalidParameter.of("shuffle", way, "a Choices, or the name of an assignment")
    return way


def train(
    pipeline: Pipeline,
    advance: Advance,
    write: Callable[[Comparison], Path] | None = None,
    tested: PairsByWay = MappingProxyType({}),
) -> PipelineResult:
    """Check a pipeline, start its cluster, and train with its strategies. ``tested`` are pairs for the report."""
    whole, options, test = pipeline.check(), pipeline.options, pipeline.test
    training, dataset = pipeline.training.on(whole, pipeline.ways[0].choices.seed)
    prepared = 2 if pipeline.report is None else 4
    total, done = prepared + len(pipeline.ways) * training.epochs, 0

    def say(text: str, now: int) -> None:
        nonlocal done
        done = now
        advance(done, total, text)

    waiting = f"waiting for {pipeline.cluster}"
    say("loading compiled code; the first run compiles it", 0)
    load_kernels(*KERNELS)
    say(waiting, 1)
    with pipeline.cluster.open(lambda text: say(f"{waiting}: {text}", done)) as client:
        measured, results = None, []
        if test is not None:
            check_pairs(count_training_workers(client, options.choice), training.epochs)
        if pipeline.report is not None:
            say("measuring the cluster", 2)
            measured = measure_workers(client, options.choice, dataset, seconds=MEASURING_SECONDS).cluster
            say("loading code on the workers; the first run compiles it", 3)
            _warm_up(pipeline, training, client, pipeline.ways[-1].dataset(dataset))
        for before, way in zip(range(prepared, total, training.epochs), pipeline.ways, strict=True):
            say(way.label, before)
            reported: dict[int, TrainingPoint] = {}

            def on_epoch(point: TrainingPoint, way: Way = way, before: int = before, reported: Any = reported) -> None:
                reported[point.epoch] = point  # after an interruption, an epoch may run again
                say(way.label, before + point.epoch + 1)  # a run that continues does not begin with the first epoch

            value, shuffler = _train(pipeline, training, client, way.dataset(dataset), way, on_epoch)
            points = tuple(reported.values())
            results.append(TrainedWay(way.label, value, tuple(shuffler.records), shuffler.n_workers, reported=points))
            say(way.label, before + training.epochs)  # also if the function does not say when an epoch ends
            if test is not None:
                metric_of(value, test.metric)  # now, and not after all ways
        if test is not None:
            pairs = pairs_of(client, whole, test, pipeline, results, advance)
            results = [dataclasses.replace(result, pairs=pairs.get(result.label)) for result in results]
            tested = {training.averages: pairs}
        if pipeline.report is None:
            return PipelineResult(tuple(results), None)
        if not any(result.records for result in results):
            logger.warning("dshuffle: all epochs were done before, as the checkpoint says. No report is written.")
            return PipelineResult(tuple(results), None)
        compared = []
        for way, result in zip(pipeline.ways, results, strict=True):
            own = {name: pairs[way.label] for name, pairs in tested.items() if way.label in pairs}
            compared.append(result_of(way, way.dataset(dataset), result.records, result.points, measured, own))
        comparison = comparison_of(
            client,
            dataset,
            compared,
            settings=training.facts,
            command=_command(),
            error_meaning=training.error_meaning,
            error_at_start=training.error_at_start,
            averages=training.averages,
        )
        return PipelineResult(tuple(results), None if write is None else write(comparison), comparison)


def metric_of(value: object, name: str) -> float | NDArray[np.float64]:
    """Return a metric of what a training has returned, or the losses of single samples whose mean it is."""
    metrics: Any = value
    if isinstance(value, History) and value.points:
        metrics = {"error": value.points[-1].error, **value.points[-1].validation}
    if not isinstance(metrics, Mapping):
        hint = "It must return a History, or a mapping from the name of each metric to one number."
        raise InvalidParameter.because("metric", f"the training returned {short_repr(value)}", hint)
    if name not in metrics:
        names = ", ".join(sorted(map(str, metrics))) or "none"
        raise InvalidParameter.of("metric", name, f"one of {names}, which the training returned")
    try:
        values = np.asarray(metrics[name])
        if values.ndim == 1 and len(values) > 1 and values.dtype.kind in "biuf":
            return values.astype(np.float64)
        return float(metrics[name])
    except (TypeError, ValueError, RuntimeError):
        raise InvalidParameter.because("metric", f"{name} is {short_repr(metrics[name])}, and not a number") from None


def pairs_of(
    client: Client, dataset: Dataset, test: PairedTest, pipeline: Pipeline, timed: Sequence[TrainedWay], say: Advance
) -> dict[str, PairedRuns]:
    """Train in pairs, and return the pairs of each tested strategy by its label.

    The reference is the fastest strategy that reshuffles everything. If the cluster fails, or has other workers than
    before, the pairs end with a warning.
    """
    training, options = pipeline.training, pipeline.options
    n_workers = timed[0].n_workers

    def run(way: Way, seed: int, shuffle_seed: int) -> float | NDArray[np.float64]:
        keywords = {**dataclasses.replace(way.choices, seed=shuffle_seed).keywords(), **options.keywords()}
        own, part = training.changed(seed=seed).on(way.dataset(dataset), seed)
        with Shuffler(client, part, **keywords) as shuffler:
            value = own.run(shuffler, lambda _: None)
            if shuffler.n_workers != n_workers:
                raise ClusterError(f"there are {shuffler.n_workers} workers in place of {n_workers}")
        return metric_of(value, test.metric)

    def seconds(place: int) -> float:
        exchanges = [record.exchange_seconds for record in timed[place].records[1:]]
        return float(np.median(exchanges)) if exchanges else math.inf

    reference = reference_of([pipeline.ways[place] for place in sorted(range(len(timed)), key=seconds)])
    held_out = training.held_out
    sizes = {"fixed": True} if held_out is None else held_out.sizes(dataset, reference.choices.seed)
    return run_in_pairs(test, reference, pipeline.ways, run, say, **sizes)


def _train(
    pipeline: Pipeline,
    training: Training,
    client: Client,
    dataset: Dataset,
    way: Way,
    on_epoch: Callable[[TrainingPoint], None],
) -> tuple[Any, Shuffler]:
    """Train with one strategy, and return what the training returned, and the closed shuffler."""
    options = {**way.choices.keywords(), **pipeline.options.keywords()}
    if pipeline.checkpoint is None:
        with Shuffler(client, dataset, **options) as shuffler:
            return training.run(shuffler, on_epoch), shuffler

    def train(shuffler: Shuffler) -> tuple[Any, Shuffler]:
        if 0 < (done := shuffler.next_epoch) < training.epochs:
            text = "dshuffle: training goes on with epoch %d, after %d of %d, from the checkpoint %s"
            logger.info(text, done, done, training.epochs, pipeline.checkpoint)
        if done > 0 and shuffler.attached is None:
            logger.warning(
                "dshuffle: epochs before %d are done, and no model was attached in them. Attach it after each epoch "
                "(Shuffler.attach), or load it in the function that trains.",
                done,
            )
        return training.run(shuffler, on_epoch), shuffler

    workers, patience = pipeline.cluster.awaited
    return run_with_retries(
        train,
        lambda: client,
        dataset,
        checkpoint=pipeline.checkpoint,
        min_workers=1 if pipeline.options.choice.is_restricted else workers,  # the cluster has waited for all
        patience=patience,
        **options,
    )


def _warm_up(pipeline: Pipeline, training: Training, client: Client, dataset: Dataset) -> None:
    """Run two epochs, so that the first strategy does not pay for loading code and opening connections.

    A trainer of dshuffle trains in them. A function of the user, which may do other things as well, is only sent to the
    workers.
    """
    with Shuffler(client, dataset, **pipeline.ways[-1].choices.keywords(), **pipeline.options.keywords()) as shuffler:
        if training.is_trainer:
            training.changed(epochs=WARM_UP_EPOCHS).run(shuffler, lambda _: None)
            return
        for epoch in shuffler.epochs(WARM_UP_EPOCHS):
            gathered(epoch.map(_only_load, training.fit))


def _only_load(partition: Partition, fit: Callable[..., Any]) -> None:
    """Do nothing with a partition and a function that a worker has loaded."""


def _command() -> str:
    program, *arguments = sys.argv
    path = Path(program)
    own = path.name == "dshuffle" or (path.parent.name, path.name) == ("dshuffle", "__main__.py")
    return hide_secrets(shlex.join(["dshuffle", *arguments] if own else ["python", program, *arguments]))
