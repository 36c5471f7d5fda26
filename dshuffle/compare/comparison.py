"""Strategies that are compared, and the results of training the same model on the same data with each, for a report.

With them come facts about dataset, cluster, machine and versions, so that others can judge and repeat the run.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from distributed import Client

from dshuffle.compare.clusters import EmulatedRates
from dshuffle.errors import InvalidParameter
from dshuffle.noninferiority import PairedRuns
from dshuffle.planning import (
    Aligned,
    Assignment,
    Choices,
    Chunks,
    ExchangeEpochs,
    Global,
    Local,
    Partial,
    ShuffleSpec,
    parse_assignment,
)
from dshuffle.planning.cost import ClusterRates, Prediction, predict
from dshuffle.planning.exchange_epochs import EVERY_EPOCH
from dshuffle.records import EpochRecord
from dshuffle.redaction import hide_secrets
from dshuffle.report import Comparison, TrainingPoint, WayResult
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.dataset_inputs import resolved, with_chunks_of
from dshuffle.runtime.measure.measurement import work_of
from dshuffle.runtime.session_spec import only_serves
from dshuffle.store import Dataset
from dshuffle.units import human_bytes

EMULATED = "DSHUFFLE_EMULATED"
"""Environment variable that says, for the report, what is emulated in this environment."""

PACKAGES = ("dshuffle", "dask", "distributed", "zarr", "numpy", "numba", "bokeh")


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy and what a report calls it.

    Only a dataset can tell whether the labels and the sharding that the choices name exist.

    Parameters
    ----------
    label
        What a report calls it.
    choices
        How it shuffles.
    copy
        What it trains on, if that is a copy of the dataset in random order; see
        :func:`~dshuffle.store.shuffle_dataset`.
    copy_seconds
        How long it took to make the copy, if it was made for a comparison.
    """

    label: str
    choices: Choices
    copy: Dataset | None = field(default=None, compare=False)
    copy_seconds: float | None = None

    def dataset(self, compared: Dataset) -> Dataset:
        """What it trains on: its copy, or else the dataset that is compared on."""
        return compared if self.copy is None else self.copy

    def spec(self, dataset: Dataset, n_workers: int) -> ShuffleSpec:
        """The shuffle of a dataset, or :class:`InvalidParameter` if it cannot be shuffled in this way."""
        return ShuffleSpec.at_first(dataset.n_samples, n_workers, resolved(dataset, self.choices.with_one_delivery()))


DEFAULT = Choices()


def default_ways(
    base: Choices = DEFAULT,
    copy: Dataset | None = None,
    coded_fraction: float | None = None,
    *,
    copy_seconds: float | None = None,
) -> tuple[Way, ...]:
    """The baselines of the papers, from the least shuffling to the most.

    ``partial`` starts from contiguous shards, because the question is whether exchanging a tenth makes up for leaving
    data where they are stored. ``chunks`` is how loaders shuffle that read the dataset again, and needs a chunk for
    every worker. With a copy of the dataset in random order, this is compared on the copy as well: shuffled once on
    disk, then by chunks (Livne et al., 2023). With a cache fraction, coded deliveries are compared, too.

    Parameters
    ----------
    base
        The cache fraction and the seed of all strategies; its other choices are ignored.
    copy, copy_seconds
        The dataset in random order, and how long it took to write that.
    coded_fraction
        Cache fraction of two more strategies, ``server`` and ``clique``. Ignored if ``base`` has a cache fraction.
    """
    ways: list[Way] = []

    def add(assignment: Assignment, delivery: str, label: str = "", sharding: str = "random", **more: Any) -> None:
        fraction = more.pop("cache_fraction", base.cache_fraction)
        choices = Choices(assignment, delivery, None, fraction, sharding=sharding, seed=base.seed)
        ways.append(Way(label or f"{assignment} + {delivery}", choices, **more))

    add(Local(), "peer", "local, as stored", "contiguous")
    add(Local(), "peer", "local, shuffled once")
    add(Partial(0.1), "peer", "partial:0.1 + peer, from stored order", "contiguous")
    add(Chunks(), "storage", "chunks + storage")
    if copy is not None:
        add(Chunks(), "storage", "chunks + storage, shuffled on disk", copy=copy, copy_seconds=copy_seconds)
    for delivery in ("storage", "server", "peer", *(("ubershuffle", "clique") if base.cache_fraction else ())):
        add(Global(), delivery)
    if base.cache_fraction is not None:
        add(Aligned(), "clique")
    elif coded_fraction is not None:
        for delivery in ("server", "clique"):
            label = f"global + {delivery}, {100 * coded_fraction:.0f} % cached"
            add(Global(), delivery, label, cache_fraction=coded_fraction)
    return tuple(ways)


