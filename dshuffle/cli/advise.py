"""``dshuffle advise``: recommend a way of shuffling on a cluster that is measured or described."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any

import click

from dshuffle.cli.described_cluster import described_cluster
from dshuffle.cli.option_names import first_option
from dshuffle.cli.output import COLUMNS, show, ways_of
from dshuffle.cli.profiles import load_profile
from dshuffle.compare.local_cluster import connect
from dshuffle.planning import Choices
from dshuffle.planning.cost import Bill, Prices, Work, compare_costs, recommend
from dshuffle.report.progress import Advance, progress_bar
from dshuffle.runtime.dataset_inputs import unit_rows
from dshuffle.runtime.measure.measurement import BUSY, Measurement, measure_cluster
from dshuffle.store import Dataset, open_dataset
from dshuffle.units import human_rate, human_seconds

STEPS = 3
"""Steps that the progress bar shows if the cluster is measured: connecting, measuring, predicting."""


def advise(
    ctx: click.Context,
    /,
    dataset: str | None,
    scheduler: str | None,
    seconds: float,
    samples: int | None,
    row_bytes: int,
    chunk_rows: int,
    cache_fraction: float | None,
    every: int,
    egress_price: float | None,
    worker_egress_price: float | None,
    request_price: float | None,
    epochs: int | None,
    training_seconds: float | None,
    assignments: tuple[str, ...],
    precision: str,
    as_json: bool,
    profile: str | None,
    **description: Any,
) -> None:
    """Measure or describe the cluster, predict and recommend."""
    _check(ctx, dataset, samples, scheduler, profile, description)
    prices = None
    if (egress_price, worker_egress_price, request_price) != (None, None, None):
        prices = Prices(egress_price or 0.0, worker_egress_price or 0.0, request_price or 0.0)
    elif epochs is not None:
        raise click.UsageError("--epochs needs --egress-price, --worker-egress-price or --request-price.")
    data = None if dataset is None else open_dataset(dataset)
    if data is not None:
        samples, row_bytes, chunk_rows = data.n_samples, data.row_nbytes, unit_rows(data)
    assert samples is not None
    work = Work(samples, row_bytes, Choices(cache_fraction=cache_fraction, every=every), chunk_rows, training_seconds)
    facts: dict[str, Any]
    with progress_bar() as advance:
        if scheduler is None:
            rates = None if profile is None else load_profile(profile)
            cluster = described_cluster(rates, **description)
            facts = {"profile": rates and dataclasses.asdict(rates)}
            text = rates and f"{rates.name}: {rates.description}"
        else:
            measured = _measure(scheduler, data, row_bytes, seconds, advance)
            cluster = measured.cluster
            facts = {"measured": {k: v for k, v in dataclasses.asdict(measured).items() if k != "cluster"}}
            text = _of_measurement(measured)
        advance(2 if scheduler else 0, STEPS if scheduler else 1, "predicting; the first run compiles code")
        ways = ways_of(cluster, work, assignments)
        advice = recommend(cluster, ways, precision=precision)
        predictions = compare_costs(cluster, ways, precision=precision)
    if text and not as_json:
        wrapper = textwrap.TextWrapper(COLUMNS, break_long_words=False, break_on_hyphens=False)
        click.echo("\n".join(map(wrapper.fill, text.splitlines())) + "\n")
    bills = None if prices is None else [Bill.of(prices, p, cluster, epochs) for p in predictions]
    show(cluster, predictions, advice, as_json=as_json, facts=facts, bills=bills)


def _check(
    ctx: click.Context,
    dataset: str | None,
    samples: int | None,
    scheduler: str | None,
    profile: str | None,
    description: Mapping[str, Any],
) -> None:
    """Reject options that do not belong together: samples are in a dataset or counted, rates measured or described."""
    if dataset is not None and (option := first_option(ctx, ("samples", "row_bytes", "chunk_rows"))):
        raise click.UsageError(f"{option} cannot be used with DATASET, which has its own.")
    if scheduler is not None and (option := first_option(ctx, ("profile", *description))):
        raise click.UsageError(f"{option} cannot be used with --scheduler, whose cluster is measured.")
    if scheduler is None:
        if description["workers"] is None or (profile is None and description["bandwidth"] is None):
            raise click.UsageError(
                "Name a cluster to measure with --scheduler, or describe one with --workers and either --bandwidth or "
                "--profile."
            )
        if option := first_option(ctx, ("seconds",)):
            raise click.UsageError(f"{option} needs --scheduler: a cluster that is described is not measured.")
    if dataset is None and samples is None:
        raise click.UsageError("DATASET or --samples is required.")


def _measure(address: str, data: Dataset | None, row_nbytes: int, seconds: float, advance: Advance) -> Measurement:
    advance(0, STEPS, f"connecting to {address}")
    with connect(address, 0) as client:
        advance(1, STEPS, f"measuring for up to {seconds:g} s")
        return measure_cluster(client, data, row_nbytes=row_nbytes, seconds=seconds)


def _of_measurement(measured: Measurement) -> str:
    """Say in lines of text what was measured."""
    cluster = measured.cluster
    lines = [
        f"Measured for {human_seconds(measured.seconds)} on {cluster.n_workers} workers.",
        f"Into a worker: {human_rate(measured.link_alone or None)} from one other worker, "
        f"{human_rate(measured.link_together)} while all workers exchange.",
    ]
    if measured.server is not None:
        lines.append(f"Out of the server: {human_rate(measured.server)}.")
    if measured.storage_alone is None:
        lines.append("The storage was not measured: that needs DATASET. Ways that read it again are left out.")
    else:
        lines.append(
            f"From the storage: {human_rate(measured.storage_alone)} to one worker, "
            f"{human_rate(measured.storage_together)} to all workers; "
            f"{human_seconds(cluster.request_seconds)} per request."
        )
    if measured.busy_before >= 0.25:
        lines.append(
            f"Processors were {100 * measured.busy_before:.0f} % busy before the measurement. "
            "Measure again when they are idle."
        )
    for busy, work in ((measured.busy_network, "exchanged samples"), (measured.busy_storage, "read chunks")):
        if busy is not None:
            limited = ", so they limited this rate" if busy >= BUSY else ""
            lines.append(f"Processors were {100 * busy:.0f} % busy while all workers {work}{limited}.")
    return "\n".join(lines)
