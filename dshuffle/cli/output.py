"""Warnings as users of commands read them.

What ``simulate`` and ``advise`` print: predictions, and the recommendation.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dshuffle.errors import ShardingWarning
from dshuffle.planning import parse_assignment
from dshuffle.planning.cost import Change, Cluster, Prediction, Recommendation, Work, all_ways
from dshuffle.planning.cost.advice import ASSIGNMENTS
from dshuffle.units import human_bytes, human_ratio, human_seconds


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print our own warnings as lines for the user, each once, and let all others go their way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardingWarning)
        yield
    told: set[str] = set()
    for warning in caught:
        if not issubclass(warning.category, ShardingWarning):
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
        elif str(warning.message) not in told:
            told.add(str(warning.message))
            click.echo(f"warning: {warning.message}", err=True)


def _with_global(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """What is recommended is a global shuffle, or what to do instead of one."""
    return given if "global" in given else (*given, "global")


assignment_option = click.option(
    "--assignment",
    "assignments",
    multiple=True,
    default=ASSIGNMENTS,
    show_default=True,
    callback=_with_global,
    help="local, partial:Q, global, aligned[:Q] or chunks[:ROWS]; again for several. global is weighed against them.",
)


def ways_of(cluster: Cluster, work: Work, assignments: tuple[str, ...]) -> tuple[Work, ...]:
    """All ways of some assignments; of those that were asked for, which have none is said."""
    ways = all_ways(cluster, work, assignments=assignments)
    for assignment in assignments if assignments != ASSIGNMENTS else ():
        if not any(way.assignment == str(parse_assignment(assignment)) for way in ways):
            click.echo(f"“{assignment}” is left out: it needs a --cache-fraction above 1/{cluster.n_workers}", err=True)
    return ways


WORDS = {"links": "workers' links", "server": "the server's link", "storage": "storage", "processors": "processors"}


def show(
    cluster: Cluster,
    predictions: Sequence[Prediction],
    advice: Recommendation,
    *,
    as_json: bool,
    facts: dict[str, Any] | None = None,
) -> None:
    """Print all ways and what to do, as tables or as one JSON object.

    Parameters
    ----------
    facts
        What else belongs into the object.
    """
    if as_json:
        # What is infinite limits nothing, and JSON has no such number.
        click.echo(json.dumps(_finite(as_object(cluster, predictions, advice) | (facts or {})), allow_nan=False))
        return
    console = Console()
    console.print(_table(predictions))
    for sentence in (advice.verdict, advice.reason, *advice.notes):
        console.print(sentence, highlight=False, markup=False)
    console.print("\nWhat would change this:", highlight=False)
    for line in [_change(cluster, change) for change in advice.changes] or [
        "  no single rate: up to 256 times as high or as low, this way stays the fastest that shuffles globally"
    ]:
        console.print(line, highlight=False, markup=False)


def as_object(cluster: Cluster, predictions: Sequence[Prediction], advice: Recommendation) -> dict[str, Any]:
    """The same for programs: seconds, bytes, and names."""
    return {
        "cluster": dataclasses.asdict(cluster),
        "ways": [_as_row(prediction) for prediction in predictions],
        "recommendation": {
            "way": advice.best.work.way,
            "instead": advice.instead and advice.instead.work.way,
            "whole_chunks": advice.whole_chunks and advice.whole_chunks.work.way,
            "verdict": advice.verdict,
            "reason": advice.reason,
            "notes": list(advice.notes),
            "changes": [
                {
                    "what": change.what,
                    "factor": change.factor,
                    "way": change.winner.work.way,
                    "exchange_seconds": change.winner.exchange_seconds,
                }
                for change in advice.changes
            ],
        },
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if value == math.inf else value


def _as_row(prediction: Prediction) -> dict[str, Any]:
    row = dataclasses.asdict(prediction)
    return {"way": prediction.work.way, **row.pop("work"), **row, "resources": dict(prediction.resources)}


def _table(predictions: Sequence[Prediction]) -> Table:
    exact = all(prediction.exact for prediction in predictions)
    some = "some (~) expected from formulas, the others counted in real plans"
    planned = "counted in real plans" if exact else some
    if not any(prediction.exact for prediction in predictions):
        planned = "expected from formulas"
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        caption=f"Seconds and bytes of an epoch's exchange, {planned}. Bytes leave the server, enter "
        "the worker that gets the most, and leave the storage.",
        caption_justify="left",
    )
    table.add_column("way", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("limited by")
    for column in ("server", "worker", "storage"):
        table.add_column(column, justify="right", no_wrap=True)
    marks = not exact and any(prediction.exact for prediction in predictions)
    best = {p.work.assignment: min(_seconds_of(predictions, p.work.assignment)) for p in predictions}
    # Assignments from the fastest on, and within each the ways from the fastest on.
    for assignment in sorted(best, key=best.__getitem__):
        rows = [p for p in predictions if p.work.assignment == assignment]
        if assignment != "local":
            table.add_row(Text(assignment, "bold"))
        for p in sorted(rows, key=lambda prediction: prediction.exchange_seconds):
            delivery = f"{p.work.delivery}, {p.work.relay}" if p.work.coded else p.work.delivery
            table.add_row(
                Text("local", "bold") if assignment == "local" else f" {delivery}",
                ("~" if marks and not p.exact and p.needed else "") + human_seconds(p.exchange_seconds),
                p.bottleneck or "-",
                *(human_bytes(value or None) for value in (p.server_egress, p.most_ingress, p.storage_bytes)),
            )
    return table


def _seconds_of(predictions: Sequence[Prediction], assignment: str) -> list[float]:
    return [p.exchange_seconds for p in predictions if p.work.assignment == assignment]


def _change(cluster: Cluster, change: Change) -> str:
    winner = change.winner
    faster = "as fast" if change.factor >= 1 else "as slow"
    by = human_ratio(max(change.factor, 1 / change.factor))
    return f"  {WORDS[change.what]} {by} times {faster}: {winner.work.way} ({human_seconds(winner.exchange_seconds)})"
