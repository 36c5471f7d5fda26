"""Arguments of ``dshuffle advise``."""

from __future__ import annotations

import importlib
from typing import Any

import click

from dshuffle.cli.options import assignment_option


@click.command()
@click.argument("dataset")
@click.option("--scheduler", metavar="ADDRESS", required=True, help="Address of the running Dask scheduler.")
@click.option(
    "--cache-fraction", type=float, help="Fraction of the dataset that each worker holds.  [default: 1/workers]"
)
@click.option("--training", "training_seconds", type=click.FloatRange(0), help="Seconds of training per epoch.")
@assignment_option
@click.option(
    "--seconds",
    type=click.FloatRange(0, 20, min_open=True),
    default=12.0,
    show_default=True,
    help="Time limit of the measurement.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def advise(**options: Any) -> None:
    """Measure a cluster, predict the cost of each way of shuffling DATASET on it, and recommend one.

    Links and storage are measured twice: for one worker alone, and for all workers at once. The load of the
    processors is measured as well. The output ends with the recommended way, the reason, and what would change the
    recommendation. The cluster should be idle.
    """
    importlib.import_module("dshuffle.cli.advise").advise(**options)
