"""``dshuffle simulate``: predict the cost of each way of shuffling on a hypothetical cluster."""

from __future__ import annotations

import dataclasses
import math

import click

from dshuffle.cli.output import show, ways_of
from dshuffle.cli.profiles import load_profile
from dshuffle.planning import Choices
from dshuffle.planning.cost import Cluster, Work, compare_costs, recommend
from dshuffle.report.progress import progress_bar
from dshuffle.units import parse_rate

HEADERS = 1.046
"""Bytes on the link per byte of payload, for TCP over Ethernet with packets of 1,500 bytes."""


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
    """Predict the cost of each way and recommend one."""
    loaded = load_profile(profile) if profile is not None else None
    known = loaded.rates if loaded is not None else {}

    def link(option: str, given: str | None, key: str) -> float | None:
        return known.get(key) if given is None else parse_rate(option, given) / HEADERS

    def rate(option: str, given: str | None, key: str) -> float | None:
        return known.get(key) if given is None else parse_rate(option, given)

    up = link("bandwidth", bandwidth, "link_up_bytes_per_second")
    down = link("bandwidth", bandwidth, "link_down_bytes_per_second")
    if up is None or down is None:
        raise click.UsageError("--bandwidth or --profile is required; it gives the rate of the workers' links.")
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
    work = Work(samples, row_bytes, Choices(cache_fraction=cache_fraction), chunk_rows, training_seconds)
    ways = ways_of(cluster, work, assignments)
    with progress_bar() as advance:
        advance(0, 2, "predicting; the first run compiles code")
        advice = recommend(cluster, ways, precision=precision)
        advance(1, 2, "comparing costs")
        predictions = compare_costs(cluster, ways, precision=precision)
    if loaded is not None and not as_json:
        click.echo(f"{loaded.name}: {loaded.description}\n")
    facts = {"profile": dataclasses.asdict(loaded) if loaded is not None else None}
    show(cluster, predictions, advice, as_json=as_json, facts=facts)
