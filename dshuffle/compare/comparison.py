"""Train the same model on the same data under several ways of shuffling."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from distributed import Client

from dshuffle.compare.mixing_of_ways import QualityOfWays
from dshuffle.compare.provenance import cluster_facts, dataset_facts, machine_facts, version_facts
from dshuffle.errors import InvalidParameter
from dshuffle.planning import AUTO, CACHINGS, DELIVERIES, RELAYS, UNCODED, Aligned, Local, parse_assignment
from dshuffle.planning.cost import Cluster, predict
from dshuffle.records import EpochRecord
from dshuffle.report import Comparison, TrainingPoint, WayResult
from dshuffle.runtime import Shuffler
from dshuffle.runtime.dataset_inputs import with_chunks_of
from dshuffle.runtime.measure.auto_candidates import work_of
from dshuffle.store import Dataset
from dshuffle.training.linear_regression import check_regression, fit_linear_regression

EMULATED = "DSHUFFLE_EMULATED"
"""Environment variable: what is not real where this runs, in words for the report."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way of shuffling: a label for people, and the choices that :class:`dshuffle.Shuffler` takes.

    Whether the labels or the stored sharding exist that ``sharding`` and ``balance`` name, only a dataset can tell.
    """

    label: str
    assignment: str
    delivery: str
    sharding: str
    caching: str = "uniform"
    relay: str = "pipelined"
    balance: str | None = None

    def __post_init__(self) -> None:
        parse_assignment(self.assignment)
        for name, value, known in (
            ("delivery", self.delivery, {*DELIVERIES, AUTO}),
            ("caching", self.caching, CACHINGS),
            ("relay", self.relay, RELAYS),
        ):
            if value not in known:
                raise InvalidParameter.of(name, value, f"one of {', '.join(sorted(known))}")


def default_ways(cache_fraction: float | None = None) -> tuple[Way, ...]:
    """The baselines of the papers, from the least shuffling to the most.

    ``partial`` starts from contiguous shards, as its question is whether exchanging a tenth makes up for
    leaving data where they are stored. ``chunks`` is how loaders shuffle that re-read, and needs a chunk for every
    worker. Where workers hold more than their shares, coded deliveries come in.
    """
    ways = (
        Way("local, as stored", "local", "peer", "contiguous"),
        Way("local, shuffled once", "local", "peer", "random"),
        Way("partial:0.1 + peer", "partial:0.1", "peer", "contiguous"),
        Way("chunks + storage", "chunks", "storage", "random"),
        Way("global + storage", "global", "storage", "random"),
        Way("global + server", "global", "server", "random"),
        Way("global + peer", "global", "peer", "random"),
    )
    if cache_fraction is None:
        return ways
    return (
        *ways,
        Way("global + ubershuffle", "global", "ubershuffle", "random"),
        Way("global + clique", "global", "clique", "random"),
        Way("aligned + clique", "aligned", "clique", "random", caching="even"),
    )


def product_of_ways(
    assignments: Sequence[str],
    deliveries: Sequence[str],
    sharding: str,
    *,
    caching: str | None = None,
    relays: Sequence[str] = ("pipelined",),
    balance: str | None = None,
) -> tuple[Way, ...]:
    """Every assignment with every delivery, and with every relay where there are packets to relay.

    ``local`` moves nothing, so that it comes once. Without a ``caching``, ``aligned`` gets the one that it wants,
    ``even``, and all others get ``uniform``. A ``balance`` is that of all ways.

    Examples
    --------
    >>> [way.label for way in product_of_ways(["local", "global"], ["peer", "storage"], "random")]
    ['local', 'global + peer', 'global + storage']
    >>> [way.label for way in product_of_ways(["global"], ["peer", "clique"], "random", relays=["ring", "unicast"])]
    ['global + peer', 'global + clique, ring', 'global + clique, unicast']
    >>> [way.label for way in product_of_ways(["global"], ["peer"], "random", balance="label")]
    ['global + peer, balance: label']
    """
    ways: dict[str, Way] = {}
    for assignment, delivery in itertools.product(assignments, deliveries):
        parsed = parse_assignment(assignment)
        chosen = caching or ("even" if isinstance(parsed, Aligned) else "uniform")
        for relay in ("pipelined",) if delivery in UNCODED else relays:
            label = str(parsed) if parsed == Local() else f"{parsed} + {delivery}"
            if len(relays) > 1 and delivery not in UNCODED and parsed != Local():
                label += f", {relay}"
            if balance is not None:
                label += f", balance: {balance}"
            ways.setdefault(label, Way(label, str(parsed), delivery, sharding, chosen, relay, balance))
    return tuple(ways.values())


def modest_step(dataset: Dataset, *, features: str = "x", target: str = "y") -> float:
    """A step at which SGD converges in a few epochs: 0.02 / the mean squared norm of rows.

    The norm is that of 1,000 rows, evenly apart.

    Raises
    ------
    InvalidParameter
        ``features`` and ``target`` are no regression, or all these rows are zero or not finite.
    """
    check_dataset(dataset, features, target)
    ids = np.linspace(0, dataset.n_samples - 1, min(1000, dataset.n_samples)).astype(np.int64)
    rows = dataset.read_rows(ids)[features].astype(np.float64)
    norm = float(np.mean(np.einsum("ij,ij->i", rows, rows)))
    if not (np.isfinite(norm) and norm > 0):
        raise InvalidParameter.of("features", features, "an array of finite values that are not all zero")
    return 0.02 / norm


def check_dataset(dataset: Dataset, features: str, target: str) -> None:
    """Raise :class:`InvalidParameter` unless a linear regression can use these arrays of the dataset."""
    arrays = {name: (info.dtype, len(info.shape) + 1) for name, info in dataset.arrays.items()}
    check_regression(arrays, features, target)


def compare_ways(
    client: Client,
    dataset: Dataset,
    ways: Sequence[Way],
    *,
    epochs: int,
    step: float,
    seed: int = 0,
    cache_fraction: float | None = None,
    features: str = "x",
    target: str = "y",
    command: str = "",
    measured: Cluster | None = None,
    on_epoch: Callable[[Way, TrainingPoint], None] | None = None,
) -> Comparison:
    """Run every way from the same seed and weights, one after the other.

    Parameters
    ----------
    client
        Client of the cluster that all ways run on.
    dataset
        What they train on.
    ways
        At least one.
    epochs, step, features, target
        See :func:`fit_linear_regression`.
    seed, cache_fraction
        See :class:`dshuffle.Shuffler`.
    command
        How to run it again, for the report.
    measured
        How fast links, storage and processors of this cluster are, if every way is to be predicted as well; see
        :func:`~dshuffle.runtime.measure.probe.measure_cluster`.
    on_epoch
        Called after every epoch of every way.

    Notes
    -----
    Before anything is measured, two epochs of the last way are run and thrown away: processes load code,
    connect and fill the page cache once, which would otherwise count against the first way.
    """
    if not ways:
        raise InvalidParameter.of("ways", ways, "at least one way of shuffling")
    check_dataset(dataset, features, target)
    quality = QualityOfWays(dataset, target)

    def run(way: Way, count: int, report: Callable[[TrainingPoint], None] | None) -> WayResult:
        with shuffler_of(client, dataset, way, cache_fraction=cache_fraction, seed=seed) as shuffler:
            history = fit_linear_regression(
                shuffler, epochs=count, step=step, features=features, target=target, on_epoch=report
            )
        return WayResult(
            label=_with_chosen(way, shuffler.records),
            assignment=way.assignment,
            delivery=way.delivery,
            sharding=way.sharding,
            balance=way.balance or "",
            records=tuple(shuffler.records),
            history=history.points,
            predicted_seconds=None if measured is None else predicted_seconds(measured, dataset, way, cache_fraction),
            quality=quality.of(
                way.assignment,
                way.sharding,
                way.caching,
                shuffler.n_workers,
                seed,
                cache_fraction,
                balance=way.balance,
            ),
        )

    def reporting(way: Way) -> Callable[[TrainingPoint], None] | None:
        return None if on_epoch is None else lambda point: on_epoch(way, point)

    run(ways[-1], 2, None)
    return Comparison(
        ways=tuple(run(way, epochs, reporting(way)) for way in ways),
        seed=seed,
        step=step,
        command=command,
        dataset={**dataset_facts(dataset), "classes": quality.classes},
        cluster=cluster_facts(client),
        versions=version_facts(),
        machine=machine_facts(),
        emulated=os.environ.get(EMULATED, ""),
    )


def _with_chosen(way: Way, records: Sequence[EpochRecord]) -> str:
    """The label of a way; of ``auto`` with what it took the most often."""
    taken = Counter(record.delivery for record in records[1:])
    if way.delivery != AUTO or not taken:
        return way.label
    [(most, count)] = taken.most_common(1)
    return f"{way.label} ({most} {count} of {taken.total()})"


def shuffler_of(
    client: Client, dataset: Dataset, way: Way, *, cache_fraction: float | None = None, seed: int = 0
) -> Shuffler:
    """The shuffler of a way."""
    return Shuffler(
        client,
        dataset,
        assignment=way.assignment,
        delivery=way.delivery,
        sharding=way.sharding,
        balance=way.balance,
        caching=way.caching,
        relay=way.relay,
        cache_fraction=cache_fraction,
        seed=seed,
    )


def predicted_seconds(cluster: Cluster, dataset: Dataset, way: Way, cache_fraction: float | None) -> float | None:
    """Seconds of an exchange by the cost model; None for ``auto``, which is any of several."""
    if way.delivery == AUTO:
        return None
    work = work_of(
        dataset,
        assignment=with_chunks_of(dataset, parse_assignment(way.assignment)),
        delivery=way.delivery,
        caching=way.caching,
        cache_fraction=cache_fraction,
        relay=way.relay,
    )
    return predict(cluster, work).exchange_seconds
