"""``dshuffle dataset``: create, describe and verify datasets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from dask.callbacks import Callback
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dshuffle.cli.option_names import first_option
from dshuffle.cli.options import RARE_KEYS_NOISE, RARE_KEYS_ROWS, RARE_KEYS_SAMPLES, SYNTHETIC
from dshuffle.redaction import hide_secrets
from dshuffle.report.progress import Advance, progress_bar
from dshuffle.store import (
    Dataset,
    ImageFolder,
    create_dataset,
    open_dataset,
    read_sources,
    shuffle_dataset,
    verify_dataset,
    watched,
)
from dshuffle.synthetic import gaussian_blobs, keyed_regression, low_rank_entries, rare_keys_regression
from dshuffle.units import human_bytes, human_count

SOURCES = {
    "files": "--from",
    "from_folder": "--from-folder",
    "synthetic": "--synthetic",
}
"""Options that name a source."""

DEFAULT_SAMPLES = 100_000
DEFAULT_FEATURES = 100

#: Options that only some sources accept.
OPTIONS_OF = {
    "files": {"names"},
    "from_folder": {"image_size", "grey"},
    "regression": {"samples", "features", "noise", "seed"},
    "rare-keys": {"samples", "features", "noise", "seed"},
    "classification": {"samples", "features", "classes", "seed"},
    "matrix": {"rows", "columns", "entries_per_row", "rank", "noise", "seed"},
}


def create(
    ctx: click.Context, /, url: str, chunk_rows: int | None, shard_rows: int | None, overwrite: bool, **options: Any
) -> None:
    """Write a dataset from the one source that the options name."""
    source = _chosen_source(ctx, options)
    with progress_bar() as advance:
        if source == "files":
            arrays: Mapping[str, Any] = watched(read_sources(options["files"], options["names"] or None), advance)
        elif source == "from_folder":
            mode = "L" if options["grey"] else None
            images = ImageFolder.of(options["from_folder"], size=options["image_size"], mode=mode)
            arrays = watched(images.arrays, advance)
        else:
            arrays = _synthetic(**options)
        with _blocks_counted(advance):
            made = create_dataset(url, arrays, chunk_rows=chunk_rows, shard_rows=shard_rows, overwrite=overwrite)
    if source == "from_folder":
        click.echo("classes: " + ", ".join(f"{label} {name}" for label, name in enumerate(images.classes)))
        if others := images.other_files:
            files = "1 file is not an image:" if len(others) == 1 else f"{len(others):,} files are not images, such as"
            click.echo(f"left out: {files} {others[0]}", err=True)
    click.echo(
        f"wrote {human_count(made.n_samples)} samples of {human_bytes(made.row_nbytes)} "
        f"({human_bytes(made.n_samples * made.row_nbytes)}) to {hide_secrets(made.url)}"
    )


def _chosen_source(ctx: click.Context, options: Mapping[str, Any]) -> str:
    """Return the chosen source; reject options that it does not accept."""
    named = [source for source in SOURCES if options[source]]
    names = ", ".join(SOURCES.values())
    if len(named) != 1:
        raise click.UsageError(f"Exactly one of {names} is required.")
    chosen: str = options["synthetic"] or named[0]
    if option := first_option(ctx, sorted(set().union(*OPTIONS_OF.values()) - OPTIONS_OF[chosen])):
        source = f"--synthetic {chosen}" if chosen in SYNTHETIC else SOURCES[chosen]
        raise click.UsageError(f"{option} cannot be used with {source}.")
    return named[0]


def _synthetic(
    synthetic: str,
    samples: int | None,
    features: int | None,
    classes: int,
    rows: int,
    columns: int,
    entries_per_row: int,
    rank: int,
    noise: float | None,
    seed: int,
    **_: Any,
) -> dict[str, Any]:
    if synthetic == "rare-keys":
        samples = samples or RARE_KEYS_SAMPLES
        n_keys = features or max(1, samples // RARE_KEYS_ROWS)
        return rare_keys_regression(samples, n_keys, seed=seed, noise=RARE_KEYS_NOISE if noise is None else noise)
    samples, features, noise = samples or DEFAULT_SAMPLES, features or DEFAULT_FEATURES, noise or 0.0
    if synthetic == "regression":
        n_keys = max(1, features * 3 // 5)
        return keyed_regression(samples, n_keys=n_keys, n_dense=features - n_keys, seed=seed, noise=noise)
    if synthetic == "classification":
        return gaussian_blobs(samples, features, classes, seed)
    return low_rank_entries(rows, columns, entries_per_row, rank, noise, seed)


@contextmanager
def _blocks_counted(advance: Advance) -> Iterator[None]:
    """Report progress by the tasks of Dask's local scheduler, which generate and write the blocks."""
    total = done = 0

    def started(graph: Mapping[Any, Any], state: Mapping[str, Any]) -> None:
        nonlocal total
        total = sum(len(state[kind]) for kind in ("ready", "waiting"))

    def finished(key: Any, value: Any, graph: Any, state: Any, worker: Any) -> None:
        nonlocal done
        done += 1
        advance(done, total, "blocks generated and written")

    with Callback(start_state=started, posttask=finished):
        yield


