"""``dshuffle plan``: count the packets of each delivery, without a cluster."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from dshuffle.cli.own_part import check_memory, measure_own_part, own_part_lines
from dshuffle.planning import DELIVERIES, Choices, ShuffleSpec, parse_assignment
from dshuffle.planning.delivery import SIMPLEST
from dshuffle.planning.delivery.server import SERVER_ROWS
from dshuffle.planning.packet_counts import DeliveryFigures, survey
from dshuffle.report.progress import progress_bar
from dshuffle.units import human_bytes, human_seconds


def plan(
    samples: int,
    workers: int,
    cache_fraction: float | None,
    assignment: str,
    caching: str,
    deliveries: tuple[str, ...],
    row_bytes: int,
    epochs: int,
    seed: int,
    own_part: int | None,
    epoch: int,
    ids: Path | None,
    as_json: bool,
) -> None:
    """Plan one epoch, and print the counts."""
    choices = Choices(parse_assignment(assignment), caching=caching, cache_fraction=cache_fraction, seed=seed)
    if own_part is not None:
        chosen = dataclasses.replace(choices, delivery=deliveries[0] if deliveries else SIMPLEST)
        measured = measure_own_part(ShuffleSpec(samples, workers, chosen), own_part, epoch, ids)
        click.echo(json.dumps(measured) if as_json else "\n".join(own_part_lines(measured, own_part, epoch)))
        return
    if ids is not None:
        raise click.UsageError("--ids needs --own-part: it writes the ids of one rank.")
    check_memory(ShuffleSpec(samples, workers, dataclasses.replace(choices, delivery=SERVER_ROWS.name)))
    names = deliveries or _suitable(workers, excess=cache_fraction is not None)
    # Each worker must get a chunk.
    n_small = max(workers, min(samples, max(200, workers * (choices.assignment.unit or 1))))
    with progress_bar() as advance:
        steps = len(names) + 2
        advance(0, steps, "loading compiled code; the first run compiles it")
        survey(n_small, workers, choices, deliveries=names, bounds=False)  # so that the figures below exclude it
        figures = survey(
            samples,
            workers,
            choices,
            deliveries=names,
            epochs=epochs,
            progress=lambda done, text: advance(1 + done, steps, text),
        )
    if as_json:
        job = {
            "samples": samples,
            "workers": workers,
            "cache_fraction": 1 / workers if cache_fraction is None else cache_fraction,
            "assignment": str(choices.assignment),
            "row_bytes": row_bytes,
        }
        click.echo(json.dumps({**job, "deliveries": [_as_object(row, row_bytes) for row in figures]}))
    else:
        Console().print(_table(figures, row_bytes))


def _suitable(n_workers: int, *, excess: bool) -> tuple[str, ...]:
    """One delivery of single samples, and the coded ones that can serve these caches."""
    coded = [d.name for d in DELIVERIES.values() if d.coded and d.supports(n_workers, excess=excess)]
    return (SERVER_ROWS.name, *coded)


def _as_object(figures: DeliveryFigures, row_bytes: int) -> dict[str, Any]:
    fields = {**dataclasses.asdict(figures), "gain": figures.gain}
    return {**fields, "coded_load_bytes": figures.packets * row_bytes}


def _table(figures: tuple[DeliveryFigures, ...], row_bytes: int) -> Table:
    first = figures[0]
    bound = first.average_bound if first.lower_bound is None else first.lower_bound
    kind = "lower bound" if first.lower_bound is not None else "average bound"
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"{first.needed:,} samples must be received. The {kind} for any code is {bound:,.0f} packets, "
        f"Theorem 2 (random caches) {first.theorem2:,.0f}. Time to draw the assignment: "
        f"{human_seconds(first.assignment_seconds)}.",
        caption_justify="left",
    )
    table.add_column("delivery")
    for column in ("packets", "coded load", "gain", f"over {kind}", "planning"):
        table.add_column(column, justify="right")
    for row in figures:
        table.add_row(
            row.name,
            f"{row.packets:,}",
            human_bytes(row.packets * row_bytes),
            f"{row.gain:.2f}",
            f"{row.packets / bound:.3f}" if bound else "-",
            human_seconds(row.plan_seconds),
        )
    return table
