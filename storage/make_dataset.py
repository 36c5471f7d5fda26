"""Write a large synthetic dataset: a linear regression problem with rows sorted by a key.

    python storage/make_dataset.py /data/keyed.zarr --samples 10_000_000 --features 1000

Dask threads generate the rows block by block, so memory does not grow with the number of samples.
"""

from __future__ import annotations

import click
from dask.diagnostics.progress import ProgressBar

import dshuffle
from dshuffle.synthetic import keyed_regression
from dshuffle.units import human_bytes, human_count


@click.command()
@click.argument("url")
@click.option("--samples", type=int, default=1_000_000, show_default=True)
@click.option(
    "--features",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Number of features; three fifths encode the key.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--unsorted", is_flag=True, help="Write the rows in random order instead of sorted by key.")
@click.option("--chunk-rows", type=int, help="Samples per chunk.  [default: chunks of about 4 MiB]")
@click.option("--overwrite", is_flag=True, help="Replace an existing dataset at URL.")
def main(
    url: str, samples: int, features: int, seed: int, unsorted: bool, chunk_rows: int | None, overwrite: bool
) -> None:
    """Write the dataset to URL."""
    n_keys = max(1, features * 3 // 5)
    arrays = keyed_regression(samples, n_keys, features - n_keys, seed, sort=not unsorted)
    with ProgressBar():  # type: ignore[no-untyped-call]
        dataset = dshuffle.create_dataset(url, arrays, chunk_rows=chunk_rows, overwrite=overwrite)
    total = human_bytes(dataset.n_samples * dataset.row_nbytes)
    print(f"{human_count(dataset.n_samples)} samples, {total}: {dataset.url}")


if __name__ == "__main__":
    main()
