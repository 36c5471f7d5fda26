"""Arguments of ``dshuffle compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dshuffle.cli import options
from dshuffle.cli.commands import work_of
from dshuffle.cli.options import RegistryOption


@click.command()
@click.argument("dataset", required=False)
@click.option(
    "--workers", type=click.IntRange(1), default=4, show_default=True, help="Number of workers of the local cluster."
)
@click.option("--epochs", type=click.IntRange(2), default=5, show_default=True, help="Number of epochs of each way.")
@click.option(
    "--assignment",
    "assignments",
    multiple=True,
    cls=RegistryOption,
    names=options.assignments,
    help="May be repeated.",
)
@click.option(
    "--delivery",
    "deliveries",
    multiple=True,
    cls=RegistryOption,
    names=options.deliveries_or_auto,
    help="May be repeated.",
)
@click.option(
    "--relay",
    "relays",
    multiple=True,
    type=click.Choice(options.RELAYS),
    help="How coded packets reach their destinations. May be repeated.  [default: pipelined]",
)
@click.option(
    "--caching",
    type=click.Choice(options.CACHINGS),
    help="Which excess samples workers keep.  [default: uniform; even for aligned]",
)
@click.option(
    "--sharding",
    metavar="NAME",
    help="First assignment: random, contiguous, round-robin, stratified:LABELS, or a name stored by "
    "'dshuffle dataset shard --write'. Needs --assignment or --delivery.  [default: random]",
)
@click.option(
    "--balance",
    metavar="LABELS",
    help="Array of class labels; every worker gets an equal part of each class. Needs --assignment or --delivery.",
)
@click.option(
    "--every",
    type=click.IntRange(1),
    multiple=True,
    metavar="K",
    help="Exchange samples for every K-th epoch only. May be repeated. Needs --assignment or --delivery.  [default: 1]",
)
@click.option(
    "--between",
    type=click.Choice(options.BETWEEN),
    multiple=True,
    help="Order of training in the epochs between: a new one, or that of the epoch before, backwards. May be repeated. "
    "Needs --every.  [default: redraw]",
)
@click.option(
    "--cache-fraction", type=float, help="Fraction of the dataset that each worker holds.  [default: its share]"
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all random choices.")
@click.option(
    "--step",
    type=float,
    help="Constant step size of SGD.  [default: begins at a step that suits the rows, and falls linearly]",
)
@click.option("--features", default="x", show_default=True, help="Name of the 2-D array of features.")
@click.option("--target", default="y", show_default=True, help="Name of the 1-D array of targets.")
@click.option("--scheduler", metavar="ADDRESS", help="Address of a running Dask scheduler, instead of a local cluster.")
@click.option(
    "--links",
    metavar="RATE",
    help="Emulated rate of each local worker's link, such as 1gbit, or none.  "
    "[default: 500mbit, if DATASET is omitted]",
)
@click.option(
    "--store",
    metavar="RATE",
    help="Emulated rate at which all local workers together read the store, or none.  "
    "[default: 2gbit, if DATASET is omitted]",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("dshuffle-report"),
    show_default=True,
    help="Folder for the report.",
)
@click.option(
    "--shuffled",
    metavar="URL",
    help="Copy of DATASET that 'dshuffle dataset shuffle' wrote. Adds a way that reads it by chunks.  "
    "[default: generated, if DATASET is omitted]",
)
@click.option(
    "--train",
    metavar="MODULE:FUNCTION",
    help="Function train(shuffler, *, epochs, ...) that returns a History, or metrics by name; or the name of a "
    "trainer.  [default: a linear regression]",
)
@click.option("--metric", metavar="NAME", help="Metric of --train that the ways are compared by.")
@click.option(
    "--higher-is-better/--lower-is-better",
    default=None,
    help="Which values of the metric are better. Known for loss, error, mse, rmse, mae, nll, perplexity, accuracy, "
    "auc, f1, r2 and score; otherwise required.",
)
@click.option(
    "--margin",
    default="1%",
    show_default=True,
    help="Largest loss of the metric that counts as none: a number in its unit, or a percentage of it.",
)
@click.option(
    "--pairs",
    type=click.IntRange(0),
    help="Largest number of pairs of runs, a way and one that reshuffles everything; at least 5, or 0 for none.  "
    "[default: 20; for a linear regression 10, or 0 on more than 64 MiB]",
)
@click.option(
    "--held-out",
    metavar="KIND",
    default="sample",
    show_default=True,
    help="How each pair draws its held-out tenth: sample, chunk, stratified:ARRAY, the name of an array whose equal "
    "values stay together, or time: the last samples, in all pairs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON instead of tables.")
def compare(**options: Any) -> None:
    """Train on DATASET with several ways of shuffling, and compare their speed and what they learn.

    If DATASET is omitted, 7,000 samples of 1,400 features are generated, for which reshuffling pays: five for each of
    1,400 keys, in the order of the keys. Slow links and a slow store are emulated; otherwise the processors of one
    machine limit all ways. If --assignment and --delivery are omitted, the baselines of the papers are compared;
    --cache-fraction adds coded deliveries to them. With generated samples, a server and a coded delivery with half of
    the samples on each worker are compared, too. Each way is then tested in pairs of runs: is it worse than reshuffling
    everything by more than --margin, if gradients are averaged in every step, and if models are averaged once an
    epoch? The report is written to --output.
    """
    work_of("compare").compare(**options)
