"""``dshuffle plan``: what each delivery would send, without a cluster."""

from __future__ import annotations

import json
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from dshuffle.planning import CACHINGS, DELIVERIES, Chunks, parse_assignment
from dshuffle.planning.packet_counts import DeliveryFigures, survey
from dshuffle.units import human_bytes, human_seconds

CODED = ("coded", "ubershuffle", "clique")


@click.command()
@click.option("--samples", type=click.IntRange(1), required=True, help="Samples of the dataset.")
@click.option("--workers", type=click.IntRange(1), required=True, help="Workers that train.")
@click.option("--cache-fraction", type=float, help="Fraction of the dataset that a worker holds.  [default: 1/workers]")
@click.option(
    "--assignment", default="global", show_default=True, help="local, partial:Q, chunks:ROWS, global, aligned[:Q]."
)
@click.option("--caching", type=click.Choice(sorted(CACHINGS)), default="uniform", show_default=True)
@click.option(
    "--delivery",
    "deliveries",
    multiple=True,
    type=click.Choice(sorted(DELIVERIES)),
    help="Repeat for several.  [default: all that suit the caches]",
)
@click.option("--row-bytes", type=click.IntRange(1), default=1024, show_default=True, help="Bytes of a sample.")
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True, help="Plan the last of so many.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    as_json: bool,
) -> None:
    """Count the packets that each delivery needs for one epoch, beside the least that any code needs."""
    chosen = parse_assignment(assignment)
    names = deliveries or ("server", *(("leftover", "clique") if cache_fraction is None else CODED))
    options: dict[str, Any] = {"assignment": chosen, "caching": caching, "deliveries": names, "seed": seed}
    group = chosen.rows if isinstance(chosen, Chunks) and chosen.rows else 1  # each worker must have one
    few = max(workers, min(samples, max(200, workers * group)))
    survey(few, workers, cache_fraction=cache_fraction, bounds=False, **options)  # compiles, so that figures don't
    figures = survey(samples, workers, cache_fraction=cache_fraction, epochs=epochs, **options)
    if as_json:
        click.echo(json.dumps(_as_object(figures, samples, workers, cache_fraction, str(chosen), row_bytes)))
    else:
        Console().print(_table(figures, row_bytes))


def _as_object(
    figures: tuple[DeliveryFigures, ...],
    samples: int,
    workers: int,
    cache_fraction: float | None,
    assignment: str,
    row_bytes: int,
) -> dict[str, Any]:
    return {
        "samples": samples,
        "workers": workers,
        "cache_fraction": 1 / workers if cache_fraction is None else cache_fraction,
        "assignment": assignment,
        "row_bytes": row_bytes,
        "deliveries": [
            {
                "name": row.name,
                "packets": row.packets,
                "needed": row.needed,
                "coded_load_bytes": row.packets * row_bytes,
                "gain": row.gain,
                "lower_bound": row.lower_bound,
                "average_bound": row.average_bound,
                "theorem2": row.theorem2,
                "assignment_seconds": row.assignment_seconds,
                "plan_seconds": row.plan_seconds,
            }
            for row in figures
        ],
    }


def _table(figures: tuple[DeliveryFigures, ...], row_bytes: int) -> Table:
    first = figures[0]
    bound = first.average_bound if first.lower_bound is None else first.lower_bound
    kind = "lower bound" if first.lower_bound is not None else "average bound"
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"needed: {first.needed:,} samples. {kind}: {bound:,.0f} packets by any code. "
        f"Theorem 2 (random caches): {first.theorem2:,.0f}. Drawing the assignment: "
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
