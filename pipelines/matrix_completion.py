"""Complete a matrix whose rows are shuffled between the workers before every epoch.

dshuffle dataset create ratings.zarr --movielens ratings.csv
python pipelines/matrix_completion.py ratings.zarr --entries-a-row 68
"""

from __future__ import annotations

import click

import dshuffle
from dshuffle.compare import connect
from dshuffle.training import Decay, fit_matrix_completion


def largest(partition: dshuffle.Partition, name: str) -> int:
    """Return the largest value of an array; runs as a task on each worker."""
    return int(partition[name].max())


@click.command()
@click.argument("url")
@click.option(
    "--entries-a-row", type=int, required=True, help="Entries per row of the matrix, which must be stored row by row."
)
@click.option("--scheduler", metavar="ADDRESS", help="Address of a running Dask scheduler, instead of a local cluster.")
@click.option("--workers", default=4, show_default=True, help="Number of workers of the local cluster.")
@click.option("--rank", default=10, show_default=True)
@click.option("--epochs", default=7, show_default=True)
@click.option("--step", default=0.05, show_default=True)
@click.option("--regularization", default=0.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(
    url: str,
    entries_a_row: int,
    scheduler: str | None,
    workers: int,
    rank: int,
    epochs: int,
    step: float,
    regularization: float,
    seed: int,
) -> None:
    """Fit row and column factors to the entries at URL; print the error after each epoch."""
    dataset = dshuffle.open_dataset(url)
    with (
        connect(scheduler, workers) as client,
        dshuffle.Shuffler(client, dataset, assignment=f"chunks:{entries_a_row}", seed=seed) as shuffler,
    ):
        extent = {"row": 0, "column": 0}
        # The shape of the matrix is not stored, so each worker reports the maximum over its share.
        epoch = next(shuffler.epochs(1))
        for name in extent:
            extent[name] = 1 + max(future.result() for future in epoch.map(largest, name))
        fit_matrix_completion(
            shuffler,
            n_rows=extent["row"],
            n_columns=extent["column"],
            rank=rank,
            epochs=epochs,
            step=step,
            regularization=regularization,
            seed=seed,
            schedule=Decay(0.9),
            on_epoch=lambda point: print(f"epoch {point.epoch}: error {point.error:.3e}, {point.seconds:.2f} s"),
        )


if __name__ == "__main__":
    main()