def product_of_ways(
    base: Choices,
    assignments: Sequence[str],
    deliveries: Sequence[str],
    *,
    caching: str | None = None,
    relays: Sequence[str] = ("pipelined",),
    epochs: Sequence[ExchangeEpochs] = (EVERY_EPOCH,),
) -> tuple[Way, ...]:
    """Every assignment with every delivery, and with every relay where there are packets to relay.

    ``local`` moves nothing, so it occurs once. Alone, it is refused with epochs without an exchange.

    Parameters
    ----------
    base
        All other choices.
    caching
        The caching policy of all strategies; by default the one that suits each assignment.
    epochs
        Which epochs have an exchange; every assignment that moves samples occurs with each.

    Raises
    ------
    InvalidParameter
        If a choice is not allowed, or no assignment moves samples and not every epoch shall have an exchange.

    Examples
    --------
    >>> [way.label for way in product_of_ways(Choices(), ["local", "global"], ["peer", "storage"])]
    ['local', 'global + peer', 'global + storage']
    >>> ways = product_of_ways(Choices(), ["global"], ["peer"], epochs=[ExchangeEpochs(1), ExchangeEpochs(2)])
    >>> [way.label for way in ways]
    ['global + peer', 'global + peer, every 2 epochs']
    >>> [way.label for way in product_of_ways(Choices(), ["global"], ["peer", "clique"], relays=["ring", "unicast"])]
    ['global + peer', 'global + clique, ring', 'global + clique, unicast']
    >>> [way.label for way in product_of_ways(Choices(balance="label"), ["global"], ["peer"])]
    ['global + peer, balance: label']
    """
    ways: dict[str, Way] = {}
    rules = [parse_assignment(name) for name in assignments]
    some_move = any(rule.moves for rule in rules)
    for assignment, delivery, chosen_epochs in itertools.product(rules, deliveries, epochs):
        every = dataclasses.asdict(EVERY_EPOCH if some_move and not assignment.moves else chosen_epochs)
        chosen = dataclasses.replace(base, assignment=assignment, delivery=delivery, caching=caching, **every)
        for relay in relays if chosen.has_relays else (chosen.relay,):
            label = f"{assignment} + {delivery}" if assignment.moves else str(assignment)
            if len(relays) > 1 and chosen.has_relays and assignment.moves:
                label += f", {relay}"
            label += chosen.exchange_epochs.label
            if base.balance is not None:
                label += f", balance: {base.balance}"
            ways.setdefault(label, Way(label, dataclasses.replace(chosen, relay=relay)))
    return tuple(ways.values())


def result_of(
    way: Way,
    dataset: Dataset,
    records: Sequence[EpochRecord],
    points: Sequence[TrainingPoint],
    measured: ClusterRates | None,
    pairs: Mapping[str, PairedRuns],
) -> WayResult:
    """Return the result of a strategy, from the records of its last session, the points of the fit, and its pairs."""
    prediction = None
    if measured is not None and not way.choices.is_auto:  # which is any of several deliveries
        prediction = predicted(measured, dataset, way)
    return WayResult(
        label=_with_chosen(way, records),
        choices=way.choices,
        records=tuple(records),
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

    def contents(source: Dataset) -> object:
        arrays = {name: (array.dtype.newbyteorder("<"), array.shape) for name, array in source.arrays.items()}
        return source.n_samples, arrays

    copy = way.copy
    if copy is not None and (copy.identity == dataset.identity or contents(copy) != contents(dataset)):
        hint = "Write it with 'dshuffle dataset shuffle'."
        raise InvalidParameter.because("shuffled", f"{copy!r} is not {dataset!r} in another order", hint)


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
