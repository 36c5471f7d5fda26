"""The deliveries that ``auto`` may choose from on a cluster, and their expected exchange times."""

from __future__ import annotations

import math

from distributed import Client

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, Delivery
from dshuffle.planning.cost import Work, compare_costs
from dshuffle.planning.delivery import Circumstances, suitable_deliveries
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.dataset_inputs import unit_rows
from dshuffle.runtime.measure.measurement import measure_workers
from dshuffle.runtime.session_spec import SessionOptions, WorkerFacts, only_serves
from dshuffle.store import Dataset

CLEARLY = 0.9
"""A delivery that costs memory must be predicted to take less than this part of an exchange with a simpler one."""

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
    described = cluster_info(client)["workers"]
    allowed = [worker.address for worker in WorkerFacts.of_all(described) if options.choice.allows(worker)]
    workers = {address: described[address] for address in allowed}
    cluster, server = options.cluster, options.server

    def serves(address: str) -> bool:
        worker = workers[address]
        if server is not None:
            return server in (address, str(worker["name"]))
        return only_serves(worker["resources"])

    serving = {address: worker for address, worker in workers.items() if serves(address)}
    n_workers = len(workers) - len(serving)
    if cluster is None:
        cluster = measure_workers(client, options.choice, dataset, seconds=PROBE_SECONDS).cluster
    elif cluster.n_workers != n_workers:
        raise InvalidParameter.of(
            "cluster.n_workers", cluster.n_workers, f"{n_workers}, the number of workers that train"
        )
    work = work_of(dataset, choices.with_one_delivery())
    whole = dataset.n_samples * dataset.row_nbytes
    limits = [worker["memory_limit"] for worker in serving.values()][:1]
    holds_all = all(not limit or whole <= memory_fraction * limit for limit in limits)
    circumstances = Circumstances(
        n_workers,
        work.excess(n_workers) > 0,
        has_server=bool(serving),
        server_holds_all=holds_all,
        has_storage=cluster.storage is not None,
    )
    families: dict[str, Delivery] = {}
    for delivery in suitable_deliveries(circumstances):
        families.setdefault(delivery.family, delivery)
    ways = [work.with_choices(delivery=delivery.name) for delivery in families.values()]
    predicted = {prediction.work.delivery: prediction.exchange_seconds for prediction in compare_costs(cluster, ways)}
    seconds = {delivery.name: time for delivery, time in predicted.items()}
    return {
        delivery.name: time
        for delivery, time in predicted.items()
        if delivery.simpler is None or time <= CLEARLY * seconds.get(delivery.simpler, math.inf)
    }
