"""Train without the samples of late or lost workers, or on old samples, and compare with waiting for them.

    python pipelines/straggler_study.py [--pairs 20] [--model regression] [--late 0.05 --late always] [--output FOLDER]

Samples are shuffled between 8 logical workers before every epoch. Each worker is late or lost in an epoch with some
probability, or one worker is late in every epoch. The first epoch is only loaded, so nobody is late in it. At least one
worker is always in time. Ways to go on:

    exactly once   wait, or replace the worker: every sample is trained on once, and the epoch takes longer
    left out       the samples of late workers are not trained on, and the models of the others are averaged
    old samples    late workers train on their samples of the epoch before, and get the new ones before the next epoch

The models average once an epoch:

    regression     least squares with noise, 2,000 rows with keys; error: squared error above the least possible one
    softmax        softmax regression on 1,200 of scikit-learn's digits; error: cross-entropy on 597 held-out ones

Steps are constant, or fall to a twentieth. The last errors are compared in pairs of runs with the same seed, by the
paired test of `dshuffle compare`. The script prints the error after each epoch, then the answers. It writes
straggler.csv with all points, and straggler.html. It takes some minutes.

References
----------
Chung et al. (2017), section 5.1 (late workers are ignored) and section 4.1 (training goes on with old samples until the
new ones have arrived); see docs/papers.md.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from bokeh.plotting import figure
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from studies.scripts import chart_page
from threadpoolctl import threadpool_limits

import dshuffle
from dshuffle.compare import PairedRuns, PairedTest, SimulatedCluster
from dshuffle.planning import Choices
from dshuffle.synthetic import keyed_regression
from dshuffle.training import CONSTANT, Linear, Schedule, fit_linear_regression, fit_parallel_sgd

N_WORKERS = 8
N_TRAIN = 1200
LAST_STEP = 0.05
"""Fraction of the first step that is left at the end."""

ALWAYS = "always"
COLOURS = ("#009E73", "#D55E00", "#0072B2")  # of Okabe and Ito's palette for colour-blind readers
Orders = list[NDArray[np.int64]]
"""The samples of each worker, in training order."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """The probability that a worker is late in an epoch, for rank 0 and for each of the others."""

    label: str
    of_first: float
    of_others: float

    @classmethod
    def of(cls, text: str) -> Lateness:
        """Return what a value of ``--late`` stands for: a probability, or rank 0 in every epoch."""
        if text == ALWAYS:
            return cls(text, 1.0, 0.0)
        try:
            probability = float(text)
        except ValueError:
            probability = math.nan
        if not 0 <= probability < 1:
            raise click.BadParameter(f"{text!r} is neither a number in [0, 1) nor {ALWAYS!r}")
        return cls(text, probability, probability)

    def draw(self, epochs: int, seed: int) -> NDArray[np.bool_]:
        """Draw who is late: ``(epochs, N_WORKERS)``. A larger probability adds late workers to those of a smaller."""
        chances = [self.of_first, *[self.of_others] * (N_WORKERS - 1)]
        late = np.random.default_rng(seed).random((epochs, N_WORKERS)) < chances
        late[0] = False
        late[late.all(axis=1), -1] = False
        return np.asarray(late)


NOBODY = Lateness.of("0")


def exactly_once(orders: Orders, before: Orders, late: NDArray[np.bool_]) -> Orders:
    return orders


def left_out(orders: Orders, before: Orders, late: NDArray[np.bool_]) -> Orders:
    return [order for order, is_late in zip(orders, late, strict=True) if not is_late]


def old_samples(orders: Orders, before: Orders, late: NDArray[np.bool_]) -> Orders:
    return [old if is_late else new for new, old, is_late in zip(orders, before, late, strict=True)]


WAYS: dict[str, Callable[[Orders, Orders, NDArray[np.bool_]], Orders]] = {
    "exactly once": exactly_once,
    "left out": left_out,
    "old samples": old_samples,
}
"""Functions of the samples of this epoch and of the epoch before, and who is late, that return who trains on what."""

REFERENCE = "exactly once"


class LateSession:
    """A session in which some workers are late, for trainers that use ``map`` alone. ``late`` says who is, by epoch."""

    def __init__(self, session: Any, way: str, late: NDArray[np.bool_]) -> None:
        self._session, self._way, self._late = session, WAYS[way], late
        self.dataset = session.dataset
        self.untrained: list[float] = []
        self.repeated: list[float] = []

    def epochs(self, count: int) -> Iterator[Any]:
        """Yield the epochs, and note the shares of their samples that are not trained on, and more than once."""
        before: Orders = []
        for epoch in self._session.epochs(count):
            orders = self._way(epoch.orders, before or epoch.orders, self._late[epoch.number])
            times = np.bincount(np.concatenate(orders), minlength=sum(map(len, epoch.orders)))
            self.untrained.append(float(np.mean(times == 0)))
            self.repeated.append(float(np.mean(times > 1)))
            yield replace(epoch, orders=orders)
            before = epoch.orders


@dataclass(frozen=True, slots=True)
class Run:
    """After each epoch the error, and the shares of its samples that were not trained on, and more than once."""

    errors: tuple[float, ...]
    untrained: tuple[float, ...]
    repeated: tuple[float, ...]


@functools.cache
def least_squares() -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Rows and values of a noisy regression, and the least possible squared error."""
    x, y = (values.compute().astype(np.float64) for values in keyed_regression(2000, noise=0.3).values())
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    return x, y, float(np.mean((x @ best - y) ** 2))


