"""Arguments of ``dshuffle plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dshuffle.cli import options
from dshuffle.cli.commands import work_of
from dshuffle.cli.options import RegistryOption


@click.command()
@click.option("--samples", type=click.IntRange(1), required=True, help="Number of samples.")
@click.option("--workers", type=click.IntRange(1), required=True, help="Number of workers that train.")
@click.option(
    "--cache-fraction", type=float, help="Fraction of the dataset that each worker holds.  [default: 1/workers]"
)
@click.option("--assignment", default="global", show_default=True, cls=RegistryOption, names=options.assignments)
@click.option(
    "--caching",
    type=click.Choice(options.CACHINGS),
    default="uniform",
    show_default=True,
    help="Which excess samples workers keep.",
)
@click.option(
    "--delivery",
    "deliveries",
    multiple=True,
    cls=RegistryOption,
    names=options.deliveries,
    help="May be repeated.  [default: server and the coded deliveries that suit the cache fraction]",
)
@click.option("--row-bytes", type=click.IntRange(1), default=1024, show_default=True, help="Bytes per sample.")
@click.option(
    "--epochs", type=click.IntRange(1), default=1, show_default=True, help="Number of epochs; the last one is shown."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random choices.")
@click.option("--own-part", type=click.IntRange(0), metavar="RANK", help="Plan one worker's part of an epoch instead.")
@click.option("--epoch", type=click.IntRange(0), default=1, show_default=True, help="Epoch of --own-part.")
@click.option(
    "--ids", type=click.Path(dir_okay=False, path_type=Path), help="Write the rank's sample ids to this .npy file."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(**options: Any) -> None:
    """Count the packets of each delivery in one epoch, and compare them with a lower bound for any code."""
    work_of("plan").plan(**options)
