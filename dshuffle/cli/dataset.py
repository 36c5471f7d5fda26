"""``dshuffle dataset``: create, describe and verify datasets."""

from __future__ import annotations

import json
import math
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dshuffle.cli.progress import progress_bar
from dshuffle.report.units import human_bytes, human_count
from dshuffle.store import Dataset, create_dataset, open_dataset, verify_dataset
from dshuffle.training.datasets import keyed_regression


@click.group()
def dataset() -> None:
    """Create, describe and verify datasets."""


@dataset.command()
@click.argument("url")
@click.option("--synthetic", type=click.Choice(["regression"]), required=True, help="What to generate.")
@click.option("--samples", type=click.IntRange(1), default=100_000, show_default=True)
@click.option(
    "--features",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Three fifths are a one-hot key.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--chunk-rows", type=click.IntRange(1), help="Samples in a chunk.  [default: chunks of about 4 MiB]")
@click.option("--shard-rows", type=click.IntRange(1), help="Samples in a shard of chunks.  [default: no shards]")
@click.option("--overwrite", is_flag=True, help="Replace a dataset at URL.")
def create(
    url: str,
    synthetic: str,
    samples: int,
    features: int,
    seed: int,
    chunk_rows: int | None,
    shard_rows: int | None,
    overwrite: bool,
) -> None:
    """Write a synthetic dataset to URL: a linear regression whose rows are sorted by a key."""
    n_keys = max(1, features * 3 // 5)
    arrays = keyed_regression(samples, n_keys=n_keys, n_dense=features - n_keys, seed=seed)
    made = create_dataset(url, arrays, chunk_rows=chunk_rows, shard_rows=shard_rows, overwrite=overwrite)
    click.echo(
        f"wrote {human_count(made.n_samples)} samples of {human_bytes(made.row_nbytes)} "
        f"({human_bytes(made.n_samples * made.row_nbytes)}) to {made.url}"
    )


@dataset.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def info(url: str, as_json: bool) -> None:
    """Describe the dataset at URL: its arrays, samples and bytes."""
    found = open_dataset(url)
    description = _description(found)
    if as_json:
        click.echo(json.dumps(description))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("array", "dtype", "shape of a sample", "rows a chunk", "rows a shard", "bytes"):
        table.add_column(heading, justify="left" if heading in ("array", "dtype") else "right")
    for array in description["arrays"]:
        table.add_row(
            Text(array["name"]),
            Text(array["dtype"]),
            str(tuple(array["shape"])),
            human_count(array["chunk_rows"]),
            human_count(array["shard_rows"]) if array["shard_rows"] else "-",
            human_bytes(array["bytes"]),
        )
    click.echo(f"{found.url}: {human_count(found.n_samples)} samples of {human_bytes(found.row_nbytes)}")
    Console().print(table)


def _description(found: Dataset) -> dict[str, Any]:
    return {
        "url": found.url,
        "samples": found.n_samples,
        "row_nbytes": found.row_nbytes,
        "bytes": found.n_samples * found.row_nbytes,
        "arrays": [
            {
                "name": name,
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "chunk_rows": array.chunk_rows,
                "shard_rows": array.shard_rows,
                "bytes": found.n_samples * math.prod(array.shape) * array.dtype.itemsize,
            }
            for name, array in found.arrays.items()
        ],
    }


@dataset.command()
@click.argument("url")
def verify(url: str) -> None:
    """Read every chunk of the dataset at URL once; list those that are missing or corrupt."""
    found = open_dataset(url)
    with progress_bar() as advance:
        report = verify_dataset(found, progress=lambda done, total: advance(done, total, "reading chunks"))
    if report.bad:
        for message in report.bad:
            click.echo(message)
        raise click.ClickException(f"{len(report.bad)} of {report.n_chunks} chunks are bad")
    click.echo(f"{report.n_chunks} chunks, {human_bytes(report.bytes)}: all are good")
