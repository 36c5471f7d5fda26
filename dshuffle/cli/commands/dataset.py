"""Arguments of ``dshuffle dataset``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dshuffle.cli.commands import work_of
from dshuffle.cli.option_names import NotingGroup
from dshuffle.cli.options import RARE_KEYS_NOISE, RARE_KEYS_ROWS, RARE_KEYS_SAMPLES, SHARDINGS, SYNTHETIC


@click.group(cls=NotingGroup)
def dataset() -> None:
    """Create, describe, shuffle, shard and verify datasets."""


@dataset.command()
@click.argument("url")
@click.option(
    "--from",
    "files",
    multiple=True,
    metavar="FILE",
    help=".npy, .npz, .parquet or a folder of these, or a Zarr array or group (path or URL). May be repeated.",
)
@click.option(
    "--array",
    "names",
    multiple=True,
    metavar="NAME",
    help="Array or column to include. May be repeated.  [default: all]",
)
@click.option("--from-folder", metavar="FOLDER", help="Folder with a folder of images for each class.")
@click.option(
    "--image-size",
    type=(click.IntRange(1), click.IntRange(1)),
    metavar="HEIGHT WIDTH",
    help="Size in pixels of all images. Others are scaled and cut.  [default: that of the files, which must be equal]",
)
@click.option("--grey", is_flag=True, help="One value for each pixel, even if some images are coloured.")
@click.option("--synthetic", type=click.Choice(list(SYNTHETIC)), help="Kind of dataset to generate.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    help=f"Number of samples.  [default: 100000; with rare-keys, {RARE_KEYS_SAMPLES}]",
)
@click.option(
    "--features",
    type=click.IntRange(1),
    help="Number of features. In a regression, three fifths of them are a one-hot key. With rare-keys, it is also the "
    f"number of keys.  [default: 100; with rare-keys, a key for every {RARE_KEYS_ROWS} samples]",
)
@click.option("--classes", type=click.IntRange(1), default=10, show_default=True, help="Number of classes.")
@click.option("--rows", type=click.IntRange(1), default=10_000, show_default=True, help="Rows of the matrix.")
@click.option("--columns", type=click.IntRange(1), default=1_000, show_default=True, help="Columns of the matrix.")
@click.option("--entries-per-row", type=click.IntRange(1), default=68, show_default=True, help="Samples per row.")
@click.option("--rank", type=click.IntRange(1), default=10, show_default=True, help="Rank of the matrix.")
@click.option(
    "--noise",
    type=click.FloatRange(0),
    help="Standard deviation of the noise added to the targets of a regression, or to the entries of the matrix. Both "
    f"have a standard deviation of 1.  [default: 0; with rare-keys, {RARE_KEYS_NOISE}]",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all random choices.")
@click.option("--chunk-rows", type=click.IntRange(1), help="Samples per chunk.  [default: chunks of about 4 MiB]")
@click.option("--shard-rows", type=click.IntRange(1), help="Samples per Zarr shard.  [default: no shards]")
@click.option("--overwrite", is_flag=True, help="Replace an existing dataset at URL.")
@click.pass_context
def create(ctx: click.Context, /, **options: Any) -> None:
    """Write a dataset to URL, from files or synthetic, without ever holding all of it in memory.

    Synthetic data are sorted, because shuffling matters most for sorted data: a linear regression by its key, a
    classification by class, the entries of a low-rank matrix by row. In "regression", keys are frequent, and one
    shuffle is enough. In "rare-keys" they are rare, and reshuffling pays.
    """
    work_of("dataset").create(ctx, **options)


@dataset.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def info(**options: Any) -> None:
    """Describe the dataset at URL: its arrays, samples and bytes."""
    work_of("dataset").info(**options)


@dataset.command()
@click.argument("url")
@click.option(
    "--by",
    type=click.Choice(SHARDINGS),
    default="stratified",
    show_default=True,
    help="How samples are assigned to workers.",
)
@click.option("--workers", type=click.IntRange(1), required=True, help="Number of workers that train.")
@click.option("--labels", metavar="NAME", help="Array of class labels, for the sharding and the table.")
@click.option(
    "--features", metavar="NAME", default="x", show_default=True, help="Array of features, for distribution-aware."
)
@click.option(
    "--clusters",
    type=click.IntRange(1),
    help="Number of neighbourhoods, for distribution-aware.  [default: twice the number of classes]",
)
@click.option(
    "--broadcast-cap",
    type=click.FloatRange(0, 1),
    default=0.05,
    show_default=True,
    help="Largest fraction of the dataset that may be broadcast, for distribution-aware.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all random choices.")
@click.option("--write", is_flag=True, help="Store the sharding beside the dataset, for Shuffler(sharding=NAME).")
@click.option("--name", help="Name of the stored sharding.  [default: BY-WORKERS, such as stratified-12]")
@click.option("--overwrite", is_flag=True, help="Replace a stored sharding of the same name.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a box plot of the classes to this HTML file.",
)
def shard(**options: Any) -> None:
    """Assign the samples of the dataset at URL to workers, and show how even the shards are.

    --by stratified gives every worker an equal part of every class. --by distribution-aware gives every worker an
    equal part of every neighbourhood of the feature space. With --write, Shuffler(sharding=NAME) starts from the
    result.
    """
    work_of("shard").shard(**options)


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
    work_of("dataset").shuffle(**options)


@dataset.command()
@click.argument("url")
def verify(**options: Any) -> None:
    """Read every chunk of the dataset at URL once, and list missing and corrupt chunks."""
    work_of("dataset").verify(**options)
