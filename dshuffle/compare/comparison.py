"""Results of training the same model on the same data under several ways of shuffling, for a report."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from distributed import Client

from dshuffle.compare.local_cluster import EmulatedRates
from dshuffle.compare.provenance import describe_cluster, describe_dataset, describe_machine, describe_versions
from dshuffle.compare.ways import Way
from dshuffle.emulated_links import HEADERS
from dshuffle.errors import InvalidParameter
from dshuffle.noninferiority import PairedRuns
from dshuffle.planning.cost import ClusterRates, Prediction, predict
from dshuffle.records import EpochRecord
from dshuffle.report import Comparison, TrainingPoint, WayResult
from dshuffle.runtime import Shuffler
from dshuffle.runtime.dataset_inputs import with_chunks_of
from dshuffle.runtime.measure.auto_candidates import work_of
from dshuffle.store import Dataset

OTHER_LINKS = {f"{gbit} Gbit/s": gbit * 1.25e8 for gbit in (1, 10, 25, 100)}
"""Links in bytes per second for which a report predicts exchanges as well."""

EMULATED = "DSHUFFLE_EMULATED"
"""Environment variable that says, for the report, what is emulated in this environment."""


def result_of(
    way: Way,
    shuffler: Shuffler,
    points: Sequence[TrainingPoint],
    *,
    measured: ClusterRates | None,
    pairs: Mapping[str, PairedRuns] | None = None,
) -> WayResult:
    """Return the result of a way, from its shuffler after the training, the points of the fit, and its pairs."""
    prediction, elsewhere = None, {}
    if measured is not None and not way.choices.is_auto:  # which is any of several deliveries
        prediction = predicted(measured, shuffler.dataset, way)
        elsewhere = {
            name: predicted(with_links(measured, rate), shuffler.dataset, way).exchange_seconds
            for name, rate in OTHER_LINKS.items()
        }
    return WayResult(
        label=_with_chosen(way, shuffler.records),
        choices=way.choices,
        records=tuple(shuffler.records),
        history=tuple(points),
        predicted_seconds=None if prediction is None else prediction.exchange_seconds,
        predicted_wire_seconds=None if prediction is None else prediction.wire_seconds,
        on_other_links=elsewhere,
        pairs=pairs or {},
        is_copy=way.copy is not None,
    )


def comparison_of(
    client: Client,
    dataset: Dataset,
    results: Sequence[WayResult],
    *,
    settings: Mapping[str, Any],
    command: str,
    error_meaning: str,
    error_at_start: float | None = None,
    averages: str = "unknown",
) -> Comparison:
    """Return the results of ways that ran with the same seed, and what is needed to run them again.

    The environment, or else the configuration of the workers, says what is emulated.
    """
    return Comparison(
        ways=tuple(results),
        seed=results[0].choices.seed,
        settings=settings,
        error_meaning=error_meaning,
        command=command,
        dataset=describe_dataset(dataset),
        cluster=describe_cluster(client),
        versions=describe_versions(),
        machine=describe_machine(),
        error_at_start=error_at_start,
        averages=averages,
        emulated=os.environ.get(EMULATED, "") or str(EmulatedRates.of(client)),
    )


def _with_chosen(way: Way, records: Sequence[EpochRecord]) -> str:
    """Return the label of a way; for ``auto``, with the delivery that it chose most often."""
    deliveries = Counter(record.delivery for record in records if record.exchanged)
    if not way.choices.is_auto or not deliveries:
        return way.label
    [(most, count)] = deliveries.most_common(1)
    return f"{way.label} ({most} {count} of {deliveries.total()})"


def shuffler_of(client: Client, dataset: Dataset, way: Way) -> Shuffler:
    """The shuffler of a way."""
    return Shuffler(client, way.dataset(dataset), **way.choices.keywords())


def check_copy(way: Way, dataset: Dataset) -> None:
    """Raise :class:`InvalidParameter` if the copy of a way cannot be one of the dataset in another order."""
    if way.copy is None:
        return
    hint = "Write it with 'dshuffle dataset shuffle'."
    if way.copy.identity == dataset.identity:
        raise InvalidParameter.because("shuffled", f"{way.copy!r} is the dataset itself", hint)
    of_copy, of_dataset = (
        (
            source.n_samples,
            {name: (array.dtype.newbyteorder("<"), array.shape) for name, array in source.arrays.items()},
        )
        for source in (way.copy, dataset)
    )
    if of_copy != of_dataset:
        reason = f"{way.copy!r} does not have as many samples, or the arrays, of {dataset!r}"
        raise InvalidParameter.because("shuffled", reason, hint)


def with_links(cluster: ClusterRates, rate: float) -> ClusterRates:
    """The same cluster with links of a rate in bytes per second, headers included, for all workers and the server."""
    link = rate / HEADERS
    return dataclasses.replace(cluster, link_up=link, link_down=link, server_up=link, wire_overhead=0.0)


def predicted(cluster: ClusterRates, dataset: Dataset, way: Way) -> Prediction:
    """Predict the cost of an epoch with one way of shuffling a dataset."""
    choices = dataclasses.replace(
        way.choices, assignment=with_chunks_of(dataset, way.choices.assignment), sharding="random", balance=None
    )
    return predict(cluster, work_of(dataset, choices))
