"""The training and the paired test of ``dshuffle compare``."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
import psutil

from dshuffle.cli.option_names import first_option
from dshuffle.compare import HeldOut, Way
from dshuffle.compare.pairs import REGRESSION_METRIC, check_pairs, ways_of_a_part
from dshuffle.noninferiority import Margin, PairedRuns, PairedTest
from dshuffle.pipeline import Training
from dshuffle.pipeline.training import FITS, named
from dshuffle.report import Comparison
from dshuffle.store import Dataset
from dshuffle.units import human_bytes

PAIRS, REGRESSION_PAIRS = 20, 10
"""Largest number of pairs of a training of the user, and of the linear regression, unless another one is asked for."""

MOST_NBYTES = 64 << 20
"""Largest dataset of which the linear regression runs in pairs without being asked: it takes some ten seconds."""

MEMORY_FRACTION = 0.5
"""Fraction of the available memory that a dataset may take in this process."""


def training_of(
    train: str, *, epochs: int, step: float | None, seed: int, features: str, target: str, held_out: HeldOut
) -> Training:
    """Find the function of ``--train``, and give it those options that it has parameters for.

    Raises
    ------
    click.UsageError
        If an option on the command line is not one of its parameters.
    InvalidParameter
        If there is no such function, or it needs other options.
    """
    sys.path.insert(0, os.getcwd())  # as Python does for a module
    function = named(FITS.get(train, train))
    parameters = inspect.signature(function).parameters if callable(function) else {}
    options: dict[str, Any] = {"features": features, "target": target, "seed": seed, "test": held_out}
    options |= {} if step is None else {"step": step}
    ignored = [name for name in ("step", "features", "target") if name not in parameters]
    if option := first_option(click.get_current_context(), ignored):
        raise click.UsageError(f"{option} is not a parameter of --train {train}: omit it.")
    if "test" not in parameters and (option := first_option(click.get_current_context(), ["held_out"])):
        raise click.UsageError(f"{option} needs a parameter test of --train {train}, which gets the held-out samples.")
    options = {name: value for name, value in options.items() if name in parameters}
    return Training(function, epochs, **options)


def paired_test_of(
    train: str | None, metric: str | None, margin: str, pairs: int | None, higher: bool | None
) -> PairedTest | None:
    """The test of the options; None for ``--pairs 0``.

    Raises
    ------
    click.UsageError
        If the metric does not belong to the training.
    InvalidParameter
        If the margin or the number of pairs is not allowed, or the direction of the metric is in doubt.
    """
    if train is None and (metric or higher is not None):
        option = "--metric" if metric else "--higher-is-better" if higher else "--lower-is-better"
        raise click.UsageError(f"{option} needs --train: the linear regression is tested by its {REGRESSION_METRIC}.")
    if train is not None and metric is None and pairs != 0:
        raise click.UsageError("--train needs --metric NAME, one of the metrics that it returns, or --pairs 0.")
    Margin.of(margin)
    if pairs == 0:
        return None
    most = REGRESSION_PAIRS if train is None else PAIRS
    return PairedTest(metric or REGRESSION_METRIC, margin, most if pairs is None else pairs, higher)


def runs_in_pairs(
    data: Dataset, ways: Sequence[Way], n_workers: int, epochs: int, held_out: HeldOut, *, explicit: bool
) -> bool:
    """Whether the linear regression runs in pairs, in this process. ``explicit``: the command line has ``--pairs``.

    Raises
    ------
    click.UsageError
        With ``explicit``, if no way reshuffles everything, or the dataset does not fit into memory.
    InvalidParameter
        With ``explicit``, if there is one epoch.
    """
    kinds = _kinds(data, ways, n_workers, held_out)
    comparable = kinds == {True, False}
    nbytes = data.n_samples * data.row_nbytes
    if not explicit:
        if kinds == {False}:
            click.echo(
                f"No pairs of runs: no way reshuffles everything before every epoch. {_reference(ways)}", err=True
            )
        if not comparable:
            return False
        if nbytes > MOST_NBYTES:
            hint = f"--pairs {REGRESSION_PAIRS} reads it into the memory of this process"
            click.echo(f"No pairs of runs: the dataset has more than {human_bytes(MOST_NBYTES)}. {hint}.", err=True)
        return nbytes <= MOST_NBYTES
    check_pairs(n_workers, epochs)
    if not comparable:
        raise click.UsageError(
            "--pairs needs a way that reshuffles everything before every epoch, such as global, and another one."
        )
    if nbytes > (most := int(MEMORY_FRACTION * psutil.virtual_memory().available)):
        raise click.UsageError(
            f"--pairs reads the dataset into the memory of this process: {human_bytes(nbytes)} are more than half of "
            f"what is available ({human_bytes(most)}). Choose a part of the dataset, or --train."
        )
    return True


def _kinds(data: Dataset, ways: Sequence[Way], n_workers: int, held_out: HeldOut) -> set[bool]:
    """Whether each way that can shuffle a part of the dataset reshuffles everything before every epoch."""
    if data.n_samples * held_out.fraction < 1:
        return set()
    part, _ = held_out.split(data, 0)
    return {way.choices.reshuffles_all for way in ways_of_a_part(part, ways, n_workers)}


def _reference(ways: Sequence[Way]) -> str:
    """Which option adds a way to compare with."""
    redraws = any(way.choices.assignment.redraws_all for way in ways)
    return f"Add {'--every 1' if redraws else '--assignment global'}."


def with_pairs(
    comparison: Comparison, ways: Sequence[Way], pairs: Mapping[str, Mapping[str, PairedRuns]]
) -> Comparison:
    """Add pairs of runs to a comparison. Its results are in the order of the ways; "auto" has another label there."""
    results = [
        dataclasses.replace(result, pairs={name: runs[way.label] for name, runs in pairs.items() if way.label in runs})
        for way, result in zip(ways, comparison.ways, strict=True)
    ]
    return dataclasses.replace(comparison, ways=tuple(results))
