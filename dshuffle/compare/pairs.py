"""Pairs of runs: each strategy against one that reshuffles everything, until a paired test has an answer.

And steps for the linear regression that is run in pairs, from the rows of its dataset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dshuffle.compare.comparison import Way
from dshuffle.compare.simulated import SimulatedCluster
from dshuffle.errors import DShuffleError, InvalidParameter, TrainingDiverged, what_happened
from dshuffle.noninferiority import ERROR_RATE, Margin, PairedRuns, PairedTest, holm
from dshuffle.runtime.client.shuffler import LOSSES
from dshuffle.store import Dataset
from dshuffle.training import CONSTANT, Linear, Schedule, fit_linear_regression, rmse_on
from dshuffle.training.fit import check_finite
from dshuffle.training.linear_regression import check_dataset

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
"""Errors of a regression relative to its targets, and singular values relative to the largest one, that are rounding of
float32 data."""

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
    >>> from dshuffle import Choices
    >>> ways = [Way("global", Choices("global")), Way("local", Choices("local"))]
    >>> def run(way, seed, shuffle_seed):
    ...     return 1.0 + 0.001 * (shuffle_seed % 3) + (0.5 if way.label == "local" else 0.0)
    >>> print(run_in_pairs(PairedTest("loss", margin=0.1), ways[0], ways, run)["local"])
    worse: +0.500 [0.497, 0.503] (95 % interval, 5 pairs; lower is better)
    """
    seed, tested = reference.choices.seed, [way for way in ways if not way.choices.reshuffles_all]
    alike: dict[tuple[object, ...], Way] = {}
    for way in tested:
        alike.setdefault(trained_on(way), way)
    of_reference: list[Value] = []
    values: dict[str, list[Value]] = {way.label: [] for way in alike.values()}
    undecided = set(values)

    def trained(way: Way, seed: int) -> Value:
        try:
            return run(way, seed, seed)
        except TrainingDiverged:
            return math.nan

    def shown() -> dict[str, PairedRuns]:
        return {
            label: PairedRuns(
                test=test,
                reference=tuple(float(np.mean(value)) for value in of_reference),
                way=tuple(float(np.mean(value)) for value in of_way),
                test_to_train=test_to_train,
                fixed=fixed,
                by_sample=_by_sample(of_way, of_reference) if fixed else None,
            )
            for label, of_way in values.items()
        }

    try:
        for before, look in itertools.pairwise((0, *test.looks)):
            for pair in range(before, look if undecided else before):
                say(pair, test.pairs, f"training in pairs, at most {test.pairs}")
                of_reference.append(trained(reference, seed + pair))
                for way in alike.values():
                    if way.label in undecided:
                        values[way.label].append(trained(way, seed + pair))
            runs = shown()
            p_values = holm(runs)
            # A way has an answer, which a "not worse" only is if it holds for all ways together.
            undecided = {
                label
                for label in undecided
                if (runs[label].outcome is None or ERROR_RATE < p_values[label] < 1)
                and runs[label].n_pairs < test.pairs
            }
    except (DShuffleError, *LOSSES) as error:
        if isinstance(error, DShuffleError) and not error.transient:
            raise
        warnings.warn(f"The pairs of runs have ended early: {what_happened(error)}", stacklevel=2)
    runs = shown()
    return {way.label: runs[alike[trained_on(way)].label] for way in tested}


def _by_sample(way: Sequence[Value], reference: Sequence[Value]) -> NDArray[np.float64] | None:
    """The mean difference in the loss of each sample, if all runs return them."""
    pairs = list(zip(way, reference, strict=False))
    shapes = {np.shape(value) for pair in pairs for value in pair}
    if len(shapes) != 1 or () in shapes:
        return None
    return np.asarray(np.mean([np.subtract(*pair) for pair in pairs], axis=0))


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
            cluster.session(dataclasses.replace(way.choices, seed=shuffle_seed)),  # type: ignore[arg-type]  # all that this trainer uses
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
    possible = []
    for way in ways:
        with contextlib.suppress(InvalidParameter):
            way.spec(part, n_workers)
            possible.append(way)
    return possible


PLACES = 1000
"""Places of a dataset at which consecutive rows are read, if it has too many rows to read all."""

MOST_BYTES = 1 << 25
"""Most bytes of rows to read. Heavy tails need many rows: a few large ones decide the step."""

