"""Compare ways of shuffling by how fast least squares approaches its optimum, on a year of flights in date order.

    pip install -e ".[studies]"
    python pipelines/real_data.py flights-one-hot flights.zarr
    python pipelines/flights_figure.py flights.zarr [--seeds 5] [--workers 20] [--output flights-figure]

The model predicts the delay of a flight from what its timetable says. Workers pass over their samples, and then their
weights are averaged. The ways are

    none          stored order, consecutive flights on each worker, no randomness
    local         the same flights on each worker, in a new order in every epoch
    partial 0.1   a tenth of the flights moves before every epoch
    once          one random partition, then as local
    global        a new random partition before every epoch

The excess of a model is its mean squared error relative to the least possible one, minus 1. Normal equations give the
least one. Each way trains with four first steps, which fall linearly, and is shown with the one that has the least mean
excess in the end. Workers are simulated in this process, one after the other, which gives the results of a cluster. The
script writes flights.csv, with all steps, and flights.html. Any dataset with the arrays x and y will do.

References
----------
Chung et al. (2017), Figure 8 (d); see docs/papers.md.
"""

from __future__ import annotations

import csv
import itertools
import statistics
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
from studies.scripts import chart_page
from studies.stored_order import StoredOrder

import dshuffle
from dshuffle.compare import SimulatedCluster, falling, stable_step
from dshuffle.planning import Choices, Global, Local, Partial
from dshuffle.training import fit_linear_regression
from dshuffle.units import human_count

FRACTIONS = (1, 1 / 4, 1 / 16, 1 / 64)
"""First steps, relative to a stable one for these rows."""

BLOCK = 1 << 14
"""Rows that are in memory as float64 at the same time."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way of shuffling, and its line in the figure, in Okabe and Ito's palette for colour-blind readers."""

    label: str
    choices: Choices
    colour: str
    dash: str = "solid"
    as_stored: bool = False


POLICIES = (
    Policy("none", Choices(Local(), sharding="contiguous"), "#D55E00", as_stored=True),
    Policy("local", Choices(Local(), sharding="contiguous"), "#E69F00"),
    Policy("partial 0.1", Choices(Partial(0.1), sharding="contiguous"), "#009E73"),
    Policy("once", Choices(Local()), "#CC79A7"),
    Policy("global", Choices(Global()), "#0072B2", "dashed"),
)


@dataclass(frozen=True, slots=True)
class Best:
    """The best first step of a way, and the excess after each epoch, ``(seeds, epochs)``."""

    policy: Policy
    step: float
    excess: NDArray[np.float64]


def least_error(dataset: dshuffle.Dataset) -> float:
    """Return the least ``||X w - y|| / ||y||`` of all weights."""
    width = dataset.arrays["x"].shape[0]
    products, moments, squares = np.zeros((width, width)), np.zeros(width), 0.0
    for first in range(0, dataset.n_samples, BLOCK):
        block = dataset.read_rows(np.arange(first, min(first + BLOCK, dataset.n_samples)))
        x, y = block["x"].astype(np.float64), block["y"].astype(np.float64)
        products += x.T @ x
        moments += x.T @ y
        squares += float(y @ y)
    best = np.linalg.lstsq(products, moments, rcond=None)[0]
    return float(np.sqrt(1 - moments @ best / squares))


def errors(cluster: SimulatedCluster, policy: Policy, seed: int, epochs: int, step: float) -> list[float]:
    """Train in one way; return ``||X w - y|| / ||y||`` after each epoch."""
    session: Any = cluster.session(replace(policy.choices, seed=seed))
    history = fit_linear_regression(
        StoredOrder(session) if policy.as_stored else session,  # type: ignore[arg-type]  # all that this trainer uses
        epochs=epochs,
        step=step,
        schedule=falling(epochs),
    )
    return [point.error for point in history.points]


def best_of(policy: Policy, steps: list[float], excess: NDArray[np.float64]) -> Best:
    """Choose the first step with the least mean excess in the end, of the excess ``(steps, seeds, epochs)``."""
    place = int(np.argmin(excess[:, :, -1].mean(axis=1)))
    return Best(policy, steps[place], excess[place])


