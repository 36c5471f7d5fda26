"""Break down the time of an epoch as a larger fraction of the samples is exchanged.

    python pipelines/exchange_breakdown.py /mnt/shared/keyed.zarr [--scheduler ADDRESS] [--output exchange-breakdown]

The script trains a linear regression with local shuffling, with partial exchange of a growing fraction Q, and with
global shuffles that fetch samples from peers or from storage. The table shows median seconds: training tasks (forward,
backward and update in the paper), waiting for samples from other workers (EXCHANGE) or from storage (I/O), and the
other time of the epoch. The report has all figures.

Nguyen et al. trained networks on 512 GPUs, with a barrier in every step. Here workers wait for each other once an
epoch, so an exchange that overlaps with training costs only processor time.

References
----------
Nguyen et al. (2022), Figure 10; see docs/papers.md.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

import dshuffle
from dshuffle import Pipeline, Training
from dshuffle.compare import Way, stable_step
from dshuffle.pipeline import LocalWorkers, RunningScheduler
from dshuffle.planning import Choices, Global, Local, Partial
from dshuffle.units import human_seconds

FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)


def ways() -> list[Way]:
    """From the left of the figure to the right."""
    return [
        Way("local", Choices(Local())),
        *(Way(f"partial {q:g}", Choices(Partial(q))) for q in FRACTIONS),
        Way("global, peers", Choices(Global())),
        Way("global, storage", Choices(Global(), "storage")),
    ]


@click.command()
@click.argument("url")
@click.option("--scheduler", metavar="ADDRESS", help="Address of a running Dask scheduler, instead of a local cluster.")
@click.option("--workers", default=4, show_default=True, help="Number of workers of the local cluster.")
@click.option("--epochs", default=6, show_default=True)
@click.option("--features", default="x", show_default=True, help="Name of the 2-D array of features.")
@click.option("--target", default="y", show_default=True, help="Name of the 1-D array of targets.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("exchange-breakdown"), show_default=True)
def main(url: str, scheduler: str | None, workers: int, epochs: int, features: str, target: str, output: Path) -> None:
    """Train on the dataset at URL with a growing exchange; print and write the time of each phase."""
    try:
        dataset = dshuffle.open_dataset(url)
        step = stable_step(dataset, features=features, target=target)
    except dshuffle.DShuffleError as error:
        raise click.ClickException(str(error)) from error
    regression = Training("linear_regression", epochs=epochs, step=step, features=features, target=target)
    cluster = LocalWorkers(workers) if scheduler is None else RunningScheduler(scheduler)
    result = Pipeline(dataset, regression, ways(), cluster, report=str(output)).run()
    assert result.comparison is not None
    table = Table(title="Seconds per epoch", title_justify="left")
    for heading in ("way", "epoch", "training", "EXCHANGE", "I/O", "other"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way in result.comparison.ways:
        found = way.figures
        waited, training = found.waited_seconds or 0.0, found.training_seconds or 0.0
        from_storage = way.choices.reads_store
        rest = (found.epoch_seconds or 0.0) - training - waited
        seconds = (training, 0.0 if from_storage else waited, waited if from_storage else 0.0, max(0.0, rest))
        table.add_row(way.label, *map(human_seconds, (found.epoch_seconds, *seconds)))
    console = Console()
    console.print(table)
    console.print(f"Report: {result.report}", highlight=False)


if __name__ == "__main__":
    main()
