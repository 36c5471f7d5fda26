"""Results of training the same model on the same data under several strategies, for a report.

With them come facts about dataset, cluster, machine and versions, so that others can judge and repeat the run.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from distributed import Client

from dshuffle.compare.clusters import EmulatedRates
from dshuffle.compare.ways import Way
from dshuffle.errors import InvalidParameter
from dshuffle.noninferiority import PairedRuns
from dshuffle.planning.cost import ClusterRates, Prediction, predict
from dshuffle.records import EpochRecord
from dshuffle.redaction import hide_secrets
from dshuffle.report import Comparison, TrainingPoint, WayResult
from dshuffle.runtime import Shuffler
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.dataset_inputs import with_chunks_of
from dshuffle.runtime.measure.measurement import work_of
from dshuffle.runtime.session_spec import only_serves
from dshuffle.store import Dataset
from dshuffle.units import human_bytes

EMULATED = "DSHUFFLE_EMULATED"
"""Environment variable that says, for the report, what is emulated in this environment."""

PACKAGES = ("dshuffle", "dask", "distributed", "zarr", "numpy", "numba", "bokeh")


def result_of(
    way: Way,
    shuffler: Shuffler,
    points: Sequence[TrainingPoint],
    measured: ClusterRates | None,
    pairs: Mapping[str, PairedRuns],
) -> WayResult:
    """Return the result of a strategy, from its shuffler after the training, the points of the fit, and its pairs."""
    prediction = None
    if measured is not None and not way.choices.is_auto:  # which is any of several deliveries
        prediction = predicted(measured, shuffler.dataset, way)
    return WayResult(
        label=_with_chosen(way, shuffler.records),
        choices=way.choices,
        records=tuple(shuffler.records),
        history=tuple(points),
        predicted_seconds=None if prediction is None else prediction.exchange_seconds,
        predicted_wire_seconds=None if prediction is None else prediction.wire_seconds,
        pairs=pairs,
        is_copy=way.copy is not None,
        copy_seconds=way.copy_seconds,
    )


def comparison_of(client: Client, dataset: Dataset, results: Sequence[WayResult], **facts: Any) -> Comparison:
    """Return the results of strategies that ran with the same seed, and what is needed to run them again.

    The environment, or else the configuration of the workers, says what is emulated.
    """
    information = cluster_info(client)
    workers = information["workers"].values()
    n_servers = sum(only_serves(worker["resources"]) for worker in workers)
    return Comparison(
        ways=tuple(results),
        seed=results[0].choices.seed,
        dataset=describe_dataset(dataset),
        cluster={
            "workers that train": len(workers) - n_servers,
            "servers": n_servers,
            "hosts": len({worker["host"] for worker in workers}),
            "threads a worker": _range(worker["nthreads"] for worker in workers),
            "memory a worker": _range((worker["memory_limit"] for worker in workers), human_bytes),
            "protocol": urlsplit(information["address"]).scheme,
        },
        versions={
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
        machine={
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": os.cpu_count(),
            "memory": human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        },
        emulated=os.environ.get(EMULATED, "") or str(EmulatedRates.of(client)),
        **facts,
    )


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Return the URL, the sizes and the arrays of a dataset."""
    return {
        "url": "a temporary folder" if dataset.is_temporary else hide_secrets(dataset.url),
        "samples": dataset.n_samples,
        "bytes a sample": dataset.row_nbytes,
        "size": human_bytes(dataset.n_samples * dataset.row_nbytes),
        **{
            f"array {name}": f"{array.dtype} {array.shape}, {array.chunk_rows} rows per chunk"
            for name, array in dataset.arrays.items()
        },
    }


def _with_chosen(way: Way, records: Sequence[EpochRecord]) -> str:
    """Return the label of a strategy; for ``auto``, with the delivery that it chose most often."""
    deliveries = Counter(record.delivery for record in records if record.exchanged)
    if not way.choices.is_auto or not deliveries:
        return way.label
    [(most, count)] = deliveries.most_common(1)
    return f"{way.label} ({most} {count} of {deliveries.total()})"


def check_copy(way: Way, dataset: Dataset) -> None:
    """Raise :class:`InvalidParameter` if the copy of a strategy cannot be one of the dataset in another order."""
    if way.copy is None:
        return

    def contents(source: Dataset) -> object:
        arrays = {name: (array.dtype.newbyteorder("<"), array.shape) for name, array in source.arrays.items()}
        return source.n_samples, arrays

    reason = ""
    if way.copy.identity == dataset.identity:
        reason = "is the dataset itself"
    elif contents(way.copy) != contents(dataset):
        reason = f"does not have as many samples, or the arrays, of {dataset!r}"
    if reason:
        hint = "Write it with 'dshuffle dataset shuffle'."
        raise InvalidParameter.because("shuffled", f"{way.copy!r} {reason}", hint)


def predicted(cluster: ClusterRates, dataset: Dataset, way: Way) -> Prediction:
    """Predict the cost of an epoch with one way of shuffling a dataset."""
    choices = dataclasses.replace(
        way.choices, assignment=with_chunks_of(dataset, way.choices.assignment), sharding="random", balance=None
    )
    return predict(cluster, work_of(dataset, choices))


def _range(values: Iterable[Any], name: Callable[[Any], Any] = lambda value: value) -> Any:
    ordered = sorted(values)
    least, greatest = name(ordered[0]), name(ordered[-1])
    return least if least == greatest else f"{least} to {greatest}"
