"""``dshuffle compare``: train with several strategies and compare them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from dshuffle.cli.dataset import RARE_KEYS_NOISE, RARE_KEYS_ROWS, RARE_KEYS_SAMPLES
from dshuffle.cli.options import Command, first_given, say, say_if_replaced, shared, warnings_as_lines
from dshuffle.errors import InvalidParameter
from dshuffle.units import human_bytes

if TYPE_CHECKING:
    from dshuffle.compare import HeldOut, Way
    from dshuffle.pipeline import Training
    from dshuffle.store import Dataset

CHUNK_ROWS = 70
"""Rows of a chunk of the generated samples."""

GENERATED = f"dshuffle dataset create URL --synthetic rare-keys --chunk-rows {CHUNK_ROWS}"
"""The command that writes the generated samples."""

CODED_FRACTION = 0.5
"""Cache fraction of coded deliveries of the generated samples. Without excess, there is nothing to code."""

LINKS, STORE = "500mbit", "2gbit"
"""Rates that two cores can fill with the generated samples, so that they and not the processors limit the times."""

PAIRS, REGRESSION_PAIRS = 20, 10
"""Largest number of pairs of a training of the user, and of the linear regression, unless another one is asked for."""

MOST_NBYTES = 64 << 20
"""Largest dataset of which the linear regression runs in pairs without being asked: it takes some ten seconds."""

MEMORY_FRACTION = 0.5
"""Fraction of the available memory that a dataset may take in this process."""

REPEATED, SINGLE = ("relay", "every"), ("between", "caching", "sharding", "balance", "seed")
"""Names of --choice."""


@click.command(cls=Command)
@click.argument("dataset", required=False)
@shared("workers", default=4)
@click.option("--epochs", default=5, show_default=True, type=click.IntRange(2), help="Number of epochs.")
@shared("assignment", "delivery", "choice", "cache-fraction", "features", "target", "scheduler")
@click.option(
    "--step",
    type=float,
    help="Constant step size of SGD.  [default: begins at a step that suits the rows, and falls linearly]",
)
@click.option(
    "--links",
    metavar="RATE",
    help=f"Emulated rate of each local worker's link, or none.  [default: {LINKS}, if DATASET is omitted]",
)
@click.option(
    "--store",
    metavar="RATE",
    help="Emulated rate at which all local workers together read the store, or none.  "
    f"[default: {STORE}, if DATASET is omitted]",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("dshuffle-report"),
    show_default=True,
    help="Folder for the report.",
)
@click.option(
    "--train",
    metavar="MODULE:FUNCTION",
    help="Function train(shuffler, *, epochs, ...) that returns a History, or metrics by name; or the name of a "
    "trainer.  [default: a linear regression]",
)
@click.option("--metric", metavar="NAME", help="Metric of --train that the strategies are compared by.")
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
    help="Largest number of pairs of runs, a strategy and one that reshuffles everything; at least 5, or 0 for none.  "
    f"[default: {PAIRS}; for a linear regression {REGRESSION_PAIRS}, or 0 on more than 64 MiB]",
)
@click.option(
    "--held-out",
    metavar="KIND",
    default="sample",
    show_default=True,
    help="How each pair draws its held-out tenth: sample, chunk, stratified:ARRAY, the name of an array whose equal "
    "values stay together, or time: the last samples, in all pairs.",
)
@shared("json")
def compare(
    dataset: str | None,
    workers: int,
    epochs: int,
    assignment: tuple[str, ...],
    delivery: tuple[str, ...],
    choice: tuple[str, ...],
    cache_fraction: float | None,
    features: str,
    target: str,
    scheduler: str | None,
    step: float | None,
    links: str | None,
    store: str | None,
    output: Path,
    train: str | None,
    metric: str | None,
    higher_is_better: bool | None,
    margin: str,
    pairs: int | None,
    held_out: str,
    as_json: bool,
) -> None:
    """Train with several strategies and report the fastest.

    Their speed and what they learn are compared. If DATASET is omitted, 7,000 samples of 1,400 features are generated,
    for which reshuffling pays: five for each of 1,400 keys, in the order of the keys. Slow links and a slow store are
    emulated; otherwise the processors of one machine limit all strategies. If --assignment and --delivery are omitted,
    the baselines of the papers are compared; --cache-fraction adds coded deliveries to them. With generated samples, a
    server and a coded delivery with half of the samples on each worker are compared, too. Each strategy is then tested
    in pairs of runs: is it worse than reshuffling everything by more than --margin, if gradients are averaged in every
    step, and if models are averaged once an epoch? The report is written to --output.
    """
    context = click.get_current_context()
    if dataset is None and (option := "--scheduler" if scheduler else "--train" if train else ""):
        raise click.UsageError(f"{option} needs DATASET: the generated samples are for a local cluster.")
    if train is None and (refused := first_given(context, "metric", "higher_is_better")):
        raise click.UsageError(f"{refused} needs --train: the linear regression is tested by its rmse.")
    if train is not None and metric is None and pairs != 0:
        raise click.UsageError("--train needs --metric NAME, one of the metrics that it returns, or --pairs 0.")
    if scheduler is not None and (refused := first_given(context, "links", "store")):
        raise click.UsageError(
            f"{refused} cannot be used with --scheduler: its workers are running already. Set "
            "dshuffle.emulated-links and dshuffle.emulated-store in their Dask configuration."
        )
    named = _named(choice)
    from rich.console import Console

    from dshuffle import report
    from dshuffle.compare import AS_THEY_ARE, HeldOut, connect, default_ways, product_of_ways
    from dshuffle.compare.pairs import REGRESSION_METRIC, check_pairs, regression_in_pairs
    from dshuffle.noninferiority import PairedTest
    from dshuffle.pipeline import LocalWorkers, Pipeline, RunningScheduler
    from dshuffle.pipeline.pipeline import train as run
    from dshuffle.planning import Choices
    from dshuffle.report.progress import progress_bar
    from dshuffle.runtime.client.cluster_view import count_training_workers

    most = (REGRESSION_PAIRS if train is None else PAIRS) if pairs is None else pairs
    test = PairedTest(metric or REGRESSION_METRIC, margin, most or PAIRS, higher_is_better)
    alone = {name: values[0] for name, values in named.items() if name in ("sharding", "balance", "seed")}
    base, kind = Choices(cache_fraction=cache_fraction, **alone), HeldOut.of(held_out)
    chosen = bool(assignment or delivery or named.keys() - {"seed"})
    if chosen:
        # An order between exchanges is that of the strategies that have epochs between them.
        every, between = named.get("every", [1]), {name: named[name][0] for name in ("between",) if name in named}
        exchanged = [Choices(every=k, **(between if k != 1 or len(every) == 1 else {})).exchange_epochs for k in every]
        if (longest := max(exchanges.every for exchanges in exchanged)) >= epochs:
            text = f"--choice every={longest} needs --epochs {longest + 1} or more, to have an exchange."
            raise click.UsageError(text)
        ways = product_of_ways(
            base,
            assignment or ("global",),
            delivery or ("peer",),
            caching=named.get("caching", [None])[0],
            relays=named.get("relay", ["pipelined"]),
            epochs=list(dict.fromkeys(exchanged)),
        )
    rates = {"links": links or ("" if dataset else LINKS), "store": store or ("" if dataset else STORE)}
    emulated: dict[str, Any] = {name: rate for name, rate in rates.items() if rate.lower() not in ("", "none")}
    cluster = LocalWorkers(workers, **emulated) if scheduler is None else RunningScheduler(scheduler)
    with _datasets(dataset, copied=not chosen) as (data, copy, copy_seconds):
        if not chosen:
            coded = CODED_FRACTION if dataset is None and CODED_FRACTION * workers > 1 else None
            ways = default_ways(base, copy, coded, copy_seconds=copy_seconds)
        arrays: dict[str, Any] = {"features": features, "target": target}
        training = _training(train, data, epochs, arrays, step=step, seed=base.seed, test=kind)
        if scheduler is not None:
            with connect(scheduler, 0) as client:
                workers = count_training_workers(client)
        check_pairs(workers, epochs)
        ways = _possible(ways, chosen, data, workers)
        on_cluster = test if train is not None and most else None
        pipeline = Pipeline(data, training, ways, cluster, report=str(output), test=on_cluster)
        pipeline.check()
        in_process = train is None and bool(most) and _runs_in_pairs(data, ways, workers, kind, pairs)
        if isinstance(cluster, LocalWorkers) and cluster.rates != AS_THEY_ARE:
            say(f"Emulated: {cluster.rates}. --links none --store none measures this machine as it is.")
        say_if_replaced(output, "--output")
        with warnings_as_lines(), progress_bar() as advance:
            tested = {}
            if in_process:
                tested = regression_in_pairs(
                    data,
                    ways,
                    n_workers=workers,
                    epochs=epochs,
                    step=step,
                    held_out=kind,
                    margin=test.margin,
                    pairs=most,
                    say=advance,
                    **arrays,
                )
            comparison = run(pipeline, advance, tested=tested).comparison
    assert comparison is not None
    if dataset is None:
        facts = {"command that writes it": GENERATED, **comparison.dataset}
        del facts["url"]
        comparison = dataclasses.replace(comparison, dataset=facts)
    if as_json:
        click.echo(json.dumps(report.to_dict(comparison, report.story(comparison))))
    else:
        click.echo(report.render_text(comparison, Console().width))
    try:  # after the results are shown: a full disk does not lose them
        page = report.write_report(comparison, output)
    except OSError as error:
        raise click.ClickException(f"The report could not be written to {output}: {error}") from error
    click.echo(f"Report: {page}", err=as_json)


def _named(choices: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each name of --choice."""
    named: dict[str, list[Any]] = {}
    for text in choices:
        name, equals, value = text.partition("=")
        if not equals or name not in (*REPEATED, *SINGLE) or (name in named and name in SINGLE):
            allowed = f"{', '.join((*REPEATED, *SINGLE))}. Only {' and '.join(REPEATED)} can be repeated."
            raise click.UsageError(f"--choice {text}: give NAME=VALUE with one of {allowed}")
        named.setdefault(name, []).append(int(value) if name in ("every", "seed") and value.isdecimal() else value)
    return named