@functools.cache
def least_squares_cluster() -> SimulatedCluster:
    x, y, _ = least_squares()
    dataset = dshuffle.create_dataset("memory://straggler-rows", {"x": x, "y": y}, overwrite=True)
    return SimulatedCluster.of(dataset, N_WORKERS)


def train_regression(session: LateSession, schedule: Schedule, epochs: int) -> list[float]:
    x, y, least = least_squares()
    fit = fit_linear_regression(
        session,  # type: ignore[arg-type]  # all that this trainer uses
        epochs=epochs,
        step=0.3,
        schedule=schedule,
        validate=lambda weights: {"loss": np.mean((x @ weights - y) ** 2) - least},
    )
    return [point.validation["loss"] for point in fit.points]


@functools.cache
def digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels and labels in random order, the pixels centred by the mean of those that are trained on."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order] / 16, y[order]
    return x - x[:N_TRAIN].mean(axis=0), y


@functools.cache
def digits_cluster() -> SimulatedCluster:
    """The digits that are trained on, sorted by class."""
    x, y = digits()
    by_class = np.argsort(y[:N_TRAIN], kind="stable")
    arrays = {"x": x[:N_TRAIN][by_class], "y": y[:N_TRAIN][by_class]}
    dataset = dshuffle.create_dataset("memory://straggler-digits", arrays, overwrite=True)
    return SimulatedCluster.of(dataset, N_WORKERS)


def train_softmax(session: LateSession, schedule: Schedule, epochs: int) -> list[float]:
    x, y = (values[N_TRAIN:] for values in digits())
    classes = np.arange(10)
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.1, alpha=1e-4, shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit = fit_parallel_sgd(
            session,  # type: ignore[arg-type]  # all that this trainer uses
            model,
            epochs=epochs,
            classes=classes,
            schedule=schedule,
            validate=lambda fitted: {"loss": log_loss(y, fitted.predict_proba(x), labels=classes)},
        )
    return [point.validation["loss"] for point in fit.points]


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained: its samples, the function that returns the error after each epoch, and a margin."""

    cluster: Callable[[], SimulatedCluster]
    train: Callable[[LateSession, Schedule, int], list[float]]
    margin: str


MODELS = {
    "regression": Model(least_squares_cluster, train_regression, "25%"),
    "softmax": Model(digits_cluster, train_softmax, "5%"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained in all ways: the model, its steps and the shuffle, and how often workers are late."""

    model: str
    steps: str
    choices: Choices
    epochs: int
    pairs: int
    lateness: Lateness

    def __str__(self) -> str:
        late = "one worker late in every epoch" if self.lateness.label == ALWAYS else f"late: {self.lateness.label}"
        return f"{self.model}, {self.steps} steps, {late}"

    @property
    def waits(self) -> float:
        """The share of epochs with a late worker, the first epoch left out."""
        return float(np.mean([self.lateness.draw(self.epochs, seed)[1:].any(axis=1) for seed in range(self.pairs)]))


