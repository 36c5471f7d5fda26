"""``dshuffle advise``: measure a cluster and recommend a way of shuffling a dataset on it."""

from __future__ import annotations

import dataclasses

import click

from dshuffle.cli.output import show, ways_of
from dshuffle.compare.local_cluster import connect
from dshuffle.planning import Choices
from dshuffle.planning.cost import Work, compare_costs, recommend
from dshuffle.report.progress import progress_bar
from dshuffle.runtime.dataset_inputs import unit_rows
from dshuffle.runtime.measure.probe import BUSY, Measurement, measure_cluster
from dshuffle.store import open_dataset
from dshuffle.units import human_rate, human_seconds


def advise(
    dataset: str,
    scheduler: str,
    cache_fraction: float | None,
    training_seconds: float | None,
    assignments: tuple[str, ...],
    seconds: float,
    as_json: bool,
) -> None:
    """Measure, predict and recommend."""
    data = open_dataset(dataset)
    with progress_bar() as advance:
        advance(0, 3, f"connecting to {scheduler}")
        with connect(scheduler, 0) as client:
            advance(1, 3, f"measuring for up to {seconds:g} s")
            measured = measure_cluster(client, data, seconds=seconds)
        advance(2, 3, "predicting")
        cluster = measured.cluster
        choices = Choices(cache_fraction=cache_fraction)
        work = Work(data.n_samples, data.row_nbytes, choices, unit_rows(data), training_seconds)
        ways = ways_of(cluster, work, assignments)
        advice = recommend(cluster, ways)
        predictions = compare_costs(cluster, ways)
    if not as_json:
        click.echo("\n".join(_lines(measured)) + "\n")
    facts = {"measured": {k: v for k, v in dataclasses.asdict(measured).items() if k != "cluster"}}
    show(cluster, predictions, advice, as_json=as_json, facts=facts)


def _lines(measured: Measurement) -> list[str]:
    """Format a measurement as lines of text."""
    cluster = measured.cluster
    lines = [
        f"Measured for {human_seconds(measured.seconds)} on {cluster.n_workers} workers.",
        f"Into a worker: {human_rate(measured.link_alone or None)} from one other worker, "
        f"{human_rate(measured.link_together)} while all workers exchange.",
    ]
    if measured.server is not None:
        lines.append(f"Out of the server: {human_rate(measured.server)}.")
    lines.append(
        f"From the storage: {human_rate(measured.storage_alone)} to one worker, "
        f"{human_rate(measured.storage_together)} to all workers; {human_seconds(cluster.request_seconds)} per request."
    )
    if measured.busy_before >= 0.25:
        lines.append(
            f"Processors were {100 * measured.busy_before:.0f} % busy before the measurement. "
            "Measure again when they are idle."
        )
    for busy, what in ((measured.busy_network, "exchanged samples"), (measured.busy_storage, "read chunks")):
        limited = ", so they limited this rate" if busy >= BUSY else ""
        lines.append(f"Processors were {100 * busy:.0f} % busy while all workers {what}{limited}.")
    return lines
