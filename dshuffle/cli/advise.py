"""``dshuffle advise``: recommend a strategy on a cluster that is measured or described."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dshuffle
from dshuffle.cli.options import Command, first_given, loading, shared
from dshuffle.errors import InvalidParameter
from dshuffle.units import human_bytes, human_rate, human_ratio, human_seconds, parse_rate

if TYPE_CHECKING:
    from dshuffle.planning import Assignment
    from dshuffle.planning.cost import Bill, ClusterRates, Prediction, Recommendation
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
@shared("epochs", help="Number of epochs, to price a run. Needs --egress-price.")
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
    epochs: int | None,
    as_json: bool,
    **description: Any,
) -> None:
    """Predict the cost of each way of shuffling DATASET, and recommend one.

    DATASET may be omitted: --samples and --row-bytes describe it, in chunks of 64 samples.

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
    if epochs is not None and egress_price is None:
        raise click.UsageError("--epochs needs --egress-price.")
    with loading():
        from dshuffle.compare import connect
        from dshuffle.planning import Choices, Global, parse_assignment
        from dshuffle.planning.cost import ASSIGNMENTS, Bill, Work, all_ways, recommend
        from dshuffle.planning.delivery import coded_rate
        from dshuffle.planning.exchange_epochs import cache_capacity
        from dshuffle.report.progress import progress_bar
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
        predicted = {way.choices.assignment for way in ways}
        for name in assignment:
            if parse_assignment(name) not in predicted:
                needs = f"it needs a --cache-fraction above 1/{cluster.n_workers}"
                click.echo(f"“{name}” is left out: {needs}", err=True)
        advice = recommend(cluster, ways)
        bound = coded_rate(samples, cluster.n_workers, cache_capacity(cache_fraction, samples, cluster.n_workers))
    prices = [] if egress_price is None else [Bill.of(egress_price, p, cluster, epochs) for p in advice.predictions]
    if as_json:
        answer = as_object(cluster, advice) | {"lower_bound": bound} | facts
        for row, bill in zip(answer["ways"], prices, strict=bool(prices)):
            row |= bill.to_dict()
        click.echo(json.dumps(_finite(answer), allow_nan=False))
        return
    if text:
        wrapper = textwrap.TextWrapper(80, break_long_words=False, break_on_hyphens=False)
        click.echo("\n".join(map(wrapper.fill, text.splitlines())) + "\n")
    _show(advice, bound, prices)


def shipped() -> Path:
    """The path of the profiles that come with dshuffle: in a checkout, or in a wheel."""
    package = Path(str(dshuffle.__file__)).parent
    installed = package / "profiles.toml"
    return installed if installed.exists() else package.parent / "storage" / "profiles.toml"


def _profile(name: str) -> dict[str, Any]:
    """The profile of a ``NAME``, or of ``FILE#NAME`` from another file."""
    file, _, table = name.rpartition("#")
    path = Path(file) if file else shipped()
    try:
        profiles = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        hint = f"{path} cannot be read: {error}"
        raise InvalidParameter.of("profile", name, "a profile in a readable TOML file", hint) from error
    if table not in profiles:
        raise InvalidParameter.of("profile", name, f"one of {', '.join(sorted(profiles))}", f"They are in {path}.")
    if missing := RATES.keys() - profiles[table].keys():
        raise InvalidParameter.of("profile", name, f"a profile with the key {min(missing)!r}", f"Add it in {path}.")
    return {"description": table, **profiles[table], "name": name}


def _described(
    profile: str | None,
    workers: int,
    bandwidth: str | None,
    server_bandwidth: str | None,
    storage_bandwidth: str | None,
) -> tuple[ClusterRates, dict[str, Any], str]:
    """The cluster of a profile, or of a bandwidth, with the rates of the options; and what is said about it."""
    from dshuffle.planning.cost import ClusterRates

    entry = {} if profile is None else _profile(profile)
    rates = {field: float(entry[key]) for key, field in RATES.items() if entry}
    if bandwidth is not None:
        rates["link_up"] = rates["link_down"] = parse_rate("bandwidth", bandwidth) / HEADERS
    if server_bandwidth is not None:
        rates["server_up"] = parse_rate("server-bandwidth", server_bandwidth) / HEADERS
    if storage_bandwidth is not None:
        rates["storage"] = parse_rate("storage-bandwidth", storage_bandwidth)
    text = f"{profile}: {entry['description']}" if entry else ""
    return ClusterRates(n_workers=workers, wire_overhead=0.0, **rates), {"profile": entry or None}, text  # type: ignore[arg-type]


def _of_measurement(measured: Measurement) -> str:
    """Say in lines of text what was measured."""
    from dshuffle.runtime.measure.measurement import BUSY

    cluster, alone, together = measured.cluster, measured.link_alone or None, measured.link_together
    lines = [
        f"Measured for {human_seconds(measured.seconds)} on {cluster.n_workers} workers.",
        f"Into a worker: {human_rate(alone)} from one other worker, {human_rate(together)} while all workers exchange.",
    ]
    if measured.server is not None:
        lines.append(f"Out of the server: {human_rate(measured.server)}.")
    if measured.storage_alone is None:
        lines.append("The storage was not measured: that needs DATASET. Strategies that read it again are left out.")
    else:
        rates = f"{human_rate(measured.storage_alone)} to one worker, {human_rate(measured.storage_together)} to all"
        lines.append(f"From the storage: {rates} workers; {human_seconds(cluster.request_seconds)} per request.")
    if measured.busy_before >= 0.25:
        lines.append(f"Processors were {measured.busy_before:.0%} busy before. Measure again when they are idle.")
    for busy, work in ((measured.busy_network, "exchanged samples"), (measured.busy_storage, "read chunks")):
        if busy is not None and busy >= BUSY:
            lines.append(f"Processors were {busy:.0%} busy while all workers {work}, so they limited this rate.")
    return "\n".join(lines)


