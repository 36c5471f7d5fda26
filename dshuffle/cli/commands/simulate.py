"""Arguments of ``dshuffle simulate``."""

from __future__ import annotations

import importlib
from typing import Any

import click

from dshuffle.cli.options import assignment_option


@click.command()
@click.option(
    "--profile",
    metavar="[FILE#]NAME",
    help="Rates of a real network and store. Other options override them.",
)
@click.option("--workers", type=click.IntRange(1), required=True, help="Number of workers that train.")
@click.option("--samples", type=click.IntRange(1), required=True, help="Number of samples.")
@click.option("--row-bytes", type=click.IntRange(1), default=1024, show_default=True, help="Bytes per sample.")
@click.option("--chunk-rows", type=click.IntRange(1), default=64, show_default=True, help="Samples per chunk.")
@click.option(
    "--cache-fraction", type=float, help="Fraction of the dataset that each worker holds.  [default: 1/workers]"
)
@click.option(
    "--bandwidth", metavar="RATE", help="Rate of a worker's link in each direction, such as 100mbit or 1.25GB/s."
)
@click.option(
    "--server-bandwidth",
    metavar="RATE",
    help="Rate of the link of a dedicated server.  [default: the first worker serves while it trains]",
)
@click.option("--storage-bandwidth", metavar="RATE", help="Rate of the storage for all workers together.")
@click.option("--storage-client-bandwidth", metavar="RATE", help="Rate of the storage for one worker.")
@click.option(
    "--request-seconds", type=click.FloatRange(0), help="Seconds from a storage request to the first byte received."
)
@click.option("--local-storage", is_flag=True, help="Workers read from storage without using their links.")
@click.option("--rack-workers", type=click.IntRange(1), help="Workers per rack.  [default: no racks]")
@click.option(
    "--oversubscription",
    type=click.FloatRange(1),
    default=1.0,
    show_default=True,
    help="Oversubscription of the racks' uplinks.",
)
@click.option("--cores", type=click.IntRange(1), default=1, show_default=True, help="Processors per machine.")
@click.option("--machine-workers", type=click.IntRange(1), default=1, show_default=True, help="Workers per machine.")
@click.option("--training", "training_seconds", type=click.FloatRange(0), help="Seconds of training per epoch.")
@assignment_option
@click.option(
    "--precision",
    type=click.Choice(["auto", "exact", "closed"]),
    default="auto",
    show_default=True,
    help="exact: real plans. closed: formulas only. auto: real plans for up to 64 workers, formulas beyond.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(**options: Any) -> None:
    """Predict the cost of each way of shuffling, and recommend one.

    The output ends with the recommended way, the reason, and what would change the recommendation. Rates come from
    --profile or from the options. --bandwidth and --server-bandwidth are raw link rates; headers of TCP over Ethernet
    add 4.6 % to every message. Without a storage rate, deliveries that re-read storage are left out.
    """
    importlib.import_module("dshuffle.cli.simulate").simulate(**options)
