"""``dshuffle doctor``: look for what commonly goes wrong on a cluster."""

from __future__ import annotations

import dataclasses
import json

import click
from rich.console import Console
from rich.text import Text

from dshuffle.compare.local_cluster import connect
from dshuffle.report.progress import progress_bar
from dshuffle.runtime.measure.diagnosis import diagnose
from dshuffle.runtime.measure.diagnosis_of_use import of_links
from dshuffle.runtime.measure.finding import Level
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
    console = Console()
    for finding in findings:
        if as_json:
            click.echo(json.dumps({**dataclasses.asdict(finding), "level": finding.level.value}))
            continue
        console.print(
            Text(f"{finding.level.value:<8}", STYLES[finding.level]),
            Text(f"{finding.subject}: {finding.observation}"),
            sep="",
        )
        if finding.remedy:
            console.print(Text(f"{'':<8}{finding.remedy}", "bold"))
    if any(finding.level is Level.ERROR for finding in findings):
        raise SystemExit(1)
