"""``dshuffle doctor`` looks for what commonly goes wrong on a cluster; ``dshuffle warmup`` compiles all kernels."""

from __future__ import annotations

import os
import time

import click

from dshuffle.cli.options import Command, loading, shared
from dshuffle.units import human_seconds


@click.command(cls=Command)
@click.argument("dataset", required=False)
@shared("scheduler")
def doctor(dataset: str | None, scheduler: str | None) -> None:
    """Check a cluster: versions, clocks, open files, memory, and whether all workers see DATASET.

    With DATASET, also measure for some seconds how fast workers read it and exchange rows. Without --scheduler, a local
    cluster is started.

    Every finding says what to do. The exit code is 1 if there is an error.
    """
    with loading():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

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
    table, styles = Table.grid(padding=(0, 1)), {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in findings:
        level = Text(finding.level, styles[finding.level])
        table.add_row(level, Text(f"{finding.subject}: {finding.observation}"))
        if finding.remedy:
            table.add_row("", Text(finding.remedy, "bold"))
    Console().print(table)
    if any(finding.is_error for finding in findings):
        raise SystemExit(1)


@click.command(cls=Command)
def warmup() -> None:
    """Compile all kernels, so that no later process has to.

    The code is stored beside the installed modules, or in the folder that the environment variable NUMBA_CACHE_DIR
    names. Run this once when you build an image, or once in a home directory that all nodes share.
    """
    with loading():
        from dshuffle.compare import compile_kernels
        from dshuffle.report.progress import progress_bar
    started = time.perf_counter()
    with progress_bar() as advance:
        advance(0, 1, "compiling kernels")
        compile_kernels()
    where = os.environ.get("NUMBA_CACHE_DIR") or "beside the installed modules"
    click.echo(f"Kernels are compiled ({human_seconds(time.perf_counter() - started)}); the cache is {where}.")
