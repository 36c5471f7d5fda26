"""``dshuffle compare``: train with several ways of shuffling and compare them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console

from dshuffle import report
from dshuffle.cli.output import say_if_replaced, warnings_as_lines, wrapped
from dshuffle.cli.paired_test import paired_test_of, runs_in_pairs, training_of, with_pairs
from dshuffle.compare import (
    AS_THEY_ARE,
    HeldOut,
    Way,
    connect,
    default_ways,
    falling,
    product_of_ways,
    regression_in_pairs,
    stable_step,
)
from dshuffle.compare.comparison import check_copy
from dshuffle.errors import InvalidParameter
from dshuffle.pipeline import LocalWorkers, Pipeline, RunningScheduler, Training
from dshuffle.pipeline.pipeline import train as run
from dshuffle.planning import Choices, Classes, ExchangeEpochs, Global, ShuffleSpec
from dshuffle.planning.exchange_epochs import EVERY_EPOCH
from dshuffle.report import Comparison, to_dict
from dshuffle.report.progress import progress_bar
from dshuffle.report.summary import make_folder
from dshuffle.runtime.client.cluster_view import count_training_workers
from dshuffle.runtime.dataset_inputs import resolved, with_chunks_of
from dshuffle.store import Dataset, open_dataset
from dshuffle.training.inputs import check_step
from dshuffle.training.linear_regression import check_dataset, fit_linear_regression

DEFAULT_CHUNK_ROWS = 70
CODED_FRACTION = 0.5
"""Cache fraction of coded deliveries of the generated samples. Without excess, there is nothing to code."""

DEFAULT_RATES = {"links": "500mbit", "store": "2gbit"}
"""Rates that two cores can fill with the generated samples, so that they and not the processors limit the times."""

NO_RATE = "none"
"""Value of an option that turns emulation off."""


def compare(
    dataset: str | None,
    workers: int,
    epochs: int,
    assignments: tuple[str, ...],
    deliveries: tuple[str, ...],
    relays: tuple[str, ...],
    caching: str | None,
    sharding: str | None,
    balance: str | None,
    every: tuple[int, ...],
    between: tuple[str, ...],
    cache_fraction: float | None,
    seed: int,
    step: float | None,
    features: str,
    target: str,
    scheduler: str | None,
    links: str | None,
    store: str | None,
    output: Path,
    shuffled: str | None,
    train: str | None,
    metric: str | None,
    higher_is_better: bool | None,
    margin: str,
    pairs: int | None,
    held_out: str,
    as_json: bool,
) -> None:
    """Run the ways, print the comparison and write the report."""
    if scheduler and not dataset:
        raise click.UsageError("--scheduler needs DATASET: its workers may not see a temporary folder of this machine.")
    if scheduler and (links or store):
        raise click.UsageError(
            f"--{'links' if links else 'store'} cannot be used with --scheduler: its workers are running already. Set "
            "dshuffle.emulated-links and dshuffle.emulated-store in their Dask configuration."
        )
    chosen = bool(assignments or deliveries)
    if shuffled and chosen:
        raise click.UsageError("--shuffled is a way beside the default ones: omit --assignment and --delivery.")
    if shuffled and not dataset:
        raise click.UsageError("--shuffled needs DATASET: a copy of the generated samples is generated, too.")
    if train and not dataset:
        raise click.UsageError("--train needs DATASET, the URL of the samples to train on.")
    test = paired_test_of(train, metric, margin, pairs, higher_is_better)
    kind = HeldOut.of(held_out)
    cluster = _cluster(scheduler, workers, dataset is None, links=links, store=store)
    base = Choices(cache_fraction=cache_fraction, seed=seed)
    if chosen:
        base = dataclasses.replace(
            base, sharding=sharding or "random", balance=None if balance is None else Classes(balance)
        )
        ways = product_of_ways(
            base,
            assignments or ("global",),
            deliveries or ("peer",),
            caching=caching,
            relays=relays or ("pipelined",),
            epochs=_exchange_epochs(every, between, epochs),
        )
    elif every or between:
        option = "every" if every else "between"
        raise click.UsageError(
            f"--{option} needs --assignment or --delivery: in the default ways, every epoch has an exchange."
        )
    elif alone := [
        name
        for name, value in (("sharding", sharding), ("balance", balance), ("caching", caching), ("relay", relays))
        if value
    ]:
        raise click.UsageError(f"--{alone[0]} needs --assignment or --delivery: the default ways have their own.")
    with _datasets(dataset, shuffled, seed, copied=not chosen) as (data, copy, copy_seconds):
        if not chosen:
            has_excess = CODED_FRACTION * workers > 1
            ways = default_ways(base, copy, CODED_FRACTION if dataset is None and has_excess else None)
            for way in ways:
                check_copy(way, data)
        _make_folder(output)
        if train is None:
            check_dataset(data, features, target)
            steps = _steps(step, data, epochs, features, target)
            training = Training(fit_linear_regression, epochs, features=features, target=target, **steps)
        else:
            training = training_of(
                train, epochs=epochs, step=step, seed=seed, features=features, target=target, held_out=kind
            )
            if copy is not None and training.held_out is not None:
                raise click.UsageError("--shuffled has the samples that --train holds out: omit one of them.")
        # Check everything possible before the long run.
        n_workers = workers if scheduler is None else _count_workers(scheduler)
        if n_workers < 2:
            hint = "One worker trains on all samples with every way, so there is nothing to compare."
            raise InvalidParameter.of("workers", n_workers, "an integer >= 2", hint)
        ways = _possible(ways, chosen, data, n_workers)
        explicit = pairs is not None
        local_test = test if train is None else None
        if local_test and not runs_in_pairs(data, ways, n_workers, epochs, kind, explicit=explicit):
            local_test = None
        pipeline = Pipeline(data, training, ways, cluster, report=str(output), test=None if train is None else test)
        if isinstance(cluster, LocalWorkers) and cluster.rates != AS_THEY_ARE:
            emulated = f"Emulated: {cluster.rates}. --links none --store none measures this machine as it is."
            click.echo(wrapped(emulated), err=True)
        if train is None and step is None:
            click.echo("The default steps suit the rows. --step sets a constant step.", err=True)
        say_if_replaced(output, "--output")
        with warnings_as_lines(), progress_bar() as advance:
            pairs_of_ways = (
                {}
                if local_test is None
                else regression_in_pairs(
                    data,
                    ways,
                    n_workers=n_workers,
                    epochs=epochs,
                    step=step,
                    features=features,
                    target=target,
                    held_out=kind,
                    margin=local_test.margin,
                    pairs=local_test.pairs,
                    say=advance,
                )
            )
            comparison = run(pipeline, advance).comparison
    assert comparison is not None
    if local_test is not None:
        comparison = with_pairs(comparison, ways, pairs_of_ways)
    if dataset is None:
        comparison = _with_source(comparison, seed)
    if copy_seconds is not None:
        comparison = _with_copy_seconds(comparison, ways, copy_seconds)
    _show(comparison, as_json)
    try:
        page = report.write_report(comparison, output)
    except OSError as error:
        raise click.ClickException(f"The report could not be written to {output}: {error}") from error
    click.echo(f"Report: {page}\nBeside it are records.jsonl and summary.json.", err=True)


def _steps(step: float | None, data: Dataset, epochs: int, features: str, target: str) -> dict[str, Any]:
    """A constant step, or by default steps that fall from one that suits the rows."""
    if step is not None:
        return {"step": check_step(step)}
    return {"step": stable_step(data, features=features, target=target), "schedule": falling(epochs)}


def _with_copy_seconds(comparison: Comparison, ways: Sequence[Way], seconds: float) -> Comparison:
    """Add the time of making the copy to the ways that train on it."""
    results = [
        dataclasses.replace(result, copy_seconds=None if way.copy is None else seconds)
        for way, result in zip(ways, comparison.ways, strict=True)
    ]
    return dataclasses.replace(comparison, ways=tuple(results))


def _with_source(comparison: Comparison, seed: int) -> Comparison:
    """Say how to generate the dataset again, in place of the temporary folder that it was in."""
    command = f"dshuffle dataset create URL --synthetic rare-keys --seed {seed} --chunk-rows {DEFAULT_CHUNK_ROWS}"
    facts = {"command that writes it": command, **comparison.dataset}
    del facts["url"]
    return dataclasses.replace(comparison, dataset=facts)


def _exchange_epochs(every: tuple[int, ...], between: tuple[str, ...], epochs: int) -> list[ExchangeEpochs]:
    """Each K of --every with each order of --between."""
    if between and max(every, default=1) == 1:
        raise click.UsageError("--between needs --every K with a K of 2 or more: else there are no epochs between.")
    if every and max(every) >= epochs:
        raise click.UsageError(f"--every {max(every)} needs --epochs {max(every) + 1} or more, to have an exchange.")
    orders = between or (EVERY_EPOCH.between,)
    pairs = ((k, order) for k in every or (1,) for order in orders)
    return list(dict.fromkeys(EVERY_EPOCH if k == 1 else ExchangeEpochs(k, order) for k, order in pairs))


def _cluster(
    scheduler: str | None, workers: int, generated: bool, *, links: str | None, store: str | None
) -> LocalWorkers | RunningScheduler:
    """The cluster to run on. Rates have defaults if the dataset is generated."""
    if scheduler is not None:
        return RunningScheduler(scheduler)

    def rate(name: str, text: str | None) -> str | None:
        chosen = text or (DEFAULT_RATES[name] if generated else NO_RATE)
        return None if chosen.strip().lower() == NO_RATE else chosen

    return LocalWorkers(workers, links=rate("links", links), store=rate("store", store))


def _count_workers(scheduler: str) -> int:
    with connect(scheduler, 0) as client:
        return max(1, count_training_workers(client))


def _show(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(to_dict(comparison, report.story(comparison))))
    else:
        click.echo(report.render_text(comparison, Console().width))


def _possible(ways: Sequence[Way], chosen: bool, data: Dataset, workers: int) -> tuple[Way, ...]:
    """Drop infeasible defaults; reject infeasible choices."""
    possible: list[Way] = []
    read: dict[tuple[str, str], Choices] = {}  # ways share what is read of the dataset
    for way in ways:
        try:
            key = str(way.choices.sharding), str(way.choices.balance)
            if key not in read:
                read[key] = resolved(data, dataclasses.replace(way.choices, assignment=Global()))
            choices = dataclasses.replace(
                way.choices.with_one_delivery(),
                assignment=with_chunks_of(way.dataset(data), way.choices.assignment),
                sharding=read[key].sharding,
                balance=read[key].balance,
            )
            ShuffleSpec.at_first(data.n_samples, workers, choices)
        except InvalidParameter as error:
            if chosen or not possible:  # whatever the first default way (local) lacks, all ways lack
                raise
            click.echo(f"“{way.label}” is left out: {error}", err=True)
        else:
            possible.append(way)
    return tuple(possible)


def _make_folder(output: Path) -> None:
    """Make the folder of the report before the long run. New folders that stay empty are removed again."""
    new = [folder for folder in (output, *output.parents) if not os.path.exists(folder)]

    def remove_if_empty() -> None:
        with suppress(OSError):
            for folder in new:
                folder.rmdir()

    click.get_current_context().call_on_close(remove_if_empty)
    try:
        make_folder(output)
    except OSError as error:
        raise click.UsageError(f"--output {output} cannot be written to: {error}") from error


@contextmanager
def _datasets(
    url: str | None, shuffled: str | None, seed: int, *, copied: bool
) -> Iterator[tuple[Dataset, Dataset | None, float | None]]:
    """The dataset, a copy in random order, and the seconds of making the copy here."""
    if url is not None:
        yield open_dataset(url), None if shuffled is None else open_dataset(shuffled), None
        return
    with TemporaryDirectory(prefix="dshuffle-") as folder:
        yield importlib.import_module("dshuffle.cli.generated_dataset").generate(
            folder, seed, DEFAULT_CHUNK_ROWS, copied=copied
        )
