"""``dshuffle dataset shard``: compute a first assignment offline, and show how evenly it spreads the classes."""

from __future__ import annotations

import time
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dshuffle.cli.output import warnings_as_lines
from dshuffle.errors import InvalidParameter
from dshuffle.planning import GivenSharding
from dshuffle.planning.assignment.balance import label_codes
from dshuffle.planning.assignment.initial import first_ranks
from dshuffle.redaction import hide_secrets
from dshuffle.report.class_spread import HEADINGS, box_plot_page, class_rows
from dshuffle.report.progress import Advance, progress_bar
from dshuffle.sharding import Sharding, distribution_aware, stratified
from dshuffle.store import Dataset, open_dataset, read_array, stored_shardings, watched, write_sharding
from dshuffle.units import human_count, human_seconds

MOST_ROWS = 20


def shard(
    url: str,
    by: str,
    workers: int,
    labels: str | None,
    features: str,
    clusters: int | None,
    broadcast_cap: float,
    seed: int,
    write: bool,
    name: str | None,
    overwrite: bool,
    output: Path | None,
) -> None:
    """Compute the sharding, print how even it is, and store it."""
    if labels is None and (by == "stratified" or output is not None):
        raise click.UsageError("--labels is required with --by stratified and with --output.")
    if name is not None and not write:
        raise click.UsageError("--name needs --write.")
    dataset = open_dataset(url)
    stored_as = name or f"{by}-{workers}"
    if write and not overwrite and stored_as in stored_shardings(dataset):  # before the work, not after it
        raise click.UsageError(f"--name {stored_as}: this sharding is stored already; --overwrite replaces it.")
    with progress_bar() as advance, warnings_as_lines():
        values = None if labels is None else _read_labels(dataset, labels, advance)
        started = time.perf_counter()
        if by == "distribution-aware":
            rows = read_array(dataset, features)
            made = distribution_aware(
                rows,
                values,
                n_workers=workers,
                clusters=clusters,
                seed=seed,
                broadcast_cap=broadcast_cap,
                progress=advance,
            )
        else:
            if by == "stratified":
                assert values is not None
                ranks = stratified(values, workers, seed=seed)
            else:
                ranks = first_ranks(by, dataset.n_samples, workers, seed=seed)
            made = Sharding(ranks, workers, np.empty(0, dtype=np.int64))
        seconds = time.perf_counter() - started
    _print(made, values, by, seconds)
    if output is not None and values is not None:
        classes = [str(label) for label in label_codes(values)[1].tolist()]
        title = f"{by} sharding of {hide_secrets(dataset.url)} for {workers} workers"
        output.write_text(box_plot_page(made.counts(values), classes, title), encoding="utf-8")
        click.echo(f"box plot: {output}")
    if write:
        about = {"by": by, "labels": labels, "n_workers": workers, "seed": seed, "clusters": clusters}
        write_sharding(
            dataset,
            stored_as,
            GivenSharding.of(stored_as, made.ranks, made.broadcast).assignment(),
            broadcast=made.broadcast,
            about=about,
            overwrite=overwrite,
        )
        click.echo(
            f"stored beside the dataset; use Shuffler(client, {hide_secrets(dataset.url)!r}, sharding={stored_as!r})"
        )


def _read_labels(dataset: Dataset, name: str, advance: Advance) -> NDArray[np.generic]:
    if name not in dataset.arrays:
        raise InvalidParameter.of("--labels", name, f"one of the dataset's arrays {list(dataset.arrays)}")
    return watched({name: read_array(dataset, name)}, advance)[name][: dataset.n_samples]


def _print(made: Sharding, labels: NDArray[np.generic] | None, by: str, seconds: float) -> None:
    sizes = made.sizes
    click.echo(
        f"{by}: {human_count(len(made.ranks))} samples for {made.n_workers} workers in {human_seconds(seconds)}; "
        f"shards of {human_count(int(sizes.min()))} to {human_count(int(sizes.max()))} samples"
    )
    if made.neighbourhoods is not None:
        neighbourhoods = made.neighbourhoods
        click.echo(
            f"{len(neighbourhoods)} neighbourhoods of {human_count(int(neighbourhoods[-1]))} to "
            f"{human_count(int(neighbourhoods[0]))} samples; {human_count(len(made.broadcast))} samples are broadcast "
            "(every worker trains on them in every epoch)"
        )
    if labels is None:
        return
    classes = [str(label) for label in label_codes(labels)[1].tolist()]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for first, *cells in class_rows(made.counts(labels), classes, MOST_ROWS):
        table.add_row(Text(first), *cells)
    Console().print(table)
    if len(classes) > MOST_ROWS:
        click.echo(f"only the {MOST_ROWS} of {len(classes)} classes with the widest spread are shown")
