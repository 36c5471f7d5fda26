"""Arguments of ``dshuffle shard``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click

from dshuffle.cli.options import SHARDINGS


@click.command()
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
    importlib.import_module("dshuffle.cli.shard").shard(**options)
