"""The deliveries that ``auto`` may choose from on a cluster, and their expected exchange times."""

from __future__ import annotations

import dataclasses

from distributed import Client

from dshuffle.errors import InvalidParameter
from dshuffle.planning import DELIVERIES, Choices, get_delivery
from dshuffle.planning.cost import Work, compare_costs
from dshuffle.planning.delivery import Excess
from dshuffle.runtime.cluster_view import cluster_info, only_serves
from dshuffle.runtime.dataset_inputs import unit_rows
from dshuffle.runtime.measure.probe import measure_cluster
from dshuffle.runtime.session_options import SessionOptions
from dshuffle.store import Dataset

CLEARLY = 0.9
"""An exchange in two hops must be predicted to take less than this part of an exchange between peers."""

PROBE_SECONDS = 4.0
"""Duration of the measurement if the user does not describe the cluster."""


def work_of(dataset: Dataset, choices: Choices) -> Work:
    """Describe an epoch of a dataset for the cost model."""
    return Work(dataset.n_samples, max(1, dataset.row_nbytes), choices, chunk_rows=unit_rows(dataset))


def expected_seconds(
    client: Client,
    dataset: Dataset,
    choices: Choices,
    options: SessionOptions,
    *,
    memory_fraction: float,
) -> dict[str, float]:
    """Predict the seconds of an exchange for each delivery. Simpler deliveries come first, so that they win ties.

    ``server`` and a coded delivery are included only if the cluster has a dedicated server. The coded delivery also
    requires that the server can hold all rows.
    """
    workers = cluster_info(client)["workers"]
    cluster, server = options.cluster, options.server

    def serves(address: str) -> bool:
        worker = workers[address]
        if server is not None:
            return server in (address, str(worker["name"]))
        return only_serves(worker["resources"])

    serving = {address: worker for address, worker in workers.items() if serves(address)}
    n_workers = len(workers) - len(serving)
    if cluster is None:
        cluster = measure_cluster(client, dataset, seconds=PROBE_SECONDS).cluster
    elif cluster.n_workers != n_workers:
        raise InvalidParameter.of(
            "cluster.n_workers", cluster.n_workers, f"{n_workers}, the number of workers that train"
        )
    work = work_of(dataset, dataclasses.replace(choices, delivery="peer"))
    excess = work.excess(n_workers) > 0
    whole = dataset.n_samples * dataset.row_nbytes
    limits = [worker["memory_limit"] for worker in serving.values()][:1]
    holds_all = all(not limit or whole <= memory_fraction * limit for limit in limits)
    names: list[str] = []
    for delivery in DELIVERIES.values():
        if (delivery.reads_store and cluster.storage is None) or (delivery.needs_server and not serving):
            continue
        if n_workers < delivery.proposed_from:
            continue
        if delivery.coded:
            pays = delivery.excess is (Excess.USED if excess else Excess.REFUSED)
            if not pays or not holds_all or any(get_delivery(name).coded for name in names):
                continue
        names.append(delivery.name)
    ways = [work.with_choices(delivery=name) for name in names]
    seconds = {found.work.delivery.name: found.exchange_seconds for found in compare_costs(cluster, ways)}
    # Two hops take memory for another share, and only short messages gain by them.
    slower = {name for name in names if get_delivery(name).two_hops and seconds[name] > CLEARLY * seconds["peer"]}
    return {name: found for name, found in seconds.items() if name not in slower}
