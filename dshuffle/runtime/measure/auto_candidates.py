"""The deliveries that ``auto`` may choose from on a cluster, and what each is expected to take."""

from __future__ import annotations

import dataclasses

from distributed import Client

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Assignment
from dshuffle.planning.cost import Cluster, Work, compare_costs
from dshuffle.runtime.cluster_view import SERVER_RESOURCE, cluster_info
from dshuffle.runtime.dataset_inputs import unit_rows
from dshuffle.runtime.measure.probe import measure_cluster
from dshuffle.store import Dataset

PROBE_SECONDS = 4.0
"""How long a cluster is measured that nobody has described."""


def work_of(
    dataset: Dataset, *, assignment: Assignment, delivery: str, caching: str, cache_fraction: float | None, relay: str
) -> Work:
    """An epoch of a dataset, as the cost model takes it."""
    return Work(
        dataset.n_samples,
        max(1, dataset.row_nbytes),
        cache_fraction=cache_fraction,
        chunk_rows=unit_rows(dataset),
        assignment=str(assignment),
        delivery=delivery,
        caching=caching,
        relay=relay,
    )


def expected_seconds(
    client: Client,
    dataset: Dataset,
    cluster: Cluster | None,
    *,
    assignment: Assignment,
    caching: str,
    cache_fraction: float | None,
    relay: str,
    server: str | None,
    memory_fraction: float,
) -> dict[str, float]:
    """Delivery -> seconds of an exchange, by the cost model; the simplest first, which wins where all are equal.

    ``server`` and a coded delivery are among them where a worker serves alone, and the coded one only if that worker
    can hold all rows.
    """
    workers = cluster_info(client)["workers"]

    def serves(address: str) -> bool:
        worker = workers[address]
        if server is not None:
            return server in (address, str(worker["name"]))
        return SERVER_RESOURCE in (worker["resources"] or {})

    serving = {address: worker for address, worker in workers.items() if serves(address)}
    n_workers = len(workers) - len(serving)
    if cluster is None:
        cluster = measure_cluster(client, dataset, seconds=PROBE_SECONDS).cluster
    elif cluster.n_workers != n_workers:
        raise InvalidParameter.of("cluster.n_workers", cluster.n_workers, f"{n_workers}, the workers that train")
    work = work_of(
        dataset, assignment=assignment, delivery="peer", caching=caching, cache_fraction=cache_fraction, relay=relay
    )
    names = ["peer", "storage"] if cluster.storage is not None else ["peer"]
    if serving:
        names.append("server")
        limit = next(iter(serving.values()))["memory_limit"]
        whole = dataset.n_samples * dataset.row_nbytes
        if not limit or whole <= memory_fraction * limit:
            names.append("clique" if work.excess(n_workers) > 0 else "leftover")
    ways = [dataclasses.replace(work, delivery=name) for name in names]
    return {found.work.delivery: found.exchange_seconds for found in compare_costs(cluster, ways)}
