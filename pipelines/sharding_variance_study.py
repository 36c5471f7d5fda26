"""Test whether systematic sharding reduces the variance of an asynchronous parameter server's results.

    python pipelines/sharding_variance_study.py [--runs 100] [--output sharding-variance]
    python pipelines/sharding_variance_study.py --quick

The script trains on the same data many times with each sharding, with different random shards and orders each time. It
compares the variances of the final loss and accuracy, on the training samples and on held-out samples: their ratio with
a 95 % bootstrap interval, and a Brown-Forsythe test. It prints a table with nulls beside effects, and writes
variances.csv, runs.csv (every run with its seed) and variances.html.

Runs are simulated in virtual time. The settings are softmax regression, 12 workers, mini-batches of 120 / 12, 10
epochs, and geometric speeds from 1 to 1 / ratio. The data have 2,400 training samples in 10 classes:

    classes         each class is one tight Gaussian in 2 dimensions
    hidden strata   each class is two of 20 tight Gaussians in 3 dimensions; samples are in random order
    stored strata   the same, but stored stratum by stratum
    rare strata     hidden strata, of which four have only eight samples; distribution-aware shards broadcast
                    those that k-means finds

With broadcast samples, an epoch has as many updates as without them, as in the paper. The paper's mini-batches of
128 / 12 samples are also rounded down to 10.

References
----------
Provatas et al. (2021), Tables II, IV and V; see docs/papers.md.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FactorRange, Range1d
from bokeh.models.annotations import Span, Whisker
from bokeh.plotting import figure
from bokeh.transform import jitter
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from studies.scripts import at_least, chart_page
from studies.variance import VarianceRatio, variance_ratio

import dshuffle
from dshuffle.compare import SimulatedCluster
from dshuffle.errors import ShardingWarning
from dshuffle.planning import Choices, Local, first_ranks
from dshuffle.sharding import Sharding, distribution_aware, stratified
from dshuffle.synthetic import gaussian_blobs
from dshuffle.training import SoftmaxRegression, fit_parameter_server

N_WORKERS, BATCH, N_CLASSES, SPREAD = 12, 120, 10, 0.1
RARE = 12  # samples of a rare stratum, of which a third are held out
COLOURS = {"random": "#8A8F98", "stratified": "#0072B2", "distribution-aware": "#D55E00"}
METRICS = ("loss", "accuracy", "validation loss", "validation accuracy")
Arrays = dict[str, NDArray[Any]]
Finals = dict[str, list[float]]
"""For each metric, its value after the last epoch of each run."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Data, ratio of the worker speeds, pace and step size."""

    data: str
    ratio: float
    pace: str
    step: float

    def __str__(self) -> str:
        return f"{self.data}, speeds 1:{self.ratio:g}, {self.pace}, step {self.step:g}"


def settings(step: float) -> list[Setting]:
    """List the main settings, then variations of pace, step and data."""
    main = [Setting("classes", ratio, "free", step) for ratio in (1, 2, 4, 10)]
    paces = [Setting("classes", ratio, "once", step) for ratio in (4, 10)]
    steps = [Setting("classes", 4, "free", factor * step) for factor in (0.5, 2, 4)]
    strata = [Setting("hidden strata", ratio, "free", step) for ratio in (1, 4)]
    others = [Setting(data, 4, "free", step) for data in ("stored strata", "rare strata")]
    return [*main, *paces, *steps, *strata, *others]


