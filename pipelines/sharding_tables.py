"""Measure the time of sharding, and count sparse neighbourhoods with the accuracy that a training reaches with them.

    python pipelines/real_data.py mnist mnist.zarr
    python pipelines/sharding_tables.py mnist.zarr [--clusters 20 --clusters 30] [--runs 3]
    dshuffle dataset create blobs.zarr --synthetic classification --samples 50000 --features 3072
    python pipelines/sharding_tables.py blobs.zarr --epochs 0

The first table has the seconds in which samples in memory are assigned to workers: at random, stratified by label, and
distribution-aware with several numbers of neighbourhoods (clusters of k-means). Processor seconds are those of all
threads. They depend less on what else the machine does.

The second table has, for each run and number of neighbourhoods, how many are sparse, which means that they have at most
as many samples as there are workers, and their mean size. Their samples are broadcast: every worker trains on them.
Beside them is the accuracy on held-out samples of a softmax regression that an asynchronous parameter server trains, at
the pace `free`, in virtual time. An epoch has as many updates as without broadcast samples.

With --epochs 0, all samples are sharded and none are trained on: there is only the first table.

References
----------
Provatas et al. (2021), Figure 8 and Table III; see docs/papers.md.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dshuffle
from dshuffle.compare import SimulatedCluster
from dshuffle.errors import ShardingWarning
from dshuffle.planning import Choices, Local, first_ranks
from dshuffle.sharding import Sharding, distribution_aware, stratified
from dshuffle.training import SoftmaxRegression, accuracy_on, fit_parameter_server

FACTORS = (2, 3, 4)
"""Default numbers of neighbourhoods as multiples of the number of classes, those of the paper's Table III."""


@dataclass(frozen=True, slots=True)
class Run:
    """One sharding: its times, the sizes of its sparse neighbourhoods, and the metrics after the training.

    ``clusters`` is None unless the sharding is distribution-aware. ``metrics`` is empty without a training.
    """

    method: str
    clusters: int | None
    seconds: float
    processor_seconds: float
    sparse: NDArray[np.int64]
    metrics: dict[str, float]


def shard(
    method: str, clusters: int | None, rows: NDArray[Any], labels: NDArray[Any], workers: int, seed: int
) -> Sharding:
    """Assign the samples to workers."""
    if method == "distribution-aware":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardingWarning)  # of samples that are broadcast
            return distribution_aware(rows, n_workers=workers, clusters=clusters, seed=seed, broadcast_cap=1.0)
    if method == "stratified":
        ranks = stratified(labels, workers, seed=seed)
    else:
        ranks = first_ranks(method, len(rows), workers, seed=seed)
    return Sharding(ranks, workers, np.empty(0, dtype=np.int64))


def sparse_sizes(sharding: Sharding) -> NDArray[np.int64]:
    """Sizes of the neighbourhoods whose samples are broadcast."""
    sizes = sharding.neighbourhoods
    if sizes is None:
        return np.empty(0, dtype=np.int64)
    return sizes[(sizes > 0) & (sizes <= sharding.n_workers)]


def study(
    train: dshuffle.Dataset,
    test: dshuffle.Dataset | None,
    *,
    names: tuple[str, str],
    clusters: tuple[int, ...],
    workers: int,
    runs: int,
    first_seed: int,
    ratio: float,
    **options: Any,
) -> list[Run]:
    """Shard with every method, number of neighbourhoods and seed, and train if there are held-out samples."""
    features, target = names
    arrays = train.read_rows(np.arange(train.n_samples))
    rows, labels = arrays[features], arrays[target]
    classes = np.unique(labels)
    numbers = clusters or tuple(factor * len(classes) for factor in FACTORS)
    methods = [("random", None), ("stratified", None), *(("distribution-aware", number) for number in numbers)]
    model = SoftmaxRegression(int(classes.max()) + 1)
    validate = None if test is None else accuracy_on(test, model.predict, features=features, target=target)
    cluster = SimulatedCluster.of(train, workers)
    # What the first calls compile and load is not timed.
    stratified(labels, workers)
    distribution_aware(rows[:100], n_workers=1, clusters=2)
    found = []
    cases = list(itertools.product(methods, range(first_seed, first_seed + runs)))
    for (method, number), seed in track(cases, "sharding"):
        started = time.perf_counter(), time.process_time()
        made = shard(method, number, rows, labels, workers, seed)
        seconds = time.perf_counter() - started[0], time.process_time() - started[1]
        metrics: dict[str, float] = {}
        if validate is not None:
            history = fit_parameter_server(
                cluster.session(Choices(Local()), made),
                model,
                pace="free",
                speeds=np.geomspace(1, 1 / ratio, workers).tolist(),
                seed=seed,
                features=features,
                target=target,
                validate=validate,
                **options,
            )
            metrics = dict(history.points[-1].validation)
        found.append(Run(method, number, *seconds, sparse_sizes(made), metrics))
    return found


