"""``dshuffle simulate``: what every way of shuffling would cost on a cluster that one does not have."""

from __future__ import annotations

import dataclasses
import math

import click

from dshuffle.cli.output import assignment_option, show, ways_of
from dshuffle.cli.profiles import load_profile
from dshuffle.planning.cost import Cluster, Work, compare_costs, recommend
from dshuffle.units import parse_rate

HEADERS = 1.046
"""Bytes on a link for each byte of a message, over TCP and Ethernet with packets of 1,500 bytes."""


@click.command()
@click.option(
    "--profile",
    metavar="[FILE#]NAME",
    help="Rates of a real network and store; other options go before its own.",
)
@click.option("--workers", type=click.IntRange(1), required=True, help="Workers that train.")
@click.option("--samples", type=click.IntRange(1), required=True, help="Samples of the dataset.")
@click.option("--row-bytes", type=click.IntRange(1), default=1024, show_default=True, help="Bytes of a sample.")
@click.option("--chunk-rows", type=click.IntRange(1), default=64, show_default=True, help="Samples of a chunk.")
@click.option("--cache-fraction", type=float, help="Fraction of the dataset that a worker holds.  [default: 1/workers]")
@click.option("--bandwidth", metavar="RATE", help="Of a worker's link each way, such as 100mbit or 1.25GB/s.")
@click.option(
    "--server-bandwidth",
    metavar="RATE",
    help="Out of a server of its own.  [default: the first worker serves beside training]",
)
@click.option("--storage-bandwidth", metavar="RATE", help="Of the storage, for all workers together.")
@click.option("--storage-client-bandwidth", metavar="RATE", help="Of the storage, for one worker alone.")
@click.option("--request-seconds", type=click.FloatRange(0), help="From a request to its first byte.")
@click.option("--local-storage", is_flag=True, help="What workers read does not come over their links.")
@click.option("--rack-workers", type=click.IntRange(1), help="Workers of a rack.  [default: no racks]")
@click.option("--oversubscription", type=click.FloatRange(1), default=1.0, show_default=True, help="Of racks' uplinks.")
@click.option("--cores", type=click.IntRange(1), default=1, show_default=True, help="Processors of a machine.")
@click.option("--machine-workers", type=click.IntRange(1), default=1, show_default=True, help="Workers on a machine.")
@click.option("--training", "training_seconds", type=click.FloatRange(0), help="Seconds of an epoch's training.")
@assignment_option
@click.option(
    "--precision",
    type=click.Choice(["auto", "exact", "closed"]),
    default="auto",
    show_default=True,
    help="exact: count real plans; closed: formulas alone; auto: real plans for up to 64 workers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(
    profile: str | None,
    workers: int,
    samples: int,
    row_bytes: int,
    chunk_rows: int,
    cache_fraction: float | None,
    bandwidth: str | None,
    server_bandwidth: str | None,
    storage_bandwidth: str | None,
    storage_client_bandwidth: str | None,
    request_seconds: float | None,
    local_storage: bool,
    rack_workers: int | None,
    oversubscription: float,
    cores: int,
    machine_workers: int,
    training_seconds: float | None,
    assignments: tuple[str, ...],
    precision: str,
    as_json: bool,
) -> None:
    """Predict an epoch of every way of shuffling, and say which to take, why, and what would change that.

    Rates come from --profile or from the options. Those of --bandwidth and --server-bandwidth are of a link with its
    headers, of which TCP over Ethernet takes 4.6 %. Without a storage rate nothing is read again.
    """
    loaded = load_profile(profile) if profile is not None else None
    known = loaded.rates if loaded is not None else {}

    def link(option: str, given: str | None, key: str) -> float | None:
        return known.get(key) if given is None else parse_rate(option, given) / HEADERS

    def rate(option: str, given: str | None, key: str) -> float | None:
        return known.get(key) if given is None else parse_rate(option, given)

    up = link("bandwidth", bandwidth, "link_up_bytes_per_second")
    down = link("bandwidth", bandwidth, "link_down_bytes_per_second")
    if up is None or down is None:
        raise click.UsageError("--bandwidth or --profile is needed: how fast are the workers' links?")
    cluster = Cluster(
        n_workers=workers,
        link_up=up,
        link_down=down,
        server_up=link("server-bandwidth", server_bandwidth, "server_up_bytes_per_second"),
        storage=rate("storage-bandwidth", storage_bandwidth, "storage_bytes_per_second"),
        storage_client=rate("storage-client-bandwidth", storage_client_bandwidth, "storage_client_bytes_per_second"),
        storage_connection=known.get("storage_connection_bytes_per_second"),
        storage_requests=known.get("storage_requests_per_second", math.inf),
        request_seconds=known.get("storage_request_seconds", 0.0) if request_seconds is None else request_seconds,
        storage_over_links=not local_storage,
        rack_workers=rack_workers,
        oversubscription=oversubscription,
        cores=cores,
        machine_workers=machine_workers,
        wire_overhead=0.0,
    )
    work = Work(samples, row_bytes, cache_fraction, chunk_rows, training_seconds=training_seconds)
    ways = ways_of(cluster, work, assignments)
    advice = recommend(cluster, ways, precision=precision)
    predictions = compare_costs(cluster, ways, precision=precision)
    if loaded is not None and not as_json:
        click.echo(f"{loaded.name}: {loaded.description}\n")
    facts = {"profile": dataclasses.asdict(loaded) if loaded is not None else None}
    show(cluster, predictions, advice, as_json=as_json, facts=facts)