def info(url: str, as_json: bool) -> None:
    """Print what the dataset has."""
    dataset = open_dataset(url)
    description = _description(dataset)
    if as_json:
        click.echo(json.dumps(description))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    sharded = any(array["shard_rows"] for array in description["arrays"])
    for heading in ("array", "dtype", "sample", "rows per chunk", *(["per shard"] if sharded else []), "bytes"):
        left = heading in ("array", "dtype")
        table.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=heading == "dtype")
    for array in description["arrays"]:
        shard = human_count(array["shard_rows"]) if array["shard_rows"] else "-"
        table.add_row(
            Text(array["name"]),
            Text(array["dtype"]),
            str(tuple(array["shape"])),
            human_count(array["chunk_rows"]),
            *([shard] if sharded else []),
            human_bytes(array["bytes"]),
        )
    click.echo(
        f"{hide_secrets(dataset.url)}: {human_count(dataset.n_samples)} samples of {human_bytes(dataset.row_nbytes)}"
    )
    Console().print(table)
    for name, reason in dataset.skipped.items():
        click.echo(f"left out: {name} ({reason})")
    for name, reason in dataset.undecoded.items():
        click.echo(f"not decoded: {name} ({reason})")


def _description(dataset: Dataset) -> dict[str, Any]:
    return {
        "url": hide_secrets(dataset.url),
        "samples": dataset.n_samples,
        "row_nbytes": dataset.row_nbytes,
        "bytes": dataset.n_samples * dataset.row_nbytes,
        "skipped": dict(dataset.skipped),
        "undecoded": dict(dataset.undecoded),
        "arrays": [
            {
                "name": name,
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "chunk_rows": array.chunk_rows,
                "shard_rows": array.shard_rows,
                "bytes": dataset.n_samples * math.prod(array.shape) * array.dtype.itemsize,
            }
            for name, array in dataset.arrays.items()
        ],
    }


def shuffle(
    source: str,
    url: str,
    seed: int,
    by: str | None,
    chunk_rows: int | None,
    shard_rows: int | None,
    overwrite: bool,
    memory: str,
    temporary: str | None,
) -> None:
    """Write the shuffled copy, and report progress."""
    opened = open_dataset(source)
    for name, reason in opened.skipped.items():
        click.echo(f"left out: {name}: {reason}", err=True)
    for name, reason in opened.undecoded.items():
        click.echo(f"not decoded: {name}: {reason}", err=True)
    with progress_bar() as advance:
        made = shuffle_dataset(
            opened,
            url,
            seed=seed,
            by=by,
            chunk_rows=chunk_rows,
            shard_rows=shard_rows,
            overwrite=overwrite,
            memory_budget=memory,
            temporary=temporary,
            progress=advance,
        )
    size = human_bytes(made.n_samples * made.row_nbytes)
    click.echo(f"wrote {human_count(made.n_samples)} samples ({size}) in random order to {url}")


def verify(url: str) -> None:
    """Read all chunks and print the bad ones."""
    dataset = open_dataset(url)
    with progress_bar() as advance:
        report = verify_dataset(dataset, progress=lambda done, total: advance(done, total, "reading chunks"))
    if report.bad:
        for message in report.bad:
            click.echo(message)
        raise click.ClickException(f"{len(report.bad)} of {report.n_chunks} chunks are bad")
    click.echo(f"{report.n_chunks} chunks, {human_bytes(report.bytes)}: all are good")