def by_method(found: list[Run]) -> dict[tuple[str, str], list[Run]]:
    """The runs of each method and number of neighbourhoods, which is empty for the other methods."""
    grouped: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in found:
        grouped[run.method, "" if run.clusters is None else f"{run.clusters}"].append(run)
    return grouped


def times(found: list[Run], title: str) -> Table:
    """The seconds of every method."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("sharding", "neighbourhoods", "mean seconds", "least", "most", "processor seconds"):
        table.add_column(heading, justify="left" if heading == "sharding" else "right")
    grouped = by_method(found)
    grouped["distribution-aware", "all"] = [run for run in found if run.clusters is not None]
    for (method, clusters), runs in grouped.items():
        seconds = [run.seconds for run in runs]
        processors = np.mean([run.processor_seconds for run in runs])
        cells = [f"{value:.3g}" for value in (np.mean(seconds), min(seconds), max(seconds), processors)]
        table.add_row(method, clusters, *cells)
    return table


def sparse_neighbourhoods(found: list[Run], title: str) -> Table:
    """The number and the mean size of the sparse neighbourhoods, and the accuracy, of every run."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("sharding", "neighbourhoods", "run", "sparse", "mean size", "accuracy"):
        table.add_column(heading, justify="left" if heading == "sharding" else "right")
    for (method, clusters), runs in by_method(found).items():
        for number, run in enumerate(runs, start=1):
            sparse = "" if run.clusters is None else f"{len(run.sparse)}"
            mean_size = f"{run.sparse.mean():.2f}" if len(run.sparse) else ""
            cells = (clusters, f"{number}", sparse, mean_size, f"{run.metrics['accuracy']:.4f}")
            table.add_row(method, *cells, end_section=run is runs[-1])
    return table


@click.command()
@click.argument("url")
@click.option("--clusters", type=click.IntRange(1), multiple=True, help="Neighbourhoods; may be repeated.")
@click.option("--workers", type=click.IntRange(1), default=12, show_default=True)
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Seeds of each sharding.")
@click.option("--epochs", type=click.IntRange(0), default=10, show_default=True, help="0 for the times alone.")
@click.option("--batch-size", type=click.IntRange(1), default=120, show_default=True, help="Of all workers together.")
@click.option("--step", default=0.1, show_default=True, help="Step of a single worker.")
@click.option("--ratio", type=click.FloatRange(1), default=4.0, show_default=True, help="Fastest / slowest worker.")
@click.option("--held-out", default=0.2, show_default=True, help="Fraction of the samples for the accuracy.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first run.")
@click.option("--features", default="x", show_default=True, help="Name of the array of features.")
@click.option("--labels", default="y", show_default=True, help="Name of the array of integer labels.")
def main(
    url: str,
    runs: int,
    epochs: int,
    held_out: float,
    workers: int,
    seed: int,
    features: str,
    labels: str,
    **options: Any,
) -> None:
    """Shard the dataset at URL in several ways, and print times and sparse neighbourhoods."""
    try:
        dataset = dshuffle.open_dataset(url)
        train, test = dataset.split(1 - held_out) if epochs else (dataset, None)
        given = options | {"runs": runs, "workers": workers, "first_seed": seed}
        found = study(train, test, names=(features, labels), epochs=epochs, **given)
    except dshuffle.DShuffleError as error:
        raise click.ClickException(str(error)) from error
    console = Console(width=110)
    about = f"{train.n_samples:,} samples, {workers} workers, {runs} run{'s' if runs > 1 else ''}"
    console.print(times(found, f"Times of sharding: {about}"))
    if test is not None:
        majority = found[0].metrics["accuracy_of_majority"]
        held = f"accuracy on {test.n_samples:,} others ({majority:.3f} for the most frequent label)"
        console.print(sparse_neighbourhoods(found, f"Sparse neighbourhoods: {about}; {held}"))


if __name__ == "__main__":
    main()
