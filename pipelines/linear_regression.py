"""Train a linear regression on a dataset that is shuffled between the workers before every epoch.

python pipelines/linear_regression.py /data/keyed.zarr --epochs 5
python pipelines/linear_regression.py s3://bucket/keyed.zarr --scheduler tcp://head-node:8786
"""

from __future__ import annotations

import click

import dshuffle
from dshuffle.compare import connect, modest_step
from dshuffle.training import fit_linear_regression
from dshuffle.units import human_bytes, human_seconds


@click.command()
@click.argument("url")
@click.option("--scheduler", metavar="ADDRESS", help="Address of a running Dask scheduler, instead of a local cluster.")
@click.option("--workers", default=4, show_default=True, help="Number of workers of the local cluster.")
@click.option("--epochs", default=5, show_default=True)
@click.option("--assignment", default="global", show_default=True)
@click.option("--delivery", default="peer", show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--step", type=float, help="Step size of SGD.  [default: 0.02 / mean squared norm of a row]")
def main(
    url: str,
    scheduler: str | None,
    workers: int,
    epochs: int,
    assignment: str,
    delivery: str,
    seed: int,
    step: float | None,
) -> None:
    """Fit y = x @ weights on the dataset at URL; print the error and the record of each epoch."""
    dataset = dshuffle.open_dataset(url)
    with (
        connect(scheduler, workers) as client,
        dshuffle.Shuffler(client, dataset, assignment=assignment, delivery=delivery, seed=seed) as shuffler,
    ):
        fit_linear_regression(
            shuffler,
            epochs=epochs,
            step=modest_step(dataset) if step is None else step,
            on_epoch=lambda point: print(f"epoch {point.epoch}: error {point.error:.2e}, {point.seconds:.2f} s"),
        )
        for record in shuffler.records:
            print(
                f"epoch {record.epoch} ({record.delivery}): {record.needed:,} samples received, "
                f"{human_bytes(record.wire_bytes)} on the wire, {human_bytes(record.store_bytes)} from the store, "
                f"exchange {human_seconds(record.exchange_seconds)}, "
                f"training {human_seconds(record.training_seconds)}, waited {human_seconds(record.waited_seconds)}"
            )


if __name__ == "__main__":
    main()
