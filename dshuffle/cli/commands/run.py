"""Arguments of ``dshuffle run``."""

from __future__ import annotations

from typing import Any

import click

from dshuffle.cli.commands import work_of


@click.command()
@click.argument("target")
@click.argument("arguments", nargs=-1, metavar="[NAME=VALUE]...")
@click.option(
    "--scheduler", metavar="ADDRESS", help="Address of a running Dask scheduler, instead of the pipeline's own cluster."
)
@click.option(
    "--shares",
    metavar="SHARES",
    help="Samples of each worker in all ways: even, measured, or numbers, by rank (4,4,1) or by name (old-node=0.25).",
)
@click.option(
    "--workers",
    metavar="NAMES",
    help="Names or addresses of the workers that train, separated by commas.  [default: all, or those of the pipeline]",
)
@click.option(
    "--resources",
    metavar="NAME=AMOUNT",
    help="Dask resources that a worker must have to train, separated by commas, such as GPU=1.",
)
@click.option("--report", type=click.Path(file_okay=False), help="Folder for the report.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the records of all epochs, and what training reported after them, as JSON lines. The last line of a "
    "way has its metrics, and its pairs of runs.",
)
def run(**options: Any) -> None:
    """Run the pipeline TARGET.

    TARGET is FILE.py, FILE.py:NAME or MODULE:NAME. NAME is a dshuffle.Pipeline, or a function that returns one; by
    default "pipeline". Each NAME=VALUE is an argument of the function. VALUE is a JSON value or plain text.
    """
    work_of("run").run(**options)
