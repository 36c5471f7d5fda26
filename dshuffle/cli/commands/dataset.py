"""Arguments of ``dshuffle dataset``."""

from __future__ import annotations

import importlib
from typing import Any

import click

from dshuffle.cli.option_names import NotingGroup
from dshuffle.cli.options import SYNTHETIC


@click.group(cls=NotingGroup)
def dataset() -> None:
    """Create, describe, verify and shuffle datasets."""


@dataset.command()
@click.argument("url")
@click.option(
    "--from",
    "files",
    multiple=True,
    metavar="FILE",
    help=".npy, .npz, .parquet, or a Zarr array or group (path or URL). May be repeated.",
)
@click.option(
    "--array",
    "names",
    multiple=True,
    metavar="NAME",
    help="Array or column to include. May be repeated.  [default: all]",
)
@click.option("--movielens", metavar="FILE", help="ratings.csv of MovieLens, stored as row, column and value.")
@click.option(
    "--ratings-per-user",
    type=click.IntRange(1),
    default=68,
    show_default=True,
    help="Ratings drawn at random from each user. Users with fewer are dropped.",
)
@click.option("--synthetic", type=click.Choice(list(SYNTHETIC)), help="Kind of dataset to generate.")
@click.option("--samples", type=click.IntRange(1), default=100_000, show_default=True, help="Number of samples.")
@click.option(
    "--features",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Number of features. In a regression, three fifths of them are a one-hot key.",
)
@click.option("--classes", type=click.IntRange(1), default=10, show_default=True, help="Number of classes.")
@click.option("--rows", type=click.IntRange(1), default=10_000, show_default=True, help="Rows of the matrix.")
@click.option("--columns", type=click.IntRange(1), default=1_000, show_default=True, help="Columns of the matrix.")
@click.option("--entries-per-row", type=click.IntRange(1), default=68, show_default=True, help="Samples per row.")
@click.option("--rank", type=click.IntRange(1), default=10, show_default=True, help="Rank of the matrix.")
@click.option(
    "--noise",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Standard deviation of the noise added to the entries, which have a standard deviation of 1.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all random choices.")
@click.option("--chunk-rows", type=click.IntRange(1), help="Samples per chunk.  [default: chunks of about 4 MiB]")
@click.option("--shard-rows", type=click.IntRange(1), help="Samples per Zarr shard.  [default: no shards]")
@click.option("--overwrite", is_flag=True, help="Replace an existing dataset at URL.")
@click.pass_context
def create(ctx: click.Context, /, **options: Any) -> None:
    """Write a dataset to URL, from files or synthetic, without ever holding all of it in memory.

    Synthetic data are sorted, because shuffling matters most for sorted data: a linear regression by its key, a
    classification by class, the entries of a low-rank matrix by row.
    """
    importlib.import_module("dshuffle.cli.dataset").create(ctx, **options)


@dataset.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def info(**options: Any) -> None:
    """Describe the dataset at URL: its arrays, samples and bytes."""
    importlib.import_module("dshuffle.cli.dataset").info(**options)


@dataset.command()
@click.argument("source")
@click.argument("url")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the order.")
@click.option("--by", metavar="ARRAY", help="Spread each value of this array evenly, for example each class.")
@click.option("--chunk-rows", type=click.IntRange(1), help="Samples per chunk.  [default: chunks of about 4 MiB]")
@click.option("--shard-rows", type=click.IntRange(1), help="Samples per Zarr shard.  [default: no shards]")
@click.option("--overwrite", is_flag=True, help="Replace an existing dataset at URL.")
@click.option("--memory", default="1 GiB", show_default=True, help="Memory to use.")
@click.option(
    "--temporary",
    metavar="FOLDER",
    help="Folder on a local disk. A run that was killed continues there.  [default: the system's]",
)
def shuffle(**options: Any) -> None:
    """Write the dataset SOURCE to URL with its samples in random order.

    Both may be larger than memory. A local disk needs room for all samples.
    """
    importlib.import_module("dshuffle.cli.dataset").shuffle(**options)


@dataset.command()
@click.argument("url")
def verify(**options: Any) -> None:
    """Read every chunk of the dataset at URL once, and list missing and corrupt chunks."""
    importlib.import_module("dshuffle.cli.dataset").verify(**options)