MOST_PRODUCTS = 200_000_000
"""Most products of two features to add up, which takes less than 0.1 s."""


def stable_step(dataset: Dataset, *, features: str = "x", target: str = "y", batch_size: int = 1) -> float:
    """Return the step 1 / R² for SGD on single rows, where R² is the least number with ``E[|x|² x xᵀ] ≤ R² E[x xᵀ]``.

    With the mean gradient of a batch of B rows, R² is replaced by ``R² / B + (1 - 1 / B) L``, where L is the largest
    eigenvalue of ``E[x xᵀ]``: the step grows with the batch as long as its rows are rarely alike.

    With steps below 2 / R² the mean squared error of the weights does not grow. The expectations are over all rows. If
    the dataset has more than 32 MiB or very many features, they are over rows at 1,000 evenly spaced places. Rows of
    norm 1 have the step 1.

    Raises
    ------
    InvalidParameter
        ``features`` and ``target`` do not suit a linear regression, all these rows are zero or not finite, or a
        float64 cannot hold the step.

    References
    ----------
    Bach and Moulines (2013); P. Jain et al., "Parallelizing stochastic gradient descent for least squares regression",
    JMLR, 2018, for batches; see docs/papers.md.

    Examples
    --------
    >>> from dshuffle import create_dataset
    >>> rows = {"x": 5 * np.eye(4, dtype=np.float32), "y": np.ones(4)}
    >>> round(stable_step(create_dataset("memory://doc-step", rows, overwrite=True)), 6)
    0.04
    """
    check_dataset(dataset, features, target)
    ids = sample_ids(dataset, dataset.arrays[features].shape[0])
    rows = dataset.read_rows(ids)[features].astype(np.float64)
    check_finite("features", features, rows, ids)
    if not np.any(rows):
        raise InvalidParameter.of("features", features, "an array of values that are not all zero")
    largest = float(max(rows.max(), -rows.min()))
    rows /= largest  # so that squares do not overflow
    ratio = _largest_ratio(rows)
    if batch_size > 1:
        small = rows @ rows.T if rows.shape[1] > len(rows) else rows.T @ rows
        ratio = ratio / batch_size + (1 - 1 / batch_size) * float(np.linalg.eigvalsh(small)[-1]) / len(rows)
    step = 1 / ratio / largest / largest
    if not sys.float_info.min <= step <= sys.float_info.max:
        hint = f"The largest one is {largest:.3g}. Scale the features."
        raise InvalidParameter.of("features", features, "an array of values with squares that a float64 can hold", hint)
    return step


def sample_ids(dataset: Dataset, n_features: int) -> NDArray[np.int64]:
    """The rows to look at: all, or as many as are cheap, at evenly spaced places. Consecutive ones share chunks."""
    most = min(MOST_BYTES // dataset.row_nbytes, MOST_PRODUCTS // n_features**2)
    length = max(1, most // PLACES)
    if dataset.n_samples <= max(most, PLACES):
        return np.arange(dataset.n_samples)
    starts = np.linspace(0, dataset.n_samples - length, PLACES).astype(np.int64)
    return np.unique(starts[:, np.newaxis] + np.arange(length))


def _largest_ratio(rows: NDArray[np.float64]) -> float:
    """The largest v' E[|x|² x x'] v / v' E[x x'] v."""
    norms = np.einsum("ij,ij->i", rows, rows)
    if rows.shape[1] >= len(rows):  # as a rule, no row is a sum of others
        return float(norms.max())
    second, fourth = rows.T @ rows, rows.T @ (rows * norms[:, np.newaxis])
    values, vectors = np.linalg.eigh(second)
    spanned = values > ROUNDING**2 * values[-1]
    whitening = vectors[:, spanned] / np.sqrt(values[spanned])
    return float(np.linalg.eigvalsh(whitening.T @ fourth @ whitening)[-1])


def falling(epochs: int) -> Schedule:
    """Return steps that fall linearly: 1 - t / T in epoch t of T.

    SGD ends near the least error, where a constant step would leave the noise of the last rows. It is the schedule
    with the best bound for the last iterate.

    References
    ----------
    Defazio, Cutkosky, Mehta and Mishchenko (2023); see docs/papers.md.

    Examples
    --------
    >>> [round(falling(4)(epoch), 2) for epoch in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    return Linear(1 / epochs, epochs) if epochs > 1 else CONSTANT
