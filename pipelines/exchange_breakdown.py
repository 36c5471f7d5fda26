"""What an epoch spends its time on as more of the samples are exchanged (Nguyen et al., IPDPS 2022, Figure 10).

    python pipelines/exchange_breakdown.py /mnt/shared/keyed.zarr [--scheduler ADDRESS] [--output exchange-breakdown]

Local shuffling, partial exchange of a growing fraction Q, and as the last bar a global shuffle that re-reads storage,
beside training of a linear regression. The paper trained networks on 512 GPUs and let all workers wait for one another
in every step; here they wait once an epoch, so exchange that training hides costs nothing but processor time. The
table shows median seconds: of tasks (the paper's forward, backward and update), of standing still for samples that came
from other workers (EXCHANGE) or from storage (I/O), and the rest. The report beside it has all figures.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

import dshuffle
from dshuffle.compare import Way, compare_ways, connect, modest_step
from dshuffle.report import figures, write_report
from dshuffle.units import human_seconds

FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)


def ways() -> list[Way]:
    """From the left of the figure to the right."""
    partial = [Way(f"partial {q:g}", f"partial:{q:g}", "peer", "random") for q in FRACTIONS]
    return [
        Way("local", "local", "peer", "random"),
        *partial,
        Way("global, peers", "global", "peer", "random"),
        Way("global, storage", "global", "storage", "random"),
    ]


@click.command()
@click.argument("url")
@click.option("--scheduler", metavar="ADDRESS", help="A running Dask scheduler, instead of a local cluster.")
@click.option("--workers", default=4, show_default=True, help="Workers of the local cluster.")
@click.option("--epochs", default=6, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("exchange-breakdown"), show_default=True)
def main(url: str, scheduler: str | None, workers: int, epochs: int, output: Path) -> None:
    """Train on the dataset at URL under a growing exchange; print and write where the time goes."""
    dataset = dshuffle.open_dataset(url)
    console = Console()
    with connect(scheduler, workers) as client, console.status("starting") as status:
        comparison = compare_ways(
            client,
            dataset,
            ways(),
            epochs=epochs,
            step=modest_step(dataset),
            command=f"python pipelines/exchange_breakdown.py {url}",
            on_epoch=lambda way, point: status.update(f"{way.label}: epoch {point.epoch}"),
        )
    table = Table(title="Seconds of an epoch", title_justify="left")
    for heading in ("way", "epoch", "training", "EXCHANGE", "I/O", "the rest"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way in comparison.ways:
        found = figures(way)
        waited, training = found.waited_seconds or 0.0, found.training_seconds or 0.0
        from_storage = way.delivery == "storage"
        rest = (found.epoch_seconds or 0.0) - training - waited
        seconds = (training, 0.0 if from_storage else waited, waited if from_storage else 0.0, max(0.0, rest))
        table.add_row(way.label, *map(human_seconds, (found.epoch_seconds, *seconds)))
    console.print(table)
    console.print(f"Report: {write_report(comparison, output)}", highlight=False)


if __name__ == "__main__":
    main()
