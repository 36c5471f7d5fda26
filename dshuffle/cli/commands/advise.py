"""Arguments of ``dshuffle advise``."""

from __future__ import annotations

from typing import Any

import click

from dshuffle.cli.commands import work_of
from dshuffle.cli.options import assignment_option


def _list_profiles(ctx: click.Context, parameter: click.Parameter, chosen: bool) -> None:
    if chosen and not ctx.resilient_parsing:
        work_of("profiles").list_profiles()
        ctx.exit()


@click.command()
@click.argument("dataset", required=False)
@click.option("--samples", type=click.IntRange(1), help="Number of samples, if DATASET is omitted.")
@click.option(
    "--row-bytes",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Bytes per sample, if DATASET is omitted.",
)
@click.option(
    "--chunk-rows",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Samples per chunk, if DATASET is omitted.",
)
@click.option("--scheduler", metavar="ADDRESS", help="Measure the cluster of this running Dask scheduler.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, 20, min_open=True),
    default=12.0,
    show_default=True,
    help="Time limit of the measurement.",
)
@click.option("--workers", type=click.IntRange(1), help="Number of workers that train, if --scheduler is omitted.")
@click.option(
    "--profile",
    metavar="[FILE#]NAME",
    help="Rates of a real network and store. Other options override them.",
)
@click.option(
    "--list-profiles",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_profiles,
    help="List the profiles that come with dshuffle, and exit.",
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
@click.option(
    "--cache-fraction", type=float, help="Fraction of the dataset that each worker holds.  [default: 1/workers]"
)
@click.option("--training", "training_seconds", type=click.FloatRange(0), help="Seconds of training per epoch.")
@click.option(
    "--every", type=click.IntRange(1), default=1, show_default=True, help="Exchange for every K-th epoch only."
)
@click.option(
    "--egress-price",
    type=click.FloatRange(0),
    help="Price of a GB that leaves the store or the server, in any currency.",
)
@click.option("--worker-egress-price", type=click.FloatRange(0), help="Price of a GB that leaves a worker.")
@click.option("--request-price", type=click.FloatRange(0), help="Price of 1,000 requests to the store.")
@click.option("--epochs", type=click.IntRange(1), help="Number of epochs, to price a run. Needs a price.")
@assignment_option
@click.option(
    "--precision",
    type=click.Choice(["auto", "exact", "closed"]),
    default="auto",
    show_default=True,
    help="exact: real plans. closed: formulas only. auto: real plans for up to 64 workers, formulas beyond.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def advise(ctx: click.Context, /, **options: Any) -> None:
    """Predict the cost of each way of shuffling DATASET, and recommend one.

    DATASET may be omitted: --samples, --row-bytes and --chunk-rows describe it.

    With --scheduler, the cluster is measured: its links and its storage, for one worker alone and for all workers at
    once, and the load of the processors. The cluster should be idle. Without DATASET, the storage is not measured.

    Without --scheduler, nothing runs: --workers, and --profile or --bandwidth, describe a cluster. --bandwidth and
    --server-bandwidth are raw link rates; headers of TCP over Ethernet add 4.6 % to every message. Without a storage
    rate, deliveries that re-read storage are left out.

    The output ends with the recommended way, the reason, and what would change the recommendation.
    """
    work_of("advise").advise(ctx, **options)