@functools.cache
def run(case: Case, way: str, seed: int) -> Run:
    """Train once."""
    model = MODELS[case.model]
    schedules: dict[str, Schedule] = {"constant": CONSTANT, "falling": Linear(LAST_STEP, case.epochs)}
    session = model.cluster().session(replace(case.choices, seed=seed))
    late = LateSession(session, way, case.lateness.draw(case.epochs, seed))
    errors = model.train(late, schedules[case.steps], case.epochs)
    return Run(tuple(errors), tuple(late.untrained), tuple(late.repeated))


Results = dict[Case, dict[str, list[Run]]]
"""One run for each seed, by case and way."""


def runs_of(case: Case, way: str, seeds: Iterable[int]) -> list[Run]:
    """Train with some seeds. With exactly once, the errors do not depend on who is late."""
    return [run(replace(case, lateness=NOBODY) if way == REFERENCE else case, way, seed) for seed in seeds]


def tested(case: Case, runs: dict[str, list[Run]], way: str) -> PairedRuns:
    """Compare the last errors of a way with those of exactly once, in pairs."""
    return PairedRuns(
        test=PairedTest("loss", MODELS[case.model].margin, pairs=case.pairs),
        reference=tuple(one.errors[-1] for one in runs[REFERENCE]),
        way=tuple(one.errors[-1] for one in runs[way]),
    )


def spread(values: Sequence[float]) -> str:
    """Format mean, minimum and maximum."""
    return f"{np.mean(values):.3g} [{np.min(values):.3g}, {np.max(values):.3g}]"


def curves(case: Case, runs: dict[str, list[Run]]) -> Table:
    """Show the error after each epoch: the mean over the seeds, minimum and maximum."""
    table = Table("epoch", *WAYS, title=str(case), title_justify="left", box=box.SIMPLE_HEAD)
    for epoch in range(case.epochs):
        table.add_row(str(epoch + 1), *(spread([one.errors[epoch] for one in same]) for same in runs.values()))
    return table


def answers(found: Results) -> Table:
    """Show the shares and the answers. Differences are relative to the mean of exactly once."""
    headings = ("model, steps", "late", "waits", "way", "untrained", "repeated", "last error", "difference", "95 %")
    table = Table(
        *headings, "margin", "answer", title="Against exactly once", title_justify="left", box=box.SIMPLE_HEAD
    )
    for case, runs in found.items():
        for way, same in runs.items():
            waits = case.waits if way == REFERENCE else 0
            cells = [f"{case.model}, {case.steps}", case.lateness.label, f"{waits:.2f}", way]
            shares = np.array([[one.untrained, one.repeated] for one in same])[:, :, 1:]  # nobody is late in the first
            cells += [f"{share:.3f}" for share in shares.mean(axis=(0, 2))]
            cells.append(spread([one.errors[-1] for one in same]))
            if way != REFERENCE and same == runs[REFERENCE]:
                cells += ["", "", "", "equal"]
            elif way != REFERENCE:
                test = tested(case, runs, way)
                least, most = (100 * bound for bound in test.interval)  # fractions, as the margins are
                cells += [f"{100 * test.mean:+.1f} %", f"{least:+.1f} .. {most:+.1f} %"]
                cells += [MODELS[case.model].margin, test.outcome.value if test.outcome else ""]
            table.add_row(*cells)
    return table


