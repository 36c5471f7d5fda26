"""Pairs of runs: each way of shuffling against one that reshuffles everything, until a paired test has an answer."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence

from dshuffle.compare.simulated import SimulatedCluster
from dshuffle.compare.ways import Way
from dshuffle.errors import DShuffleError, InvalidParameter, TrainingDiverged, what_happened
from dshuffle.noninferiority import Margin, PairedRuns, PairedTest
from dshuffle.planning import Choices, ShuffleSpec
from dshuffle.runtime.client.retries import LOSSES
from dshuffle.runtime.dataset_inputs import resolved
from dshuffle.store import Dataset
from dshuffle.training import CONSTANT, Schedule, fit_linear_regression, rmse_on

Run = Callable[[Way, int, int], float]
"""Function ``run(way, seed, shuffle_seed)`` that trains once and returns the metric. ``seed`` is that of the training:
of initial weights, augmentation and batches."""

Say = Callable[[int, int, str], None]
"""Function ``say(done, most, text)``: how many runs or pairs have ended, of how many at most, and what runs."""

HELD_OUT = 0.1
"""Fraction of the samples that the linear regression of ``dshuffle compare`` is tested on."""

ROUNDING = 1e-6
"""Errors of a regression relative to its targets that are rounding of float32 data."""

REGRESSION_METRIC = "rmse"
"""The metric of the linear regression of ``dshuffle compare``."""

METRIC_MEANING = "root mean square error on a held-out tenth of the samples"


def check_pairs(n_workers: int, epochs: int) -> None:
    """Refuse runs in which all ways train in the same way.

    Raises
    ------
    InvalidParameter
        If there is one worker, or one epoch.
    """
    if n_workers < 2:
        hint = "One worker trains on all samples with every way, so there is nothing to compare in pairs."
        raise InvalidParameter.of("workers", n_workers, "an integer >= 2", hint)
    if epochs < 2:
        hint = "The first epoch is only loaded: with one epoch, nothing is reshuffled."
        raise InvalidParameter.of("epochs", epochs, "an integer >= 2", hint)


def trained_on(way: Way) -> tuple[object, ...]:
    """What decides who trains on which sample. Ways that differ in nothing else learn the same."""
    choices = way.choices
    caches = (choices.caching, choices.cache_fraction) if choices.assignment.needs_holders else ()
    epochs = choices.exchange_epochs
    return str(choices.assignment), str(choices.sharding), choices.balance, epochs, way.copy is None, *caches


def run_in_pairs(
    test: PairedTest, reference: Way, ways: Sequence[Way], run: Run, say: Say = lambda *_: None
) -> dict[str, PairedRuns]:
    """Test each way that does not reshuffle everything against the reference.

    If the cluster fails, the pairs end with a warning. What was tested until then is returned.

    Parameters
    ----------
    test
        The metric, the margin and the largest number of pairs.
    reference
        A way that reshuffles everything.
    ways
        The ways. Ways that learn the same share their runs.
    run
        Trains once. Its two seeds are those of the way, plus the number of the pair. A run that raises
        :class:`~dshuffle.errors.TrainingDiverged` has the metric NaN.
    say
        Called with what runs before each run or pair.

    Returns
    -------
    dict
        The pairs of each tested way, by its label.

    Examples
    --------
    >>> ways = [Way("global", Choices("global")), Way("local", Choices("local"))]
    >>> def run(way, seed, shuffle_seed):
    ...     return 1.0 + 0.001 * (shuffle_seed % 3) + (0.5 if way.label == "local" else 0.0)
    >>> print(run_in_pairs(PairedTest("loss", margin=0.1), ways[0], ways, run)["local"])
    worse by 0.500 [0.498, 0.502] (95 % interval, 5 pairs; lower is better)
    """
    tested: dict[str, PairedRuns] = {}
    try:
        tested.update(_growing_pairs(test, reference, ways, run, say))  # keeps what came before an error
    except (DShuffleError, *LOSSES) as error:
        if isinstance(error, DShuffleError) and not error.transient:
            raise
        warnings.warn(f"The pairs of runs have ended early: {what_happened(error)}", stacklevel=2)
    return tested


def _growing_pairs(
    test: PairedTest, reference: Way, ways: Sequence[Way], run: Run, say: Say
) -> Iterator[tuple[str, PairedRuns]]:
    """Yield the label of a way and its pairs so far, after each of its pairs."""

    def metric(way: Way, seed: int, shuffle_seed: int) -> float:
        try:
            return run(way, seed, shuffle_seed)
        except TrainingDiverged:
            return math.nan

    first = reference.choices.seed
    null_runs = []
    for done, shuffle_seed in enumerate((first, first + test.pairs, first)):
        say(done, 3, f"“{reference.label}” in pairs: two seeds of the shuffle, then the first one again")
        null_runs.append(metric(reference, first, shuffle_seed))
    begun, null, repeated = null_runs
    references = [begun]
    by_key: dict[tuple[object, ...], PairedRuns] = {}
    for way in ways:
        if way.choices.reshuffles_all:
            continue
        key = trained_on(way)
        if key not in by_key:
            runs = PairedRuns(test=test, reference=tuple(references), way=(), null=null, repeated=repeated)
            while runs.outcome is None:
                pair = runs.n_pairs
                say(pair, test.pairs, f"“{way.label}” in pairs, at most {test.pairs}")
                if pair == len(references):
                    references.append(metric(reference, first + pair, first + pair))
                value = metric(way, first + pair, first + pair)
                runs = dataclasses.replace(runs, reference=tuple(references), way=(*runs.way, value))
                yield way.label, runs
            by_key[key] = runs
        yield way.label, by_key[key]


def seeded(way: Way, seed: int) -> Choices:
    """The choices of a way with another seed."""
    return dataclasses.replace(way.choices, seed=seed)


def regression_in_pairs(
    dataset: Dataset,
    ways: Sequence[Way],
    *,
    n_workers: int,
    epochs: int,
    step: float,
    features: str = "x",
    target: str = "y",
    schedule: Schedule = CONSTANT,
    margin: Margin | float | str = "1%",
    pairs: int = 20,
    say: Say = lambda *_: None,
) -> dict[str, PairedRuns]:
    """Test ways of shuffling with a linear regression that is trained in this process, without a cluster.

    Its results are those of a cluster. A tenth of the samples is held out for the metric ``rmse``. Ways that train on a
    copy of the dataset, or from a sharding that is stored for all samples, are left out.

    Parameters
    ----------
    dataset
        The dataset. All of its rows are read into the memory of this process.
    ways
        The ways, among them one that reshuffles everything.
    n_workers, epochs, step, features, target, schedule
        The training; see :func:`~dshuffle.training.fit_linear_regression`.
    margin, pairs
        See :class:`~dshuffle.noninferiority.PairedTest`.
    say
        Called with what runs before each run or pair.

    Returns
    -------
    dict
        The pairs of each tested way, by its label.

    Raises
    ------
    InvalidParameter
        If there is only one worker or one epoch, or no way reshuffles everything.

    Examples
    --------
    >>> from dshuffle import create_dataset
    >>> from dshuffle.compare import default_ways
    >>> from dshuffle.synthetic import keyed_regression
    >>> arrays = keyed_regression(2000, noise=0.1)
    >>> dataset = create_dataset("memory://doc-pairs", arrays, chunk_rows=50, overwrite=True)
    >>> tested = regression_in_pairs(dataset, default_ways(), n_workers=4, epochs=3, step=0.2, margin="5%")
    >>> {label: runs.outcome.value for label, runs in tested.items() if label.startswith("local")}
    {'local, as stored': 'worse', 'local, shuffled once': 'not worse'}
    """
    check_pairs(n_workers, epochs)
    train, held_out = dataset.split(1 - HELD_OUT)
    measure = rmse_on(held_out, lambda weights, rows: rows @ weights, features=features, target=target)
    cluster = SimulatedCluster.of(train, n_workers)
    candidates = ways_of_a_part(train, ways, n_workers)
    scale = float(measure(0.0 * train.read_rows([0])[features][0])["rmse_of_mean"])
    test = PairedTest(REGRESSION_METRIC, margin=margin, pairs=pairs, rounding=ROUNDING * scale, meaning=METRIC_MEANING)

    def run(way: Way, _: int, shuffle_seed: int) -> float:
        session = cluster.session(seeded(way, shuffle_seed))
        fit = fit_linear_regression(
            session,  # type: ignore[arg-type]  # all that this trainer uses
            epochs=epochs,
            step=step,
            features=features,
            target=target,
            schedule=schedule,
        )
        return float(measure(fit.model)[REGRESSION_METRIC])

    return run_in_pairs(test, reference_of(candidates), candidates, run, say)


def reference_of(ways: Sequence[Way]) -> Way:
    """The first way that reshuffles everything.

    Raises
    ------
    InvalidParameter
        If there is none.
    """
    for way in ways:
        if way.choices.reshuffles_all:
            return way
    labels = [way.label for way in ways]
    raise InvalidParameter.of("ways", labels, "ways of which one reshuffles everything, such as 'global'")


def ways_of_a_part(part: Dataset, ways: Sequence[Way], n_workers: int) -> list[Way]:
    """The ways that can shuffle a part of the dataset that they were made for."""

    def suits(way: Way) -> bool:
        try:
            ShuffleSpec.at_first(part.n_samples, n_workers, resolved(part, way.choices.with_one_delivery()))
        except InvalidParameter:
            return False
        return True

    return [way for way in ways if way.copy is None and suits(way)]
