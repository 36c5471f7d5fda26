"""``dshuffle dataset``: create, describe, shuffle and verify datasets."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import click

from dshuffle.cli.options import Command, first_given, shared
from dshuffle.redaction import hide_secrets
from dshuffle.units import human_bytes, human_count

SOURCES = {"files": "--from", "from_folder": "--from-folder", "synthetic": "--synthetic"}
OPTIONS_OF = {
    "files": {"names"},
    "from_folder": {"image_size"},
    "regression": {"samples", "features", "noise"},
    "rare-keys": {"samples", "features", "noise"},
    "classification": {"samples", "features"},
}
"""Options that only some sources accept."""

RARE_KEYS_SAMPLES = 7_000
RARE_KEYS_ROWS = 5
"""Rows of each rare key, which are stored side by side. With many rows of each key, one shuffle is enough."""
RARE_KEYS_NOISE = 0.03
"""Without noise, the error of a linear regression vanishes with all strategies."""


@click.group()
def dataset() -> None:
    """Create, describe, shuffle and verify datasets."""


@dataset.command(cls=Command)
@click.argument("url")
@click.option(
    "--from",
    "files",
    multiple=True,
    metavar="FILE",
    help=".npy, .npz, .parquet or a folder of these, or a Zarr group (path or URL). May be repeated.",
)
@click.option(
    "--array",
    "names",
    multiple=True,
    metavar="NAME",
    help="Array or column to include. May be repeated.  [default: all]",
)
@click.option("--from-folder", metavar="FOLDER", help="Folder with a folder of images for each class.")
@click.option(
    "--image-size",
    type=(click.IntRange(1), click.IntRange(1)),
    metavar="HEIGHT WIDTH",
    help="Size in pixels of all images. Others are scaled and cut.  [default: that of the files, which must be equal]",
)
@click.option("--synthetic", type=click.Choice([*OPTIONS_OF][2:]), help="Kind of dataset to generate.")
@shared("samples", help=f"Number of samples.  [default: 100000; with rare-keys, {RARE_KEYS_SAMPLES}]")
@click.option(
    "--features",
    type=click.IntRange(1),
    help="Number of features. In a regression, three fifths of them are a one-hot key. With rare-keys, it is also the "
    f"number of keys.  [default: 100; with rare-keys, a key for every {RARE_KEYS_ROWS} samples]",
)
@click.option(
    "--noise",
    type=click.FloatRange(0),
    help="Standard deviation of the noise added to the targets of a regression, which have a standard deviation of 1.  "
    f"[default: 0; with rare-keys, {RARE_KEYS_NOISE}]",
)
@shared("chunk-rows", "overwrite")
@click.pass_context
def create(ctx: click.Context, /, url: str, chunk_rows: int | None, overwrite: bool, **options: Any) -> None:
    """Write a dataset to URL, from files or synthetic, without ever holding all of it in memory.

    Synthetic data are sorted, because shuffling matters most for sorted data: a linear regression by its key, a
    classification by class. In "regression", keys are frequent, and one shuffle is enough. In "rare-keys" they are
    rare, and reshuffling pays.
    """
    source = _source(ctx, options)
    from dask.diagnostics.progress import ProgressBar

    from dshuffle.report.progress import progress_bar
    from dshuffle.store import ImageFolder, create_dataset, read_sources, watched

    how: dict[str, Any] = {"chunk_rows": chunk_rows, "overwrite": overwrite}
    images = ImageFolder.of(options["from_folder"], size=options["image_size"]) if source == "from_folder" else None
    if options["synthetic"]:
        with ProgressBar(minimum=2, out=sys.stderr):
            made = create_dataset(
                url, _synthetic(source, options["samples"], options["features"], options["noise"]), **how
            )
    else:
        with progress_bar() as advance:
            read = read_sources(options["files"], options["names"] or None) if images is None else images.arrays
            made = create_dataset(url, watched(read, advance), **how)
    if images is not None:
        click.echo("classes: " + ", ".join(f"{label} {name}" for label, name in enumerate(images.classes)))
        if others := images.other_files:
            files = "1 file is not an image:" if len(others) == 1 else f"{len(others):,} files are not images, such as"
            click.echo(f"left out: {files} {others[0]}", err=True)
    click.echo(
        f"wrote {human_count(made.n_samples)} samples of {human_bytes(made.row_nbytes)} "
        f"({human_bytes(made.n_samples * made.row_nbytes)}) to {hide_secrets(made.url)}"
    )


def _source(ctx: click.Context, options: Mapping[str, Any]) -> str:
    """The chosen source; refuse options that it does not accept."""
    named = [source for source in SOURCES if options[source]]
    if len(named) != 1:
        raise click.UsageError(f"Exactly one of {', '.join(SOURCES.values())} is required.")
    chosen: str = options["synthetic"] or named[0]
    if option := first_given(ctx, *set().union(*OPTIONS_OF.values()) - OPTIONS_OF[chosen]):
        raise click.UsageError(f"{option} cannot be used with {SOURCES.get(chosen, f'--synthetic {chosen}')}.")
    return chosen


def _synthetic(kind: str, samples: int | None, features: int | None, noise: float | None) -> dict[str, Any]:
    from dshuffle.synthetic import gaussian_blobs, keyed_regression, rare_keys_regression

    if kind == "rare-keys":
        samples = samples or RARE_KEYS_SAMPLES
        n_keys = features or max(1, samples // RARE_KEYS_ROWS)
        return rare_keys_regression(samples, n_keys, seed=0, noise=RARE_KEYS_NOISE if noise is None else noise)
    samples, features, noise = samples or 100_000, features or 100, noise or 0.0
    if kind == "regression":
        n_keys = max(1, features * 3 // 5)
        return keyed_regression(samples, n_keys=n_keys, n_dense=features - n_keys, seed=0, noise=noise)
    return gaussian_blobs(samples, features, 10, 0)


@dataset.command(cls=Command)
@click.argument("url")
def info(url: str) -> None:
    """Describe the dataset at URL: its arrays, samples and bytes."""
    from dshuffle.report.page import as_text
    from dshuffle.store import open_dataset

    opened = open_dataset(url)
    rows = {
        name: (
            str(array.dtype),
            str(tuple(array.shape)),
            human_count(array.chunk_rows),
            human_count(array.shard_rows or None),
            human_bytes(opened.n_samples * math.prod(array.shape) * array.dtype.itemsize),
        )
        for name, array in opened.arrays.items()
    }
    size = f"{human_count(opened.n_samples)} samples of {human_bytes(opened.row_nbytes)}"
    click.echo(f"{hide_secrets(opened.url)}: {size}")
    headings = "dtype", "sample", "rows per chunk", "per shard", "bytes"
    click.echo(as_text(headings, rows, shutil.get_terminal_size().columns, named="array"))
    _say_what_is_missing(opened)


def _say_what_is_missing(opened: Any) -> None:
    """Print which arrays are left out, and which are not decoded."""
    for what, names in (("left out", opened.skipped), ("not decoded", opened.undecoded)):
        for name, reason in names.items():
            click.echo(f"{what}: {name} ({reason})", err=True)


@dataset.command(cls=Command)
@click.argument("source")
@click.argument("url")
@shared("chunk-rows", "overwrite")
@click.option("--memory", default="1 GiB", show_default=True, help="Memory to use.")
@click.option(
    "--temporary",
    metavar="FOLDER",
    help="Folder on a local disk with room for all samples.  [default: the system's]",
)
def shuffle(source: str, url: str, memory: str, **options: Any) -> None:
    """Write the dataset SOURCE to URL with its samples in random order.

    Both may be larger than memory. A local disk needs room for all samples.
    """
    from dshuffle.report.progress import progress_bar
    from dshuffle.store import open_dataset, shuffle_dataset

    opened = open_dataset(source)
    _say_what_is_missing(opened)
    with progress_bar() as advance:
        made = shuffle_dataset(opened, url, seed=0, memory_budget=memory, progress=advance, **options)
    size = human_bytes(made.n_samples * made.row_nbytes)
    click.echo(f"wrote {human_count(made.n_samples)} samples ({size}) in random order to {url}")


@dataset.command(cls=Command)
@click.argument("url")
def verify(url: str) -> None:
    """Read every chunk of the dataset at URL once, and list missing and corrupt chunks."""
    from dshuffle.report.progress import progress_bar
    from dshuffle.store import open_dataset, verify_dataset

    with progress_bar() as advance:
        report = verify_dataset(open_dataset(url), progress=lambda done, all_: advance(done, all_, "reading chunks"))
    for message in report.bad:
        click.echo(message)
    if report.bad:
        raise click.ClickException(f"{len(report.bad)} of {report.n_chunks} chunks are bad")
    click.echo(f"{report.n_chunks} chunks, {human_bytes(report.bytes)}: all are good")