def _training(train: str | None, data: Dataset, epochs: int, arrays: dict[str, Any], **options: Any) -> Training:
    """The linear regression, or the function of --train with those options that it has parameters for."""
    from dshuffle.compare import falling, stable_step
    from dshuffle.pipeline import Training
    from dshuffle.pipeline.training import FITS, named
    from dshuffle.training.fit import check_step
    from dshuffle.training.linear_regression import check_dataset, fit_linear_regression

    step = options.pop("step")
    steps: dict[str, Any] = {} if step is None else {"step": check_step(step)}
    if train is None:
        check_dataset(data, **arrays)
        steps = steps or {"step": stable_step(data, **arrays), "schedule": falling(epochs)}
        return Training(fit_linear_regression, epochs, **arrays, **steps)
    sys.path.insert(0, os.getcwd())  # as Python does for a module
    function = named(FITS.get(train, train))
    parameters = inspect.signature(function).parameters if callable(function) else {}
    options |= arrays | steps
    as_option = {"step": "step", "features": "features", "target": "target", "test": "held_out"}
    unknown = [option for name, option in as_option.items() if name not in parameters]
    if option := first_given(click.get_current_context(), *unknown):
        raise click.UsageError(f"{option} is not a parameter of --train {train} (--held-out is test): omit it.")
    return Training(function, epochs, **{name: value for name, value in options.items() if name in parameters})


