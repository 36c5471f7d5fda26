"""Pairs of runs of a pipeline: each of its ways against one that reshuffles everything, on its cluster."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from distributed import Client
from numpy.typing import NDArray

from dshuffle.compare import Way, count_training_workers
from dshuffle.compare.pairs import Say, check_pairs, reference_of, run_in_pairs, seeded
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.noninferiority import PairedRuns, PairedTest
from dshuffle.pipeline.training import Training
from dshuffle.records import EpochRecord
from dshuffle.redaction import short_repr
from dshuffle.runtime import Shuffler
from dshuffle.runtime.session_spec import SessionOptions
from dshuffle.store import Dataset
from dshuffle.training import History


def check_test(test: PairedTest, training: Training, ways: Sequence[Way], n_workers: int | None) -> None:
    """Check what can be checked before anything runs.

    Raises
    ------
    InvalidParameter
        If there is no reference, nothing to compare it with, one worker, or one epoch.
    """
    check_pairs(2 if n_workers is None else n_workers, training.epochs)
    reference_of(ways)
    if all(way.choices.reshuffles_all for way in ways):
        labels = [way.label for way in ways]
        raise InvalidParameter.of("shuffle", labels, f"ways to compare {test.metric} of, such as 'local', beside one")


def numbers_in(value: object) -> dict[str, float]:
    """The metrics that a function has returned, if it is a mapping from names to numbers; otherwise none.

    Examples
    --------
    >>> numbers_in({"val_loss": np.float32(0.5), "epochs": 3, "model": None})
    {'val_loss': 0.5, 'epochs': 3.0}
    """
    numbers: dict[str, float] = {}
    for name, number in value.items() if isinstance(value, Mapping) else ():
        with suppress(TypeError, ValueError, RuntimeError):
            numbers[str(name)] = float(number)
    return numbers


def metric_of(value: object, name: str) -> float | NDArray[np.float64]:
    """Return a metric of what a training has returned, or the losses of single samples whose mean it is.

    Parameters
    ----------
    value
        A :class:`~dshuffle.training.History`, whose last point counts, or a mapping from names to numbers.
    name
        ``"error"`` or a validation metric of the history, or a name in the mapping: a number, or an array of one for
        each held-out sample.

    Raises
    ------
    InvalidParameter
        If there is no such metric, or it is not a number. A training that diverged may return NaN.

    Examples
    --------
    >>> metric_of({"val_loss": np.float32(0.5)}, "val_loss")
    0.5
    >>> metric_of({"val_loss": 0.5}, "accuracy")
    Traceback (most recent call last):
    dshuffle.errors.InvalidParameter: metric='accuracy' is not allowed; it must be one of val_loss, which the training \
returned
    """
    if isinstance(value, History) and value.points:
        last = value.points[-1]
        metrics: Mapping[str, Any] = {"error": last.error, **last.validation}
    elif isinstance(value, Mapping):
        metrics = value
    else:
        hint = "It must return a History, or a mapping from the name of each metric to one number."
        raise InvalidParameter.because("metric", f"the training returned {short_repr(value)}", hint)
    if name not in metrics:
        names = ", ".join(sorted(map(str, metrics))) or "none"
        raise InvalidParameter.of("metric", name, f"one of {names}, which the training returned")
    try:
        values = np.asarray(metrics[name])
        if values.ndim == 1 and len(values) > 1 and values.dtype.kind in "biuf":
            return values.astype(np.float64)
        return float(metrics[name])
    except (TypeError, ValueError, RuntimeError):
        raise InvalidParameter.because("metric", f"{name} is {short_repr(metrics[name])}, and not a number") from None


def pairs_of(
    client: Client,
    dataset: Dataset,
    test: PairedTest,
    training: Training,
    options: SessionOptions,
    timed: Sequence[tuple[Way, Sequence[EpochRecord]]],
    say: Say,
) -> dict[str, PairedRuns]:
    """Train in pairs, and return the pairs of each tested way by its label.

    If the cluster fails, or has only one worker or other workers than before, the pairs end with a warning.

    Parameters
    ----------
    client, dataset
        Where to train, and on what.
    test, training, options
        The test, the training and the options of a session.
    timed
        The ways and their records. The reference is the fastest way that reshuffles everything.
    say
        Called with what runs before each pair, and after each of its epochs. An error that it raises ends the run.
    """
    n_workers = count_training_workers(client, options.choice)
    try:
        check_pairs(n_workers, training.epochs)
    except InvalidParameter as error:  # the ways were timed already
        warnings.warn(f"There are no pairs of runs: {error}", stacklevel=2)
        return {}
    running = 0, test.pairs, ""

    def begin(done: int, most: int, text: str) -> None:
        nonlocal running
        running = done, most, text
        say(*running)

    def run(way: Way, seed: int, shuffle_seed: int) -> float | NDArray[np.float64]:
        keywords = {**seeded(way, shuffle_seed).keywords(), **options.keywords()}
        own, part = training.changed(seed=seed).on(way.dataset(dataset), seed)
        with Shuffler(client, part, **keywords) as shuffler:
            value = own.run(shuffler, lambda _: say(*running))
            if shuffler.n_workers != n_workers:
                raise ClusterError(f"there are {shuffler.n_workers} workers in place of {n_workers}")
        return metric_of(value, test.metric)

    def seconds(entry: tuple[Way, Sequence[EpochRecord]]) -> float:
        exchanges = [record.exchange_seconds for record in entry[1][1:]]
        return float(np.median(exchanges)) if exchanges else math.inf

    reference = reference_of([way for way, _ in sorted(timed, key=seconds)])
    held_out = training.held_out
    sizes = {"fixed": True} if held_out is None else held_out.sizes(dataset, reference.choices.seed)
    return run_in_pairs(test, reference, [way for way, _ in timed], run, begin, **sizes)
