"""Output that several commands share: warnings, predictions and the recommendation."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dshuffle.cli.prices import show_prices
from dshuffle.errors import ShardingWarning
from dshuffle.planning import Assignment, parse_assignment
from dshuffle.planning.cost import Bill, Change, ClusterRates, Prediction, Recommendation, Work, all_ways
from dshuffle.planning.cost.advice import ASSIGNMENTS
from dshuffle.units import NO_BREAK, human_bytes, human_ratio, human_seconds, kept_together

COLUMNS = 80
"""Length of a line of text."""


def wrapped(text: str, width: int = COLUMNS) -> str:
    """Lines of text of at most this width. None ends between a number and its unit."""
    return click.wrap_text(kept_together(text), width).replace(NO_BREAK, " ")


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each distinct :class:`ShardingWarning` once, as one line; show all other warnings as usual."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardingWarning)
        yield
    said_before: set[str] = set()
    for warning in caught:
        if not issubclass(warning.category, ShardingWarning):
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
        elif str(warning.message) not in said_before:
            said_before.add(str(warning.message))
            click.echo(f"warning: {warning.message}", err=True)


def say_if_replaced(folder: Path, option: str) -> None:
    """Say that a run will replace the report of an earlier one, if there is one."""
    if (folder / "report.html").exists():
        click.echo(wrapped(f"This run replaces the report in {folder}. {option} names another folder."), err=True)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(wrapped(record.getMessage().removeprefix("dshuffle: ")), err=True)


@contextmanager
def logged_as_lines(logger: logging.Logger) -> Iterator[None]:
    """Print what a logger says."""
    level, handler = logger.level, _Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
        logger.setLevel(level)


def ways_of(cluster: ClusterRates, work: Work, assignments: tuple[str, ...]) -> tuple[Work, ...]:
    """Return all ways of the given assignments; report each requested assignment that has no feasible way."""
    ways = all_ways(cluster, work, assignments=assignments)
    for assignment in assignments if assignments != ASSIGNMENTS else ():
        if not any(way.choices.assignment == parse_assignment(assignment) for way in ways):
            click.echo(f"“{assignment}” is left out: it needs a --cache-fraction above 1/{cluster.n_workers}", err=True)
    return ways


WORDS = {"links": "workers' links", "server": "the server's link", "storage": "storage", "processors": "processors"}


def show(
    cluster: ClusterRates,
    predictions: Sequence[Prediction],
    advice: Recommendation,
    *,
    as_json: bool,
    facts: dict[str, Any] | None = None,
    bills: Sequence[Bill] | None = None,
) -> None:
    """Print the predictions and the recommendation, as text or as one JSON object.

    Parameters
    ----------
    facts
        Additional entries of the JSON object.
    bills
        What each of the predicted ways costs, if there are prices.
    """
    if as_json:
        answer = as_object(cluster, predictions, advice) | (facts or {})
        for row, bill in zip(answer["ways"], bills or (), strict=bool(bills)):
            row |= bill.to_dict()
        # JSON has no infinity. An infinite rate is not a limit, so it is written as null.
        click.echo(json.dumps(_finite(answer), allow_nan=False))
        return
    console = Console()
    console.print(_table(predictions))
    for sentence in (advice.verdict, advice.reason, *advice.notes):
        console.print(sentence, highlight=False, markup=False)
    if (load := predictions[0].load_seconds) is not None:
        words = f"Loading the first partitions, for which every chunk is read once, takes {human_seconds(load)}."
        console.print(words, highlight=False)
    console.print("\nWhat would change this:", highlight=False)
    for line in [_change(cluster, change) for change in advice.changes] or [
        "  nothing: it stays the fastest global shuffle even if any one rate is 256 times higher or lower"
    ]:
        console.print(line, highlight=False, markup=False)
    if bills is not None:
        show_prices(console, list(zip(predictions, bills, strict=True)))


def as_object(cluster: ClusterRates, predictions: Sequence[Prediction], advice: Recommendation) -> dict[str, Any]:
    """Return the predictions and the recommendation as an object for JSON, in seconds and bytes."""
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
    row = {entry.name: getattr(prediction, entry.name) for entry in dataclasses.fields(prediction)}
    work = row.pop("work")
    job = {name: getattr(work, name) for name in ("n_samples", "row_nbytes", "chunk_rows", "training_seconds")}
    return {"way": work.way, **job, **work.choices.to_dict(), **row, "resources": dict(prediction.resources)}


def _table(predictions: Sequence[Prediction]) -> Table:
    exact = all(prediction.exact for prediction in predictions)
    basis = "from real plans, or from formulas where marked ~"
    planned = "from real plans" if exact else basis
    if not any(prediction.exact for prediction in predictions):
        planned = "from formulas"
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        caption=f"Seconds and bytes of an epoch's exchange, {planned}. server and storage: bytes sent. "
        "worker: bytes received by the busiest worker.",
        caption_justify="left",
    )
    table.add_column("way", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("limited by")
    for column in ("server", "worker", "storage"):
        table.add_column(column, justify="right", no_wrap=True)
    if (every := max(p.work.choices.every for p in predictions)) > 1:
        table.caption = f"{table.caption} One epoch in {every} has an exchange."
    marks = not exact and any(prediction.exact for prediction in predictions)
    rules = {p.work.choices.assignment for p in predictions}
    best = {rule: min(_seconds_of(predictions, rule)) for rule in rules}
    # Assignments from the fastest on, and within each the ways from the fastest on.
    for rule in sorted(best, key=lambda rule: (best[rule], str(rule))):
        rows = [p for p in predictions if p.work.choices.assignment == rule]
        if rule.moves:
            table.add_row(Text(str(rule), "bold"))
        for p in sorted(rows, key=lambda prediction: prediction.exchange_seconds):
            table.add_row(
                f" {p.work.choices.delivery_label}" if rule.moves else Text(str(rule), "bold"),
                ("~" if marks and not p.exact and p.needed else "") + human_seconds(p.exchange_seconds),
                p.bottleneck or "-",
                *(human_bytes(value or None) for value in (p.server_egress, p.most_ingress, p.storage_bytes)),
            )
    return table


def _seconds_of(predictions: Sequence[Prediction], rule: Assignment) -> list[float]:
    return [p.exchange_seconds for p in predictions if p.work.choices.assignment == rule]


def _change(cluster: ClusterRates, change: Change) -> str:
    winner = change.winner
    faster = "as fast" if change.factor >= 1 else "slower"
    by = human_ratio(max(change.factor, 1 / change.factor))
    return f"  {WORDS[change.what]} {by} times {faster}: {winner.work.way} ({human_seconds(winner.exchange_seconds)})"