def as_object(cluster: ClusterRates, advice: Recommendation) -> dict[str, Any]:
    """The predictions and the recommendation as an object for JSON, in seconds and bytes."""
    rows = []
    for prediction in advice.predictions:
        row = {entry.name: getattr(prediction, entry.name) for entry in dataclasses.fields(prediction)}
        work = row.pop("work")
        job = {name: getattr(work, name) for name in ("n_samples", "row_nbytes", "chunk_rows", "training_seconds")}
        rows.append({"way": work.way, **job, **work.choices.to_dict(), **row, "resources": dict(prediction.resources)})
    recommended = {"way": advice.best, "instead": advice.instead, "whole_chunks": advice.whole_chunks}
    recommendation = {
        **{name: prediction and prediction.work.way for name, prediction in recommended.items()},
        **{"verdict": advice.verdict, "reason": advice.reason, "notes": list(advice.notes)},
        "changes": [
            {
                "what": change.what,
                "factor": change.factor,
                "way": change.winner.work.way,
                "exchange_seconds": change.winner.exchange_seconds,
            }
            for change in advice.changes
        ],
    }
    return {"cluster": dataclasses.asdict(cluster), "ways": rows, "recommendation": recommendation}


def _finite(value: Any) -> Any:
    """JSON has no infinity. An infinite rate is not a limit, so it is written as null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if value == math.inf else value


def _show(advice: Recommendation, bound: float, bills: Sequence[Bill]) -> None:
    """Print the predictions, the recommendation and the prices as text."""
    from rich.console import Console
    from rich.text import Text

    console, predictions = Console(highlight=False, markup=False), advice.predictions

    def is_extrapolated(prediction: Prediction) -> bool:
        return bool(prediction.needed) and not prediction.exact

    caption = (
        "Seconds and bytes of an epoch's exchange. egress: out of the server or the store. ingress: into the busiest "
        f"worker. With random caches and a global assignment, no code needs fewer than {bound:,.0f} packets on "
        "average (Chung et al., 2017, Theorem 2)."
    )
    if any(map(is_extrapolated, predictions)):
        caption += " ~ extrapolated from fewer workers."
    table = _table(caption, "seconds", "limited by", "packets", "egress", "ingress")
    by_rule: dict[Assignment, list[Prediction]] = {}
    # Assignments from the fastest on, and within each the ways from the fastest on.
    for p in sorted(predictions, key=lambda p: (p.exchange_seconds, str(p.work.choices.assignment))):
        by_rule.setdefault(p.work.choices.assignment, []).append(p)
    for rule, rows in by_rule.items():
        if rule.moves:
            table.add_row(Text(str(rule), "bold"))
        for p in rows:
            table.add_row(
                f" {p.work.choices.delivery_label}" if rule.moves else Text(str(rule), "bold"),
                "~" * is_extrapolated(p) + human_seconds(p.exchange_seconds),
                p.bottleneck or "-",
                f"{p.packets:,.0f}" if p.packets else "-",
                human_bytes(p.server_egress + p.storage_bytes or None),
                human_bytes(p.most_ingress or None),
            )
    console.print(table)
    lines = [advice.verdict, advice.reason, *advice.notes]
    if (load := predictions[0].load_seconds) is not None:
        lines.append(f"Loading the first partitions, for which every chunk is read once, takes {human_seconds(load)}.")
    lines.append("\nWhat would change this:")
    words = {"links": "workers' links", "server": "the server's link"}
    for change in advice.changes:
        by = human_ratio(max(change.factor, 1 / change.factor))
        what = f"  {words.get(change.what, change.what)} {by} times {'as fast' if change.factor >= 1 else 'slower'}"
        lines.append(f"{what}: {change.winner.work.way} ({human_seconds(change.winner.exchange_seconds)})")
    if not advice.changes:
        lines.append("  nothing: it stays the fastest global shuffle even if any one rate is 256 times higher or lower")
    for line in lines:
        console.print(line)
    if not bills:
        return
    caption = "In the currency of the price. first load: every chunk is read once. epoch: a later one. What a server "
    table = _table(
        caption + "reads is not included.", "first load", "epoch", *([] if bills[0].run is None else ["run"])
    )
    priced = sorted(zip(predictions, bills, strict=True), key=lambda pair: pair[1].epoch)
    for p, bill in priced:
        table.add_row(p.work.way, *(_amount(price) for price in (bill.load, bill.epoch, bill.run) if price is not None))
    console.print()
    console.print(table)
    shuffling = [pair for pair in priced if pair[0].work.choices.assignment.redraws_all]
    p, bill = min(shuffling, key=lambda pair: (pair[1].epoch, pair[0].exchange_seconds))
    console.print(f"Cheapest strategy to reshuffle everything: {p.work.way}, {_amount(bill.epoch)} an epoch.")


def _table(caption: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("strategy", no_wrap=True)
    for column in columns:
        left = column == "limited by"
        table.add_column(column, justify="left" if left else "right", no_wrap=not left)
    return table


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