def draw(found: list[Best]) -> Any:
    """Plot the mean excess over the seeds against epochs, with a band from minimum to maximum."""
    plot = figure(
        x_axis_label="epochs",
        y_axis_label="mean squared error above the least one, relative to it",
        y_axis_type="log",
        height=460,
    )
    for best in found:
        policy, excess = best.policy, best.excess
        x = 1.0 + np.arange(excess.shape[1])
        plot.varea(x, excess.min(axis=0), excess.max(axis=0), color=policy.colour, alpha=0.15)
        line: dict[str, Any] = {"color": policy.colour, "line_width": 2, "line_dash": policy.dash}
        plot.line(x, excess.mean(axis=0), legend_label=policy.label, **line)
    plot.add_layout(plot.legend[0], "below")
    plot.legend.orientation = "horizontal"
    return plot


def table(found: list[Best]) -> Table:
    """Tabulate mean and range over the seeds after the epochs 1, 2, 4, ... and the last one."""
    epochs = found[0].excess.shape[1]
    shown = sorted({2**power for power in range(epochs.bit_length())} | {epochs})
    headings = (f"after {epoch} epoch{'s' * (epoch > 1)}" for epoch in shown)
    result = Table("way", "first step", *headings, box=box.SIMPLE_HEAD)
    for best in found:
        cells = [spread(best.excess[:, epoch - 1].tolist()) for epoch in shown]
        result.add_row(best.policy.label, f"{best.step:.2g}", *cells)
    return result


def spread(values: list[float]) -> str:
    """Format mean, minimum and maximum in percent."""
    mean, least, most = (f"{100 * value:.2g}" for value in (statistics.fmean(values), min(values), max(values)))
    return f"{mean} [{least}, {most}] %"


def write(folder: Path, excess: NDArray[np.float64], steps: list[float], found: list[Best], title: str) -> None:
    """Write the excess ``(ways, steps, seeds, epochs)`` as CSV, and the plot as HTML."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "flights.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["way", "first_step", "seed", "epoch", "excess"])
        for (way, step, seed, epoch), value in np.ndenumerate(excess):
            writer.writerow([POLICIES[way].label, f"{steps[step]:.6g}", seed, epoch + 1, f"{value:.6g}"])
    page = chart_page("Least squares", title, [("", [draw(found)])])
    (folder / "flights.html").write_text(page, encoding="utf-8")


@click.command()
@click.argument("url")
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--epochs", type=click.IntRange(2), default=8, show_default=True)
@click.option("--workers", type=click.IntRange(2), default=20, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("flights-figure"), show_default=True)
def main(url: str, seeds: int, epochs: int, workers: int, output: Path) -> None:
    """Compare ways of shuffling on the dataset at URL."""
    try:
        dataset = dshuffle.open_dataset(url)
        steps = [fraction * stable_step(dataset) for fraction in FRACTIONS]
        least = least_error(dataset)
        cluster = SimulatedCluster.of(dataset, workers)
        cases = list(itertools.product(POLICIES, steps, range(seeds)))
        relative = [errors(cluster, policy, seed, epochs, step) for policy, step, seed in track(cases, "training")]
    except dshuffle.DShuffleError as error:
        raise click.ClickException(str(error)) from error
    excess = np.square(np.reshape(relative, (len(POLICIES), len(steps), seeds, epochs)) / least) - 1
    found = [best_of(policy, steps, of_way) for policy, of_way in zip(POLICIES, excess, strict=True)]
    title = (
        f"{human_count(dataset.n_samples)} rows with {dataset.arrays['x'].shape[0]} features; {workers} workers; the "
        f"least ||Xw - y|| / ||y|| is {least:.4f}; mean and range of seeds 0 to {seeds - 1}, each way with its best "
        f"first step of {', '.join(f'{step:.2g}' for step in steps)}."
    )
    console = Console(width=140)
    console.print(title, highlight=False)
    console.print(table(found))
    write(output, excess, steps, found, title)
    console.print(f"wrote {output}/flights.csv and flights.html", highlight=False)


if __name__ == "__main__":
    main()