def panel(case: Case, runs: dict[str, list[Run]]) -> Any:
    """Plot the mean error against the epochs, with a band from minimum to maximum."""
    plot = figure(title=str(case), x_axis_label="epochs", y_axis_label="error", y_axis_type="log", height=340)
    for (way, same), colour in zip(runs.items(), COLOURS, strict=True):
        errors, epochs = np.array([one.errors for one in same]), np.arange(1.0, case.epochs + 1)
        plot.varea(epochs, errors.min(0), errors.max(0), color=colour, alpha=0.15)
        plot.line(epochs, errors.mean(0), color=colour, line_width=2, legend_label=way)
    plot.add_layout(plot.legend[0], "below")
    plot.legend.orientation = "horizontal"
    return plot


def write(folder: Path, found: Results, text: str) -> None:
    """Write all points as CSV, and the plots as HTML."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "straggler.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "steps", "late", "way", "seed", "epoch", "error", "untrained", "repeated"])
        for case, runs in found.items():
            for way, same in runs.items():
                for seed, one in enumerate(same):
                    for epoch, point in enumerate(zip(one.errors, one.untrained, one.repeated, strict=True), 1):
                        numbers = [f"{number:.6g}" for number in point]
                        writer.writerow([case.model, case.steps, case.lateness.label, way, seed, epoch, *numbers])
    panels = [panel(case, runs) for case, runs in found.items()]
    (folder / "straggler.html").write_text(chart_page("Late workers", text, [("", panels)]), encoding="utf-8")


def parsed(context: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> list[Lateness]:
    return [Lateness.of(text) for text in dict.fromkeys(texts)]


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), default=list(MODELS))
@click.option(
    "--late",
    "latenesses",
    multiple=True,
    callback=parsed,
    default=["0", "0.05", "0.2", ALWAYS],
    show_default=True,
    help=f"Probability that a worker is late in an epoch, or {ALWAYS}: one worker is, in every epoch.",
)
@click.option("--epochs", type=click.IntRange(2), default=16, show_default=True)
@click.option("--pairs", type=int, default=20, show_default=True, help="Pairs of runs, with the seeds 0, 1, ...")
@click.option("--assignment", default="global", show_default=True, help="Who trains on what.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("straggler-study"), show_default=True)
def main(models: list[str], latenesses: list[Lateness], epochs: int, pairs: int, assignment: str, output: Path) -> None:
    """Compare going on without late workers, or with old samples, with waiting for them."""
    try:
        PairedTest("loss", pairs=pairs)
        choices = Choices(assignment)  # type: ignore[arg-type]  # a text is parsed
    except dshuffle.DShuffleError as error:
        raise click.UsageError(str(error)) from error
    steps = itertools.product(dict.fromkeys(models), ("constant", "falling"))
    cases = [Case(*both, choices, epochs, pairs, lateness) for both in steps for lateness in latenesses]
    text = f"{N_WORKERS} logical workers; {assignment}; {pairs} seeds (0 to {pairs - 1})."
    console = Console(width=170)
    console.print(text, highlight=False)
    console.print(f"The least possible squared error of the regression is {least_squares()[2]:.4f}.", highlight=False)
    found: Results = {}
    with threadpool_limits(1):  # the matrix products are too small for several threads
        for case in track(cases, "training"):
            found[case] = {way: runs_of(case, way, range(pairs)) for way in WAYS}
            write(output, found, text)  # what is done is kept if a later case is interrupted
        for case, runs in found.items():
            console.print(curves(case, runs))
        console.print(answers(found))
    console.print(f"wrote {output}/straggler.csv and straggler.html", highlight=False)


if __name__ == "__main__":
    main()
