"""Train a softmax regression with asynchronous parameter servers and unequal workers, on random or stratified shards.

    dshuffle run pipelines/parameter_server.py url=classes.zarr classes=10 epochs=20 --report report
    python pipelines/parameter_server.py [--seeds 50] [--ratio 10]
    python pipelines/parameter_server.py --url mnist.zarr --seeds 16 --step 0.1 --held-out 0.1

The first command trains once, on a cluster. The others train with many seeds of shards and orders, with equal and with
unequal workers. They print mean and standard deviation of the results over the seeds, and the variance with random
shards divided by that with stratified shards, with a 95 % bootstrap interval. Without --url, the data are ten tight
classes in two dimensions, where stratified shards should scatter less if workers are unequal.

The many runs are simulated in virtual time, on workers of given speeds.

References
----------
Provatas et al. (2021), sections II and IV; see docs/papers.md.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from studies.variance import variance_ratio

import dshuffle
from dshuffle import Choices, Pipeline, Training, open_dataset
from dshuffle.compare import SimulatedCluster, Way
from dshuffle.pipeline import LocalWorkers
from dshuffle.planning import Local, first_ranks
from dshuffle.sharding import stratified
from dshuffle.synthetic import gaussian_blobs
from dshuffle.training import SoftmaxRegression, accuracy_on, fit_parameter_server

SPREAD = 0.1
"""Standard deviation of a class, if the centres of the classes are standard normal."""
SHARDS = ("random", "stratified")
METRICS = ("loss", "accuracy")
Results = dict[tuple[float, str], dict[str, list[float]]]
"""By ratio of the speeds and kind of shards: for each metric, its value after the last epoch with each seed."""


def pipeline(
    url: str,
    classes: int,
    workers: int = 4,
    epochs: int = 10,
    batch_size: int = 128,
    step: float = 0.1,
    seed: int = 0,
    held_out: float = 0.1,
) -> Pipeline:
    """Keep the first shards, of the arrays x and the labels y, in all epochs (Provatas et al., 2021, section IV).

    The samples of slow workers are used least.
    """
    dataset, test = open_dataset(url).split(1 - held_out)
    model = SoftmaxRegression(classes)
    options = {"batch_size": batch_size, "step": step, "validate": accuracy_on(test, model.predict)}
    return Pipeline(
        dataset,
        Training("parameter_server", epochs=epochs, model=model, pace="free", **options),
        shuffle=[Way(name, Choices(Local(), sharding=name, seed=seed)) for name in ("random", "stratified:y")],
        cluster=LocalWorkers(workers),
    )


def tight_classes(n_samples: int) -> dshuffle.Dataset:
    """Ten classes in two dimensions, in the memory of this process."""
    made = gaussian_blobs(n_samples, n_features=2, n_classes=10, separation=2 / SPREAD)
    arrays = {"x": made["x"].compute() * SPREAD, "y": made["y"].compute()}
    return dshuffle.create_dataset("memory://tight-classes", arrays, overwrite=True)


def results(
    train: dshuffle.Dataset, test: dshuffle.Dataset, seeds: int, ratios: list[float], workers: int, **options: Any
) -> Results:
    """Train once per seed with every ratio of speeds and both kinds of shards; return the final metrics."""
    arrays = train.read_rows(np.arange(train.n_samples))
    model = SoftmaxRegression(int(arrays["y"].max()) + 1)
    validate, cluster = accuracy_on(test, model.predict), SimulatedCluster.of(train, workers)

    def ranks(shards: str, seed: int) -> NDArray[np.int32]:
        if shards == "random":
            return first_ranks(shards, train.n_samples, workers, seed=seed)
        return stratified(arrays["y"], workers, seed=seed)

    # The two kinds of shards do not share seeds, so that their runs are independent.
    first_seed = {shards: place * seeds for place, shards in enumerate(SHARDS)}
    outcomes: Results = {(ratio, shards): defaultdict(list) for ratio in ratios for shards in SHARDS}
    runs = [(*setting, first_seed[setting[1]] + number) for setting in outcomes for number in range(seeds)]
    for ratio, shards, seed in track(runs, "training"):
        speeds = np.geomspace(1, 1 / ratio, workers).tolist()
        history = fit_parameter_server(
            cluster.session(Choices(Local()), ranks(shards, seed)),
            model,
            pace="free",
            speeds=speeds,
            seed=seed,
            validate=validate,
            **options,
        )
        last = history.points[-1]
        for name, value in {"loss": last.error, **last.validation}.items():
            outcomes[ratio, shards][name].append(value)
    return outcomes


def table(outcomes: Results, title: str) -> Table:
    """Means and standard deviations, and the ratios of the variances beside stratified shards."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in (
        "fastest / slowest worker",
        "shards",
        *METRICS,
        *(f"{name}: ratio of variances" for name in METRICS),
    ):
        made.add_column(heading, justify="left" if heading == "shards" else "right")
    for (ratio, shards), values in outcomes.items():
        cells = [f"{np.mean(values[name]):.4f} ± {np.std(values[name], ddof=1):.2g}" for name in METRICS]
        if shards != "random":
            for name in METRICS:
                variances = variance_ratio(outcomes[ratio, "random"][name], values[name])
                equal = np.isnan(variances.ratio)
                cells.append(
                    "all equal" if equal else f"{variances.ratio:.3g} [{variances.low:.3g}, {variances.high:.3g}]"
                )
        made.add_row(f"{ratio:g}", shards, *cells, end_section=shards != "random")
    return made


@click.command()
@click.option("--url", help="Dataset with features x and labels y.  [default: ten tight classes]")
@click.option("--seeds", type=click.IntRange(3), default=50, show_default=True, help="Runs of each kind.")
@click.option("--ratio", type=click.FloatRange(1), default=10.0, show_default=True, help="Fastest / slowest worker.")
@click.option("--workers", type=click.IntRange(1), default=12, show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True)
@click.option("--samples", type=click.IntRange(1), default=3000, show_default=True, help="Samples without --url.")
@click.option("--batch-size", type=click.IntRange(1), default=120, show_default=True, help="Of all workers together.")
@click.option("--step", default=0.3, show_default=True, help="Step of a single worker.")
@click.option("--held-out", default=0.2, show_default=True, help="Fraction of the samples for the accuracy.")
def main(
    url: str | None, seeds: int, ratio: float, samples: int, held_out: float, workers: int, **options: Any
) -> None:
    """Train with equal and unequal workers and many seeds, and compare the variances of the results."""
    try:
        dataset = tight_classes(samples) if url is None else open_dataset(url)
        train, test = dataset.split(1 - held_out)
        outcomes = results(train, test, seeds, sorted({1.0, ratio}), workers, **options)
    except dshuffle.DShuffleError as error:
        raise click.ClickException(str(error)) from error
    console = Console(width=140)
    console.print(table(outcomes, f"{workers} workers, {seeds} seeds each: mean ± standard deviation"))
    majority = outcomes[1.0, "random"]["accuracy_of_majority"][0]
    console.print(
        f"{train.n_samples:,} samples to train, {test.n_samples:,} held out. Accuracy of the most frequent label: "
        f"{majority:.3f}. Ratio of variances: random / stratified shards [95 %].",
        highlight=False,
    )


if __name__ == "__main__":
    main()
