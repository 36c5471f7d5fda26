"""A pipeline as one value: what to train on, how to shuffle it, how to train, and where."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from dshuffle.compare import Way, count_training_workers
from dshuffle.compare.comparison import check_copy
from dshuffle.errors import CacheBudgetError, InvalidParameter
from dshuffle.noninferiority import Margin, PairedTest
from dshuffle.pipeline.background import PipelineRun
from dshuffle.pipeline.clusters import ClusterSource, LocalWorkers, source_from_dict
from dshuffle.pipeline.explanation import Explanation, explain
from dshuffle.pipeline.pairs import check_test
from dshuffle.pipeline.run import PipelineResult, execute
from dshuffle.pipeline.training import Training
from dshuffle.planning import Choices, ShuffleSpec, parse_assignment
from dshuffle.planning.cost import ClusterRates
from dshuffle.redaction import hide_secrets
from dshuffle.report.progress import progress_bar
from dshuffle.report.summary import make_folder
from dshuffle.runtime.dataset_inputs import resolved
from dshuffle.runtime.memory import check_budget
from dshuffle.runtime.session_spec import SessionOptions
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset, Place, as_dataset, dataset_of, describe

SESSION = tuple(field.name for field in dataclasses.fields(SessionOptions) if field.name != "min_workers")
"""Options of a session that a user may choose. How many workers to wait for is an option of the cluster."""


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
        The way of shuffling: a :class:`dshuffle.Choices`, or the name of an assignment. Several ways are trained with
        one after the other, and compared in the report.
    cluster
        Where to run: :class:`LocalWorkers` (the default), :class:`RunningScheduler`, :class:`BatchJobs`, or an object
        of your own that is a :class:`ClusterSource`.
    session
        Further parameters of :class:`dshuffle.Shuffler`, as a mapping: ``on_loss``, ``memory_limit``,
        ``cache_directory``, ... They are checked here, and kept as one value.
    checkpoint
        File or object of the state, as for :class:`dshuffle.Shuffler`. With it, training goes on if the session is
        lost, and another run of the pipeline continues where this one ended. Only with a single way.
    report
        Folder for a report of times, traffic and errors of every way, like that of ``dshuffle compare``.
    test
        A :class:`PairedTest`: each way is then compared with one that reshuffles everything, in pairs of runs that
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
    checkpoint: str | None = None
    report: str | None = None
    test: PairedTest | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.training, Training):
            raise InvalidParameter.of(
                "training", self.training, "a Training", 'For example Training("linear_regression", step=0.1).'
            )
        if not isinstance(self.test, PairedTest | None):
            raise InvalidParameter.of("test", self.test, "None or a PairedTest")
        if not isinstance(self.cluster, ClusterSource):
            raise InvalidParameter.of("cluster", self.cluster, "LocalWorkers, RunningScheduler or BatchJobs")
        object.__setattr__(self, "session", _options_of(self.session))
        several = isinstance(self.shuffle, Sequence) and not isinstance(self.shuffle, str)
        ways = tuple(map(as_way, self.shuffle if several else (self.shuffle,)))  # type: ignore[arg-type]
        if not ways:
            raise InvalidParameter.of("shuffle", self.shuffle, "at least one way of shuffling")
        if len({way.label for way in ways}) < len(ways):
            raise InvalidParameter.of(
                "shuffle",
                [way.label for way in ways],
                "a sequence of ways with different labels",
                "Give them names: Way(label, ...).",
            )
        if len({way.choices.seed for way in ways}) > 1:
            raise InvalidParameter.of(
                "shuffle", [way.choices.seed for way in ways], "a sequence of ways with the same seed"
            )
        object.__setattr__(self, "shuffle", ways)
        for name in ("checkpoint", "report"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, os.fspath(value))
        if self.checkpoint is not None and len(ways) > 1:
            raise InvalidParameter.of("checkpoint", self.checkpoint, "None with several ways of shuffling")

    def __repr__(self) -> str:
        dataset = hide_secrets(self.dataset) if isinstance(self.dataset, str) else self.dataset
        values: dict[str, object] = {"dataset": dataset, "training": self.training, "cluster": self.cluster}
        values["shuffle"] = [way.label for way in self.ways]
        values |= {name: value for name, value in (("checkpoint", self.checkpoint), ("report", self.report)) if value}
        values |= self.options.keywords() | ({} if self.test is None else {"test": self.test})
        return f"Pipeline({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways of shuffling."""
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

    def check(self) -> None:
        """Check all that can be checked before the cluster is started.

        Raises
        ------
        InvalidParameter
            If the pipeline cannot run. The message has all reasons.
        DatasetError
            If the dataset cannot be opened.
        """
        self.checked()

    def checked(self) -> Dataset:
        """Check the pipeline, and return its open dataset."""
        dataset = as_dataset(self.dataset)
        problems = [
            f"{option}={name!r} is not an array of the dataset, which has {', '.join(sorted(dataset.arrays))}"
            for option, name in self.training.arrays.items()
            if name not in dataset.arrays
        ]
        with _collected(problems, "held-out samples"):
            _, part = self.training.on(dataset, self.ways[0].choices.seed)
            for way in self.ways:
                with _collected(problems, way.label):
                    check_copy(way, dataset)
                    if way.copy is not None and part is not dataset:
                        raise InvalidParameter.because("copy", "it has the samples that are held out")
                    self._check_way(part if way.copy is None else way.copy, way)
        with _collected(problems, "cluster"):
            self.cluster.check()
        if self.test is not None:
            with _collected(problems, "test"):
                check_test(self.test, self.training, self.ways, self._n_workers)
        if self.report is not None:
            try:
                make_folder(self.report)
            except OSError as error:
                problems.append(f"report={self.report!r} cannot be written to: {error}")
        if problems:
            raise InvalidParameter(f"this pipeline cannot run: {'; '.join(problems)}")
        return dataset

    def _check_way(self, dataset: Dataset, way: Way) -> None:
        choices = resolved(dataset, way.choices.with_one_delivery())
        self.options.check_way(dataclasses.replace(choices, delivery=way.choices.delivery))
        n_workers = self._n_workers
        if n_workers is None:
            return
        spec = ShuffleSpec.at_first(dataset.n_samples, n_workers, choices)
        memory = self.cluster.worker_memory
        if memory and self.options.memory_limit is None:
            limit = int(Settings.from_config().memory_fraction * memory)
            check_budget(spec, dataset.layout, limit, on_disk=self.options.on_disk)

    def explain(self, rates: ClusterRates | None = None) -> Explanation:
        """Say what will run where, how much moves, and how long an exchange will take. Trains nothing.

        Parameters
        ----------
        rates
            Speed of the cluster, as :func:`dshuffle.measure_cluster` measures it. By default links of 1 Gbit/s are
            assumed.

        Raises
        ------
        InvalidParameter
            If the pipeline cannot run.
        """
        dataset = self.checked()
        n_workers = self._n_workers
        if n_workers is None:
            with self.cluster.open() as client:
                n_workers = count_training_workers(client, self.options.choice)
        return explain(
            dataset,
            self.ways,
            n_workers,
            cluster=str(self.cluster),
            training=str(self.training),
            rates=rates,
            on_disk=self.options.on_disk,
        )

    def run(self, *, progress: bool = True) -> PipelineResult:
        """Run the pipeline, and wait for its result.

        Parameters
        ----------
        progress
            Whether to show progress on standard error.

        Raises
        ------
        InvalidParameter
            If the pipeline cannot run.
        DShuffleError
            If the dataset cannot be read, or if the cluster is lost without a checkpoint.
        """
        with progress_bar() if progress else contextlib.nullcontext(lambda *_: None) as advance:
            return execute(self, advance, lambda: None)

    def submit(self) -> PipelineRun:
        """Run the pipeline in a thread, and return a handle with progress, cancellation and the result."""
        self.check()
        return PipelineRun(self)

    def to_dict(self) -> dict[str, Any]:
        """The pipeline as JSON can hold it. Storage options of the dataset, which may be secrets, are left out.

        Raises
        ------
        InvalidParameter
            If a function cannot be imported by its name, or JSON cannot hold an option.
        """
        return {
            "dataset": os.fspath(self.dataset)
            if isinstance(self.dataset, str | os.PathLike)
            else describe(as_dataset(self.dataset)),
            "training": self.training.to_dict(),
            "shuffle": list(map(_way_to_dict, self.ways)),
            "cluster": self.cluster.to_dict(),
            "session": self.options.keywords(),
            "checkpoint": self.checkpoint,
            "report": self.report,
            "test": None if self.test is None else dataclasses.asdict(self.test),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The pipeline that :meth:`to_dict` wrote.

        Raises
        ------
        InvalidParameter
            If a name is missing or not known, or a value is not allowed.
        DatasetError
            If a part of a dataset cannot be opened.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if missing := {"dataset", "training"} - fields.keys():
            raise InvalidParameter.because("the description of a pipeline", f"it lacks {', '.join(sorted(missing))}")
        if unknown := fields.keys() - names:
            raise InvalidParameter.of("pipeline", sorted(unknown), f"a mapping with names among {sorted(names)}")
        readers: dict[str, Callable[[Any], Any]] = {
            "dataset": lambda value: dataset_of(value) if isinstance(value, Mapping) else value,
            "training": Training.from_dict,
            "shuffle": lambda ways: tuple(map(_way_of, ways)),
            "cluster": source_from_dict,
            "test": lambda test: test and PairedTest(**{**test, "margin": Margin(**test["margin"])}),
        }
        values = dict(fields)
        for name in readers.keys() & values.keys():
            try:
                values[name] = readers[name](values[name])
            except (KeyError, TypeError, AttributeError) as error:
                raise InvalidParameter.because(
                    "the description of a pipeline", f"{name} lacks a name, or has an unknown one: {error}"
                ) from error
        return cls(**values)


def _way_to_dict(way: Way) -> dict[str, Any]:
    copy = {} if way.copy is None else {"copy": describe(way.copy)}
    return {"label": way.label, **way.choices.to_dict(), **copy}


def _way_of(fields: Mapping[str, Any]) -> Way:
    choices = Choices.from_dict({name: fields[name] for name in fields if name not in ("label", "copy")})
    copy = fields.get("copy")
    return Way(fields["label"], choices, dataset_of(copy) if isinstance(copy, Mapping) else copy and as_dataset(copy))


def _options_of(session: SessionOptions | Mapping[str, Any]) -> SessionOptions:
    if not isinstance(session, SessionOptions | Mapping):
        raise InvalidParameter.of("session", session, "a mapping of parameters of a Shuffler")
    keywords = session.keywords() if isinstance(session, SessionOptions) else session
    for name in keywords:
        if name not in SESSION:
            raise InvalidParameter.of("session", name, f"a mapping with names among {', '.join(SESSION)}")
    return session if isinstance(session, SessionOptions) else SessionOptions(**session)


def as_way(way: Choices | Way | str) -> Way:
    """A way of shuffling, from choices or the name of an assignment."""
    if isinstance(way, str):
        way = Choices(parse_assignment(way))
    if isinstance(way, Choices):
        return Way(way.label, way)
    if not isinstance(way, Way):
        raise InvalidParameter.of("shuffle", way, "a Choices, or the name of an assignment")
    return way


@contextlib.contextmanager
def _collected(problems: list[str], label: str) -> Iterator[None]:
    """Collect an error of a way as a sentence."""
    try:
        yield
    except (InvalidParameter, CacheBudgetError) as error:
        problems.append(f"{label}: {error}")