@functools.cache
def arrays_of(data: str, samples: int, *, held_out: bool = False) -> Arrays:
    """Draw tight Gaussians around standard normal centres; one third of the samples are held out."""
    total = samples + samples // 2
    blobs, dimensions = (N_CLASSES, 2) if data == "classes" else (2 * N_CLASSES, 3)
    # `separation` is the root mean square distance of two centres, in standard deviations of a blob.
    separation = np.sqrt(2 * dimensions) / SPREAD
    made = gaussian_blobs(total, n_features=dimensions, n_classes=blobs, separation=separation)
    x, y = made["x"].compute() * SPREAD, made["y"].compute()
    if data == "rare strata":
        _, rank = np.unique(y, return_inverse=True)
        kept = (rank >= 4) | (np.arange(total) % (total // blobs) < RARE)
        x, y = x[kept], y[kept]
        total = len(y)
    y = y % N_CLASSES
    if data in ("hidden strata", "rare strata"):
        # Shuffle, because dealing out consecutive samples of a class would deal out its strata evenly.
        order = np.random.default_rng(0).permutation(total)
        x, y = x[order], y[order]
    chosen = (np.arange(total) % 3 == 2) == held_out
    return {"x": x[chosen], "y": y[chosen]}


@functools.cache
def ranks_of(sharding: str, data: str, samples: int, seed: int) -> NDArray[np.int32] | Sharding:
    """Assign the samples to workers for one run."""
    arrays = arrays_of(data, samples)
    if sharding == "random":
        return first_ranks("random", len(arrays["y"]), N_WORKERS, seed=seed)
    if sharding == "stratified":
        return stratified(arrays["y"], N_WORKERS, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardingWarning)  # of samples that are broadcast
        clusters = 2 * N_CLASSES
        return distribution_aware(arrays["x"], n_workers=N_WORKERS, clusters=clusters, seed=seed, broadcast_cap=0.1)


def shardings_of(data: str) -> tuple[str, ...]:
    """List the shardings to compare; without strata, the neighbourhoods are the classes."""
    return ("random", "stratified") if data == "classes" else tuple(COLOURS)


def final_metrics(setting: Setting, sharding: str, seeds: range, samples: int, epochs: int) -> Finals:
    """Train once for each seed, and return the metrics after the last epoch."""
    model = SoftmaxRegression(N_CLASSES)
    trained_on, held_out = (arrays_of(setting.data, samples, held_out=held) for held in (False, True))
    dataset = dshuffle.create_dataset("memory://sharding-variance", trained_on, overwrite=True)
    cluster = SimulatedCluster.of(dataset, N_WORKERS)

    def validate(parameters: NDArray[np.floating[Any]]) -> dict[str, float]:
        def accuracy(arrays: Arrays) -> float:
            return float((model.predict(parameters, arrays["x"]) == arrays["y"]).mean())

        return {
            "accuracy": accuracy(trained_on),
            "validation loss": model.gradient(parameters, held_out["x"], held_out["y"])[1],
            "validation accuracy": accuracy(held_out),
        }

    finals: Finals = {name: [] for name in METRICS}
    for seed in seeds:
        history = fit_parameter_server(
            cluster.session(Choices(Local()), ranks_of(sharding, setting.data, samples, seed)),
            model,
            epochs=epochs,
            batch_size=BATCH,
            step=setting.step,
            pace=setting.pace,
            speeds=np.geomspace(1, 1 / setting.ratio, N_WORKERS).tolist(),
            seed=seed,
            validate=validate,
        )
        last = history.points[-1]
        for name, value in {"loss": last.error, **last.validation}.items():
            finals[name].append(value)
    return finals


def draw(found: dict[tuple[Setting, str], VarianceRatio], losses: dict[tuple[Setting, str], list[float]]) -> str:
    """Return a page of the ratios with their intervals, and the losses of all runs."""
    rows = [f"{setting}: {sharding}" for setting, sharding in found]
    plot = figure(
        x_axis_label="ratio (right of the line: systematic sharding scatters less)",
        x_axis_type="log",
        # Bokeh ignores whiskers in its default range, and few runs give unbounded whiskers.
        x_range=Range1d(
            start=max(0.05, 0.8 * min(one.low for one in found.values())),
            end=min(100, 1.2 * max(one.high for one in found.values())),
        ),
        y_range=FactorRange(factors=rows[::-1]),
        height=110 + 30 * len(rows),
    )
    plot.add_layout(Span(location=1, dimension="height", line_color="#404040", line_dash="dashed"))
    for name, colour in COLOURS.items():
        here = [(f"{setting}: {sharding}", one) for (setting, sharding), one in found.items() if sharding == name]
        if here:
            source = ColumnDataSource(
                {
                    "row": [row for row, _ in here],
                    "ratio": [one.ratio for _, one in here],
                    "low": [one.low for _, one in here],
                    "high": [one.high for _, one in here],
                }
            )
            plot.scatter("ratio", "row", source=source, color=colour, size=9)
            plot.add_layout(
                Whisker(base="row", lower="low", upper="high", source=source, dimension="width", line_color=colour)
            )
    heading = "Variance of the final loss: with random / with systematic shards, 95 % bootstrap intervals"
    sections = [(heading, [plot])]
    for data in dict.fromkeys(setting.data for setting, _ in losses):
        shown = {key: values for key, values in losses.items() if key[0].data == data}
        rows = [f"{str(setting).removeprefix(data + ', ')}: {sharding}" for setting, sharding in shown]
        runs = figure(
            x_axis_label="1000 x (loss - median)",
            y_range=FactorRange(factors=rows[::-1]),
            height=110 + 26 * len(rows),
        )
        for row, ((_, sharding), values) in zip(rows, shown.items(), strict=True):
            source = ColumnDataSource(
                {"loss": 1000 * (np.asarray(values) - np.median(values)), "row": [row] * len(values)}
            )
            where = jitter("row", width=0.5, range=runs.y_range)
            runs.scatter("loss", where, source=source, color=COLOURS[sharding], size=4, alpha=0.5)
        sections.append((f"{data}: final loss of every run, less the median of its row", [runs]))
    text = "Each run has random shards and orders of its own. A smaller variance means steadier results."
    return chart_page("Sharding and variance", text, sections)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def study(runs: int, first_seed: int, samples: int, epochs: int, step: float, output: Path) -> None:
    """Train, compare the variances, and print and write the results."""
    seeds = range(first_seed, first_seed + runs)
    cases = [(setting, sharding) for setting in settings(step) for sharding in shardings_of(setting.data)]
    # Shardings do not share seeds, so that their runs are independent.
    offsets = {sharding: 10_000_000 * number for number, sharding in enumerate(COLOURS)}

    def seeds_of(sharding: str) -> range:
        return range(seeds.start + offsets[sharding], seeds.stop + offsets[sharding])

    finals = {
        (setting, sharding): final_metrics(setting, sharding, seeds_of(sharding), samples, epochs)
        for setting, sharding in track(cases, "training")
    }
    found = {
        metric: {
            (setting, sharding): variance_ratio(finals[setting, "random"][metric], values[metric], seed=first_seed)
            for (setting, sharding), values in finals.items()
            if sharding != "random"
        }
        for metric in METRICS
    }
    rows: list[dict[str, object]] = []
    table = Table(
        *("setting, and sharding", "metric", "mean", "sd", "sd of random", "ratio", "95 %", "p", ""),
        box=box.SIMPLE_HEAD,
        title=f"{runs} runs each, seeds from {first_seed}; ratio: variance with random / with this sharding",
    )
    for (setting, sharding), metric in itertools.product(found["loss"], METRICS):
        one = found[metric][setting, sharding]
        mine, random = (np.asarray(finals[setting, name][metric]) for name in (sharding, "random"))
        deviations = mine.std(ddof=1), random.std(ddof=1)
        table.add_row(
            {"loss": str(setting), "accuracy": f"  {sharding}"}.get(metric, ""),
            metric,
            f"{mine.mean():.4f}",
            *(f"{deviation:.2g}" for deviation in deviations),
            f"{one.ratio:.1f}",
            f"[{one.low:.1f}, {one.high:.1f}]",
            f"{one.p_value:.1g}",
            one.verdict,
            end_section=metric == METRICS[-1],
        )
        rows.append(
            {
                "metric": metric,
                "data": setting.data,
                "speed_ratio": setting.ratio,
                "pace": setting.pace,
                "step": setting.step,
                "sharding": sharding,
                "runs": runs,
                "mean": mine.mean(),
                "sd": deviations[0],
                "sd_random": deviations[1],
                "variance_ratio": one.ratio,
                "low": one.low,
                "high": one.high,
                "p_value": one.p_value,
                "verdict": one.verdict,
            }
        )
    output.mkdir(parents=True, exist_ok=True)
    write(output / "variances.csv", rows)
    every = [
        {"setting": str(setting), "sharding": sharding, "seed": seed, **dict(zip(METRICS, values, strict=True))}
        for (setting, sharding), of_metric in finals.items()
        for seed, *values in zip(seeds_of(sharding), *(of_metric[name] for name in METRICS), strict=True)
    ]
    write(output / "runs.csv", every)
    losses = {case: of_metric["loss"] for case, of_metric in finals.items()}
    (output / "variances.html").write_text(draw(found["loss"], losses), encoding="utf-8")
    Console(width=150).print(table)
    print(f"wrote {output}/variances.csv, runs.csv and variances.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=at_least(1), default=100, help="runs of each sharding in each setting")
    parser.add_argument("--samples", type=at_least(1), default=2400)
    parser.add_argument("--epochs", type=at_least(1), default=10)
    parser.add_argument("--step", type=float, default=0.3, help="step size alpha of a single worker")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--output", type=Path, default=Path("sharding-variance"))
    parser.add_argument("--quick", action="store_true", help="3 runs of an epoch on 600 samples, to check that it runs")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.samples, options.epochs = 3, 600, 1
    study(options.runs, options.seed, options.samples, options.epochs, options.step, options.output)


if __name__ == "__main__":
    main()