def _runs_in_pairs(data: Dataset, ways: Sequence[Way], n_workers: int, held_out: HeldOut, pairs: int | None) -> bool:
    """Whether the linear regression runs in pairs, in this process; an error if --pairs asks for what cannot run."""
    import psutil

    from dshuffle.compare.pairs import ways_of_a_part

    kinds: set[bool] = set()
    if data.n_samples * held_out.fraction >= 1:
        part, _ = held_out.split(data, 0)
        kinds = {way.choices.reshuffles_all for way in ways_of_a_part(part, ways, n_workers)}
    nbytes, reason = data.n_samples * data.row_nbytes, ""
    limit = MOST_NBYTES if pairs is None else int(MEMORY_FRACTION * psutil.virtual_memory().available)
    if len(kinds) < 2:
        reason = "they need a strategy that reshuffles everything before every epoch, such as global, and another one."
    elif nbytes > limit:
        reason = f"they read {human_bytes(nbytes)} into the memory of this process, which is more than "
        reason += f"{human_bytes(limit)}. " + (
            "Give --pairs to do so." if pairs is None else "Choose a smaller dataset."
        )
    if reason and pairs is not None:
        raise click.UsageError(f"--pairs {pairs}: {reason}")
    if reason:
        click.echo(f"No pairs of runs: {reason}", err=True)
    return not reason


def _possible(ways: Sequence[Way], chosen: bool, data: Dataset, workers: int) -> tuple[Way, ...]:
    """Drop infeasible defaults; reject infeasible choices."""
    possible: list[Way] = []
    for way in ways:
        try:
            way.spec(way.dataset(data), workers)
        except InvalidParameter as error:
            if chosen or not possible:  # whatever the first default way (local) lacks, all ways lack
                raise
            click.echo(f"“{way.label}” is left out: {error}", err=True)
        else:
            possible.append(way)
    return tuple(possible)


@contextmanager
def _datasets(url: str | None, *, copied: bool) -> Iterator[tuple[Dataset, Dataset | None, float | None]]:
    """The dataset; for a generated one also a copy in random order, and the seconds of making it."""
    from dshuffle.store import open_dataset

    if url is not None:
        yield open_dataset(url), None, None
        return
    from dshuffle.store import create_dataset, shuffle_dataset  # they load dask.array, which takes half a second
    from dshuffle.synthetic import rare_keys_regression

    with TemporaryDirectory(prefix="dshuffle-") as folder:
        arrays = rare_keys_regression(RARE_KEYS_SAMPLES, RARE_KEYS_SAMPLES // RARE_KEYS_ROWS, noise=RARE_KEYS_NOISE)
        data = create_dataset(f"{folder}/rare-keys.zarr", arrays, chunk_rows=CHUNK_ROWS)
        start = time.perf_counter()
        copy = shuffle_dataset(data, f"{folder}/shuffled.zarr", seed=0, chunk_rows=CHUNK_ROWS) if copied else None
        yield data, copy, time.perf_counter() - start
