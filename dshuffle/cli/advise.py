"""What a cluster can do, and what is wrong with it: ``dshuffle advise``, ``dshuffle doctor``, ``dshuffle warmup``."""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dshuffle
from dshuffle.cli.options import Command, first_given, shared
from dshuffle.errors import InvalidParameter
from dshuffle.units import human_bytes, human_rate, human_ratio, human_seconds, parse_rate

if TYPE_CHECKING:
    from dshuffle.planning.cost import Bill, ClusterRates, Recommendation
    from dshuffle.runtime.measure.measurement import Measurement

SECONDS = 12.0
"""Time limit of a measurement."""

HEADERS = 1.046
"""Bytes on the link per byte of payload, for TCP over Ethernet with packets of 1,500 bytes."""

RATES = {
    "link_up_bytes_per_second": "link_up",
    "link_down_bytes_per_second": "link_down",
    "server_up_bytes_per_second": "server_up",
    "storage_bytes_per_second": "storage",
    "storage_client_bytes_per_second": "storage_client",
    "storage_connection_bytes_per_second": "storage_connection",
    "storage_request_seconds": "request_seconds",
    "storage_requests_per_second": "storage_requests",
}
"""Keys of a profile, and what they are of a cluster. Rates are payload rates, without headers."""

DESCRIPTION = ("profile", "workers", "bandwidth", "server_bandwidth", "storage_bandwidth")


