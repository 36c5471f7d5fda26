"""``dshuffle doctor``: look for what commonly goes wrong on a cluster."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dshuffle.compare.local_cluster import connect
from dshuffle.report.progress import progress_bar
from dshuffle.runtime.measure.diagnosis import Finding, Level, diagnose, of_links
from dshuffle.store import open_dataset

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


def doctor(dataset: str | None, scheduler: str | None, as_json: bool) -> None:
    """Diagnose the cluster and print the findings."""
    data = None if dataset is None else open_dataset(dataset)
    with progress_bar() as advance:
        advance(0, 1, f"connecting to {scheduler}" if scheduler else "starting a local cluster")
        with connect(scheduler, 2) as client:
            advance(0, 1, "asking all workers")
            findings = diagnose(client, data)
            if data is not None and not any(finding.level is Level.ERROR for finding in findings):
                advance(0, 1, "measuring links")
                findings.append(of_links(client, data))
    if as_json:
        for finding in findings:
            click.echo(json.dumps({**dataclasses.asdict(finding), "level": finding.level.value}))
    else:
        Console().print(_table(findings))
    if any(finding.level is Level.ERROR for finding in findings):
        raise SystemExit(1)


def _table(findings: Iterable[Finding]) -> Table:
    """One row for each finding, and one for what to do about it."""
    table = Table.grid(padding=(0, 1))
    for finding in findings:
        level = Text(finding.level.value, STYLES[finding.level])
        table.add_row(level, Text(f"{finding.subject}: {finding.observation}"))
        if finding.remedy:
            table.add_row("", Text(finding.remedy, "bold"))
    return table
