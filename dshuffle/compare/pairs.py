"""Pairs of runs: each strategy against one that reshuffles everything, until a paired test has an answer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dshuffle.compare.simulated import SimulatedCluster
from dshuffle.compare.steps import falling, stable_step
from dshuffle.compare.ways import Way
from dshuffle.errors import DShuffleError, InvalidParameter, TrainingDiverged, what_happened
from dshuffle.noninferiority import ERROR_RATE, Margin, PairedRuns, PairedTest, holm
from dshuffle.planning import Choices
from dshuffle.runtime.client.shuffler import LOSSES
from dshuffle.store import Dataset
from dshuffle.training import CONSTANT, Schedule, fit_linear_regression, rmse_on

Value = float | NDArray[np.float64]
Run = Callable[[Way, int, int], Value]
"""Function ``run(way, seed, shuffle_seed)`` that trains once and returns the metric, or its losses of single samples.
``seed`` is that of the training: of initial weights, augmentation, batches and the held-out set."""

Say = Callable[[int, int, str], None]
"""Function ``say(done, most, text)``: how many runs or pairs have ended, of how many at most, and what runs."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A part of a dataset that a model is tested on and not trained on, drawn anew for each pair of runs.

    Parameters
    ----------
    fraction
        Fraction of the samples.
    by, stratify
        What stays together, or is in both parts in the same fractions; see :meth:`dshuffle.Dataset.split`. ``"time"``
        draws nothing: all pairs are tested on the same last samples.

    Examples
    --------
    >>> HeldOut.of("patient"), HeldOut.of("stratified:label")
    (HeldOut(fraction=0.1, by='patient', stratify=None), HeldOut(fraction=0.1, by='sample', stratify='label'))
    """

    fraction: float = 0.1
    by: str = "sample"
    stratify: str | None = None

    @classmethod
    def of(cls, text: str) -> Self:
        """A tenth by ``sample``, ``chunk``, ``time``, the name of an array, or ``stratified:NAME``."""
        kind, _, name = text.partition(":")
        return cls(stratify=name) if kind == "stratified" and name else cls(by=text)

    def split(self, dataset: Dataset, seed: int) -> tuple[Dataset, Dataset]:
        """What to train on, and the held-out part."""
        return dataset.split(1 - self.fraction, by=self.by, stratify=self.stratify, seed=seed)

    def sizes(self, dataset: Dataset, seed: int) -> dict[str, Any]:
        """What a paired test has to know of it; see :class:`~dshuffle.noninferiority.PairedRuns`."""
        if self.by == "time":
            return {"test_to_train": 0.0, "fixed": True}
        train, test = self.split(dataset, seed)
        return {"test_to_train": test.n_samples / train.n_samples, "fixed": False}


TENTH = HeldOut()

BATCH_SIZE = 32
"""Samples of one worker in a step of the linear regression of ``dshuffle compare``, if gradients are averaged."""

ROUNDING = 1e-6
"""Errors of a regression relative to its targets that are rounding of float32 data."""

REGRESSION_METRIC = "rmse"
"""The metric of the linear regression of ``dshuffle compare``."""

METRIC_MEANING = "root mean square error on a held-out tenth of the samples"


def check_pairs(n_workers: int, epochs: int) -> None:
    """Refuse runs in which all strategies train in the same way."""
    if n_workers < 2:
        hint = "One worker trains on all samples with every strategy, so there is nothing to compare in pairs."
        raise InvalidParameter.of("workers", n_workers, "an integer >= 2", hint)
    if epochs < 2:
        hint = "The first epoch is only loaded: with one epoch, nothing is reshuffled."
        raise InvalidParameter.of("epochs", epochs, "an integer >= 2", hint)


def trained_on(way: Way) -> tuple[object, ...]:
    """What decides who trains on which sample. Strategies that differ in nothing else learn the same."""
    choices = way.choices
    caches = (choices.caching, choices.cache_fraction) if choices.assignment.needs_holders else ()
    epochs = choices.exchange_epochs
    return str(choices.assignment), str(choices.sharding), choices.balance, epochs, way.copy is None, *caches


def run_in_pairs(
    test: PairedTest,
    reference: Way,
    ways: Sequence[Way],
    run: Run,
    say: Say = lambda *_: None,
    *,
    test_to_train: float = 0.0,
    fixed: bool = False,
) -> dict[str, PairedRuns]:
    """Test each strategy that does not reshuffle everything against the reference.

    If the cluster fails, the pairs end with a warning. What was tested until then is returned.

    Parameters
    ----------
    test
        The metric, the margin and the largest number of pairs.
    reference
        A strategy that reshuffles everything.
    ways
        The strategies. Strategies that learn the same share their runs.
    run
        Trains once. Its two seeds are those of the strategy, plus the number of the pair. A run that raises
        :class:`~dshuffle.errors.TrainingDiverged` has the metric NaN.
    say
        Called with what runs before each pair.
    test_to_train, fixed
        How the held-out samples are chosen; see :class:`~dshuffle.noninferiority.PairedRuns`.

    Returns
    -------
    dict
        The pairs of each tested strategy, by its label.

    Examples
    --------
    >>> ways = [Way("global", Choices("global")), Way("local", Choices("local"))]
    >>> def run(way, seed, shuffle_seed):
    ...     return 1.0 + 0.001 * (shuffle_seed % 3) + (0.5 if way.label == "local" else 0.0)
    >>> print(run_in_pairs(PairedTest("loss", margin=0.1), ways[0], ways, run)["local"])
    worse: +0.500 [0.497, 0.503] (95 % interval, 5 pairs; lower is better)
    """
    seed = reference.choices.seed
    labels: dict[tuple[object, ...], list[Way]] = {}
    for way in ways:
        if not way.choices.reshuffles_all:
            labels.setdefault(trained_on(way), []).append(way)
    of_reference: list[Value] = []
    values: dict[tuple[object, ...], list[Value]] = {key: [] for key in labels}
    undecided = set(labels)

    def trained(way: Way, seed: int) -> Value:
        try:
            return run(way, seed, seed)
        except TrainingDiverged:
            return math.nan

    def shown() -> dict[tuple[object, ...], PairedRuns]:
        return {
            key: PairedRuns(
                test=test,
                reference=tuple(float(np.mean(value)) for value in of_reference),
                way=tuple(float(np.mean(value)) for value in of_way),
                test_to_train=test_to_train,
                fixed=fixed,
                by_sample=_by_sample(of_way, of_reference) if fixed else None,
            )
            for key, of_way in values.items()
        }

    try:
        for before, look in itertools.pairwise((0, *test.looks)):
            for pair in range(before, look if undecided else before):
                say(pair, test.pairs, f"training in pairs, at most {test.pairs}")
                of_reference.append(trained(reference, seed + pair))
                for key in [key for key in labels if key in undecided]:
                    values[key].append(trained(labels[key][0], seed + pair))
            runs = shown()
            p_values = holm({str(key): one for key, one in runs.items()})
            # A way has an answer, which a "not worse" only is if it holds for all ways together.
            undecided = {
                key
                for key in undecided
                if (runs[key].outcome is None or ERROR_RATE < p_values[str(key)] < 1) and runs[key].n_pairs < test.pairs
            }
    except (DShuffleError, *LOSSES) as error:
        if isinstance(error, DShuffleError) and not error.transient:
            raise
        warnings.warn(f"The pairs of runs have ended early: {what_happened(error)}", stacklevel=2)
    return {way.label: runs for key, runs in shown().items() for way in labels[key]}


def _by_sample(way: Sequence[Value], reference: Sequence[Value]) -> NDArray[np.float64] | None:
    """The mean difference in the loss of each sample, if all runs return them."""
    pairs = list(zip(way, reference, strict=False))
    shapes = {np.shape(value) for pair in pairs for value in pair}
    if len(shapes) != 1 or () in shapes:
        return None
    return np.asarray(np.mean([np.subtract(*pair) for pair in pairs], axis=0))


def seeded(way: Way, seed: int) -> Choices:
    """The choices of a strategy with another seed."""
    return dataclasses.replace(way.choices, seed=seed)


def regression_in_pairs(
    dataset: Dataset,
    ways: Sequence[Way],
    *,
    n_workers: int,
    epochs: int,
    step: float | None = None,
    features: str = "x",
    target: str = "y",
    schedule: Schedule | None = None,
    averages: Sequence[str] = ("gradients", "models"),
    held_out: HeldOut = TENTH,
    margin: Margin | float | str = "1%",
    pairs: int = 20,
    say: Say = lambda *_: None,
) -> dict[str, dict[str, PairedRuns]]:
    """Test strategies with a linear regression that is trained in this process, without a cluster.

    Its results are those of a cluster. Each pair holds out another tenth of the samples for the metric ``rmse``.
    Strategies that train from a sharding that is stored for all samples are left out; a strategy that trains on a copy
    in random order gets another order in each pair.

    Parameters
    ----------
    dataset
        The dataset. All of its rows are read into the memory of this process.
    ways
        The strategies, among them one that reshuffles everything.
    n_workers, epochs, features, target, schedule
        The training; see :func:`~dshuffle.training.fit_linear_regression`.
    step
        Step of models that are averaged. By default, and always if gradients are averaged, it suits the rows; see
        :func:`~dshuffle.compare.stable_step`.
    averages
        What is averaged: ``"gradients"`` in every step, over mini-batches of 32 samples a worker, and ``"models"`` once
        an epoch.
    held_out
        How a part is held out.
    margin, pairs
        See :class:`~dshuffle.compare.PairedTest`.
    say
        Called with what runs before each pair.

    Returns
    -------
    dict
        For each of ``averages``, the pairs of each tested strategy by its label.

    Raises
    ------
    InvalidParameter
        If there is only one worker or one epoch, or no strategy reshuffles everything.

    Examples
    --------
    >>> from dshuffle import create_dataset
    >>> from dshuffle.compare import default_ways
    >>> from dshuffle.synthetic import keyed_regression
    >>> arrays = keyed_regression(2000, noise=0.1)
    >>> dataset = create_dataset("memory://doc-pairs", arrays, chunk_rows=50, overwrite=True)
    >>> tested = regression_in_pairs(dataset, default_ways(), n_workers=4, epochs=3, step=0.2, margin="5%")
    >>> {name: runs["local, as stored"].outcome.value for name, runs in tested.items()}
    {'gradients': 'not worse', 'models': 'worse'}
    """
    check_pairs(n_workers, epochs)
    seed = ways[0].choices.seed
    names: Any = {"features": features, "target": target}
    train, _ = held_out.split(dataset, seed)
    candidates = ways_of_a_part(train, ways, n_workers)
    reference = reference_of(candidates)
    steps: dict[str, dict[str, Any]] = {
        "models": {"step": step or stable_step(train, **names)},
        "gradients": {
            "step": stable_step(train, **names, batch_size=BATCH_SIZE * n_workers),
            "batch_size": min(BATCH_SIZE, train.n_samples // n_workers),
        },
    }

    @functools.lru_cache(1)
    def drawn(seed: int) -> tuple[SimulatedCluster, Callable[[Any], Mapping[str, Any]]]:
        train, test = held_out.split(dataset, seed)
        return SimulatedCluster.of(train, n_workers), rmse_on(test, lambda weights, rows: rows @ weights, **names)

    def run(average: str, way: Way, seed: int, shuffle_seed: int) -> float:
        cluster, measure = drawn(seed)
        if way.copy is not None:
            order = np.random.default_rng([seed, 1]).permutation(len(cluster.rows))
            cluster = dataclasses.replace(cluster, rows=cluster.rows[order])
        fit = fit_linear_regression(
            cluster.session(seeded(way, shuffle_seed)),  # type: ignore[arg-type]  # all that this trainer uses
            epochs=epochs,
            average=average,
            measure_error=False,
            schedule=schedule or (CONSTANT if step else falling(epochs)),
            **steps[average],
            **names,
        )
        return float(measure(fit.model)[REGRESSION_METRIC])

    _, measure = drawn(seed)
    width = dataset.arrays[features].shape[0]
    scale = float(measure(np.zeros(width))["rmse_of_mean"])
    test = PairedTest(REGRESSION_METRIC, margin=margin, pairs=pairs, rounding=ROUNDING * scale, meaning=METRIC_MEANING)
    sizes = held_out.sizes(dataset, seed)

    def advance(before: int, done: int, most: int, text: str) -> None:
        say(before * most + done, len(averages) * most, text)

    return {
        average: run_in_pairs(
            test,
            reference,
            candidates,
            functools.partial(run, average),
            functools.partial(advance, before),
            **sizes,
        )
        for before, average in enumerate(averages)
    }


def reference_of(ways: Sequence[Way]) -> Way:
    """The first strategy that reshuffles everything."""
    for way in ways:
        if way.choices.reshuffles_all:
            return way
    labels = [way.label for way in ways]
    raise InvalidParameter.of("ways", labels, "strategies of which one reshuffles everything, such as 'global'")


def ways_of_a_part(part: Dataset, ways: Sequence[Way], n_workers: int) -> list[Way]:
    """The strategies that can shuffle a part of the dataset that they were made for."""

    def suits(way: Way) -> bool:
        try:
            way.spec(part, n_workers)
        except InvalidParameter:
            return False
        return True

    return [way for way in ways if suits(way)]