@click.command(cls=Command)
@click.argument("dataset", required=False)
@shared("samples", "row-bytes", "scheduler", "workers")
@click.option(
    "--profile",
    metavar="[FILE#]NAME",
    help="Rates of a real network and store, from storage/profiles.toml or another file. Other options override them.",
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
@shared("cache-fraction", "assignment")
@click.option("--training", "training_seconds", type=click.FloatRange(0), help="Seconds of training per epoch.")
@click.option(
    "--egress-price",
    type=click.FloatRange(0),
    help="Price of a GB that leaves the store or the server, in any currency.",
)
@shared("json")
@click.pass_context
def advise(
    ctx: click.Context,
    /,
    dataset: str | None,
    samples: int | None,
    row_bytes: int,
    scheduler: str | None,
    cache_fraction: float | None,
    assignment: tuple[str, ...],
    training_seconds: float | None,
    egress_price: float | None,
    as_json: bool,
    **description: Any,
) -> None:
    """Recommend a strategy for a measured or described cluster.

    The cost of each way of shuffling DATASET is predicted. DATASET may be omitted: --samples and --row-bytes describe
    it, in chunks of 64 samples.

    With --scheduler, the cluster is measured: its links and its storage, for one worker alone and for all workers at
    once, and the load of the processors. The cluster should be idle. Without DATASET, the storage is not measured.

    Without --scheduler, nothing runs: --workers, and --profile or --bandwidth, describe a cluster. --bandwidth and
    --server-bandwidth are raw link rates; headers of TCP over Ethernet add 4.6 % to every message. Without a storage
    rate, deliveries that re-read storage are left out.

    Without --assignment, local, partial:0.1, global, aligned and chunks are predicted. global always is.

    The output ends with the recommended strategy, the reason, and what would change the recommendation. packets are
    rows, or several rows that were combined; below them is a lower bound for any code.
    """
    if dataset is not None and (option := first_given(ctx, "samples", "row_bytes")):
        raise click.UsageError(f"{option} cannot be used with DATASET, which has its own.")
    if scheduler is not None and (option := first_given(ctx, *DESCRIPTION)):
        raise click.UsageError(f"{option} cannot be used with --scheduler, whose cluster is measured.")
    if scheduler is None and not (description["workers"] and (description["profile"] or description["bandwidth"])):
        raise click.UsageError(
            "Name a cluster to measure with --scheduler, or describe one with --workers and either --bandwidth or "
            "--profile."
        )
    if dataset is None and samples is None:
        raise click.UsageError("DATASET or --samples is required.")
    from dshuffle.compare import connect
    from dshuffle.planning import Choices, Global, parse_assignment
    from dshuffle.planning.cost import ASSIGNMENTS, Bill, Work, all_ways, recommend
    from dshuffle.planning.delivery import coded_rate
    from dshuffle.planning.exchange_epochs import cache_capacity
    from dshuffle.report.progress import progress_bar
    from dshuffle.report.summary import finite
    from dshuffle.runtime.dataset_inputs import unit_rows
    from dshuffle.runtime.measure.measurement import measure_cluster
    from dshuffle.store import open_dataset

    data, chunk_rows = None if dataset is None else open_dataset(dataset), 64
    if data is not None:
        samples, row_bytes, chunk_rows = data.n_samples, data.row_nbytes, unit_rows(data)
    assert samples is not None
    work = Work(samples, row_bytes, Choices(cache_fraction=cache_fraction), chunk_rows, training_seconds)
    with progress_bar() as advance:
        if scheduler is None:
            cluster, facts, text = _described(**description)
        else:
            advance(0, 3, f"connecting to {scheduler}")
            with connect(scheduler, 0) as client:
                advance(1, 3, f"measuring for up to {SECONDS:g} s")
                measured = measure_cluster(client, data, row_nbytes=row_bytes, seconds=SECONDS)
            cluster, text = measured.cluster, _of_measurement(measured)
            facts = {"measured": {k: v for k, v in dataclasses.asdict(measured).items() if k != "cluster"}}
        advance(2 if scheduler else 0, 3 if scheduler else 1, "predicting; the first run compiles code")
        names = tuple(dict.fromkeys((*assignment, str(Global())))) if assignment else ASSIGNMENTS
        ways = all_ways(cluster, work, assignments=names)
        for name in {str(parse_assignment(name)) for name in assignment} - {
            str(way.choices.assignment) for way in ways
        }:
            click.echo(f"“{name}” is left out: it needs a --cache-fraction above 1/{cluster.n_workers}", err=True)
        advice = recommend(cluster, ways)
        bound = coded_rate(samples, cluster.n_workers, cache_capacity(cache_fraction, samples, cluster.n_workers))
    bills = [] if egress_price is None else [Bill.of(egress_price, p, cluster) for p in advice.predictions]
    if as_json:
        answer = as_object(cluster, advice) | {"lower_bound": bound} | facts
        for row, bill in zip(answer["ways"], bills, strict=bool(bills)):
            row |= bill.to_dict()
        click.echo(json.dumps(finite(answer), allow_nan=False))
        return
    for line in text.splitlines():
        click.echo(textwrap.fill(line, 80, break_long_words=False, break_on_hyphens=False))
    _show(advice, bound, bills)


def shipped() -> Path:
    """The path of the profiles that come with dshuffle: in a checkout, or in a wheel."""
    package = Path(str(dshuffle.__file__)).parent
    installed = package / "profiles.toml"
    return installed if installed.exists() else package.parent / "storage" / "profiles.toml"


def _profile(name: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The profile of a ``NAME``, or of ``FILE#NAME`` from another file, and its rates."""
    file, _, table = name.rpartition("#")
    path = Path(file) if file else shipped()
    try:
        entry = tomllib.loads(path.read_text())[table]
        return {"description": table, **entry, "name": name}, {rate: float(entry[key]) for key, rate in RATES.items()}
    except (OSError, ValueError, KeyError) as error:
        hint = (
            f"It must be in {path}, a TOML file with a table for each profile, which has the keys {', '.join(RATES)}."
        )
        raise InvalidParameter.because("profile", f"{name} cannot be read: {error}", hint) from error


def _described(
    profile: str | None,
    workers: int,
    bandwidth: str | None,
    server_bandwidth: str | None,
    storage_bandwidth: str | None,
) -> tuple[ClusterRates, dict[str, Any], str]:
    """The cluster of a profile, or of a bandwidth, with the rates of the options; and what is said about it."""
    from dshuffle.planning.cost import ClusterRates

    entry, rates = ({}, {}) if profile is None else _profile(profile)
    if bandwidth is not None:
        rates["link_up"] = rates["link_down"] = parse_rate("bandwidth", bandwidth) / HEADERS
    if server_bandwidth is not None:
        rates["server_up"] = parse_rate("server-bandwidth", server_bandwidth) / HEADERS
    if storage_bandwidth is not None:
        rates["storage"] = parse_rate("storage-bandwidth", storage_bandwidth)
    text = f"{profile}: {entry['description']}\n" if entry else ""
    return ClusterRates(n_workers=workers, wire_overhead=0.0, **rates), {"profile": entry or None}, text  # type: ignore[arg-type]


def _of_measurement(measured: Measurement) -> str:
    """Say in lines of text what was measured."""
    from dshuffle.runtime.measure.measurement import BUSY

    rates = {
        "Into a worker, from one other worker": measured.link_alone,
        "Into a worker, while all workers exchange": measured.link_together,
        "Out of the server": measured.server,
        "From the storage, to one worker": measured.storage_alone,
        "From the storage, to all workers": measured.storage_together,
    }
    lines = [f"Measured for {human_seconds(measured.seconds)} on {measured.cluster.n_workers} workers."]
    lines += [f"{name}: {human_rate(rate)}." for name, rate in rates.items() if rate]
    if measured.storage_alone is None:
        lines.append("The storage was not measured: that needs DATASET. Strategies that read it again are left out.")
    for busy, when, least in (
        (measured.busy_before, "before, so measure again when they are idle", 0.25),
        (measured.busy_network, "while all workers exchanged samples, so they limited this rate", BUSY),
        (measured.busy_storage, "while all workers read chunks, so they limited this rate", BUSY),
    ):
        if busy is not None and busy >= least:
            lines.append(f"Processors were {busy:.0%} busy {when}.")
    return "\n".join([*lines, "", ""])


def as_object(cluster: ClusterRates, advice: Recommendation) -> dict[str, Any]:
    """The predictions and the recommendation as an object for JSON, in seconds and bytes."""
    rows = []
    for prediction in advice.predictions:
        work = prediction.work
        job = {name: getattr(work, name) for name in ("n_samples", "row_nbytes", "chunk_rows", "training_seconds")}
        figures = {entry.name: getattr(prediction, entry.name) for entry in dataclasses.fields(prediction)[1:]}
        resources = dict(prediction.resources)
        rows.append({"way": work.way, **job, **work.choices.to_dict(), **figures, "resources": resources})
    recommended = {"way": advice.best, "instead": advice.instead, "whole_chunks": advice.whole_chunks}
    recommendation = {
        **{name: prediction and prediction.work.way for name, prediction in recommended.items()},
        **{name: getattr(advice, name) for name in ("verdict", "reason", "notes")},
        "changes": [
            {"what": what, "factor": factor, "way": winner.work.way, "exchange_seconds": winner.exchange_seconds}
            for what, factor, winner in advice.changes
        ],
    }
    return {"cluster": dataclasses.asdict(cluster), "ways": rows, "recommendation": recommendation}


def _show(advice: Recommendation, bound: float, bills: Sequence[Bill]) -> None:
    """Print the predictions, the recommendation and the prices as text."""
    from dshuffle.report.page import as_text

    lines = [
        "Seconds and bytes of an epoch's exchange; ~ extrapolated from fewer workers. egress: out of the server or the "
        "store. ingress: into the busiest worker. With random caches and a global assignment, no code needs fewer than "
        f"{bound:,.0f} packets on average (Chung et al., 2017, Theorem 2)."
    ]
    headings = ["seconds", "limited by", "packets", "egress", "ingress"]
    if bills:
        headings[1:3] = "price of load", "price of epoch"
        lines.append("Prices of loading every chunk once, and of a later epoch. What a server reads is not included.")
    rows: dict[str, list[str]] = {}
    for place, p in sorted(enumerate(advice.predictions), key=lambda one: one[1].exchange_seconds):
        traffic = human_bytes(p.server_egress + p.storage_bytes or None), human_bytes(p.most_ingress or None)
        middle = [p.bottleneck or "-", f"{p.packets:,.0f}" if p.packets else "-"]
        if bills:
            middle = [f"{price:.3g}" for price in (bills[place].load, bills[place].epoch)]
        rows[p.work.way] = ["~" * (not p.exact and p.needed > 0) + human_seconds(p.exchange_seconds), *middle, *traffic]
    click.echo(as_text(headings, rows, 80))
    lines += ["", advice.verdict, advice.reason, *advice.notes]
    if (load := advice.predictions[0].load_seconds) is not None:
        lines.append(f"Loading the first partitions, for which every chunk is read once, takes {human_seconds(load)}.")
    lines += ["", "What would change this:"]
    words = {"links": "workers' links", "server": "the server's link"}
    for what, factor, winner in advice.changes:
        by = human_ratio(max(factor, 1 / factor))
        change = f"  {words.get(what, what)} {by} times {'as fast' if factor >= 1 else 'slower'}"
        lines.append(f"{change}: {winner.work.way} ({human_seconds(winner.exchange_seconds)})")
    if not advice.changes:
        lines.append("  nothing: it stays the fastest global shuffle even if any one rate is 256 times higher or lower")
    for line in lines:
        click.echo(textwrap.fill(line, 80, break_on_hyphens=False))


@click.command(cls=Command)
@click.argument("dataset", required=False)
@shared("scheduler")
def doctor(dataset: str | None, scheduler: str | None) -> None:
    """Check a cluster: versions, clocks, limits, and the dataset.

    That is also open files, memory, and whether all workers see DATASET. With DATASET, also measure for some seconds
    how fast workers read it and exchange rows. Without --scheduler, a local cluster is started.

    Every finding says what to do. The exit code is 1 if there is an error.
    """
    from dshuffle.compare import connect
    from dshuffle.report.progress import progress_bar
    from dshuffle.runtime.measure.measurement import diagnose, of_links
    from dshuffle.store import open_dataset

    data = None if dataset is None else open_dataset(dataset)
    with progress_bar() as advance:
        advance(0, 1, f"connecting to {scheduler}" if scheduler else "starting a local cluster")
        with connect(scheduler, 2) as client:
            advance(0, 1, "asking all workers")
            findings = diagnose(client, data)
            if data is not None and not any(finding.is_error for finding in findings):
                advance(0, 1, "measuring links")
                findings.append(of_links(client, data))
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in findings:
        level = click.style(f"{finding.level:<8}", fg=colours[finding.level])
        click.echo(level + f"{finding.subject}: {finding.observation}")
        if finding.remedy:
            click.secho(" " * 8 + finding.remedy, bold=True)
    if any(finding.is_error for finding in findings):
        raise SystemExit(1)


@click.command(cls=Command)
def warmup() -> None:
    """Compile all kernels, so that no later process has to.

    The code is stored beside the installed modules, or in the folder that the environment variable NUMBA_CACHE_DIR
    names. Run this once when you build an image, or once in a home directory that all nodes share.
    """
    from dshuffle.compare import compile_kernels

    started = time.perf_counter()
    click.echo("compiling kernels", err=True)
    compile_kernels()
    where = os.environ.get("NUMBA_CACHE_DIR") or "beside the installed modules"
    click.echo(f"Kernels are compiled ({human_seconds(time.perf_counter() - started)}); the cache is {where}.")
