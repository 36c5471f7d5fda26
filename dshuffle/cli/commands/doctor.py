"""Arguments of ``dshuffle doctor``."""

from __future__ import annotations

from typing import Any

import click

from dshuffle.cli.commands import work_of


@click.command()
@click.argument("dataset", required=False)
@click.option("--scheduler", metavar="ADDRESS", help="Address of a running Dask scheduler.  [default: a local cluster]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each finding.")
def doctor(**options: Any) -> None:
    """Check a cluster: versions, clocks, open files, memory, and whether all workers see DATASET.

    With DATASET, also measure for some seconds how fast workers read it and exchange rows.

    Every finding says what to do. The exit code is 1 if there is an error.
    """
    work_of("doctor").doctor(**options)
