"""Measure a cluster by short sessions, so that the cost model can predict the time of each delivery on it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from distributed import Client

from dshuffle.checks import as_integer
from dshuffle.errors import CacheBudgetError, ClusterError, InvalidParameter
from dshuffle.planning import Choices, Chunks, Delivery, Remainder
from dshuffle.planning.cost import MESSAGE_SECONDS, ClusterRates, Work, compare_costs, ends_seconds, loads_of
from dshuffle.planning.delivery import suitable_deliveries
from dshuffle.records import Measures
from dshuffle.runtime.client.cluster_view import cluster_info, is_adaptive, resolved_choice, run_on_workers
from dshuffle.runtime.client.open_session import OpenSession, new_id
from dshuffle.runtime.client.session_client import install_plugin
from dshuffle.runtime.dataset_inputs import resolved, unit_rows
from dshuffle.runtime.messages import EpochExchange
from dshuffle.runtime.process import ProcessorTimes
from dshuffle.runtime.session_spec import (
    EVERY_WORKER,
    SERVER_RESOURCE,
    DatasetReference,
    SessionOptions,
    SessionRequest,
    WorkerChoice,
    WorkerFacts,
    only_serves,
)
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset
from dshuffle.store.dataset import blank_dataset
from dshuffle.store.row_blocks import RowBlocks

LONGEST = 20.0
"""Maximum duration of a measurement in seconds."""

BUSY, IDLE = 0.85, 0.25
"""Processor utilization from which on processors limit an exchange, and up to which others hardly use them."""

LEAST_BYTES, MOST_BYTES = 2**20, 2**25
"""Bytes that a worker holds in a first session, which says how many the next one should have, and at most."""

LEAST_EXCHANGES, MOST_EXCHANGES = 3, 30
"""Exchanges of a session that are timed. The fastest counts: others may use links and processors meanwhile."""

ROWS_PER_PAIR = 16
"""Rows of one byte that a short exchange has for every pair of workers. With fewer, some pairs would have none."""

INDEX_SECONDS = 1.2e-8
"""What a row takes in the next index of a partition and in the digests of a vote: 8 to 20 ns on our machines."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Results of a measurement.

    Parameters
    ----------
    link_alone, link_together
        Bytes per second into a worker: while two workers exchange, and while all do.
    server
        Bytes per second from the server to all workers; None without a dedicated server.
    storage_alone, storage_together
        Bytes of rows per second: read by one worker alone, and by all workers at once in total; None without a dataset.
    busy_before, busy_network, busy_storage
        Processor utilization before the measurement, while all workers exchange, and while all workers read. If a value
        is near 1, the processors were measured, not the network or the storage.
    """

    cluster: ClusterRates
    seconds: float
    link_alone: float
    link_together: float
    server: float | None
    storage_alone: float | None
    storage_together: float | None
    busy_before: float
    busy_network: float
    busy_storage: float | None


def measure_cluster(
    client: Client, dataset: Dataset | None, *, row_nbytes: int = 1024, seconds: float = 12.0
) -> Measurement:
    """Measure the links, storage and processors of a cluster by short sessions.

    Other work of the cluster is not stopped, so measure an idle cluster. Generated rows are exchanged, and the first
    rows of the dataset are loaded. Caches of the storage or the operating system affect the result.

    Parameters
    ----------
    client
        Client of the cluster. The scheduler needs dshuffle, too, and keeps its plugin.
    dataset
        Dataset that the workers read. If None, the storage is not measured.
    row_nbytes
        Bytes per sample, if there is no dataset.
    seconds
        Duration of the measurement, at most 20. Less than 3 seconds gives only a rough estimate.

    Raises
    ------
    InvalidParameter
        If ``seconds`` is not in (0, 20], or ``row_nbytes`` is not a positive integer.
    ClusterError
        If there is no worker that trains, a worker is lost or paused during the measurement, or a worker or the
        scheduler does not answer within ``dshuffle.timeout``.
    """
    return measure_workers(client, EVERY_WORKER, dataset, row_nbytes=row_nbytes, seconds=seconds)


def measure_workers(
    client: Client, choice: WorkerChoice, dataset: Dataset | None, *, row_nbytes: int = 1024, seconds: float
) -> Measurement:
    """Measure some workers of a cluster. See :func:`measure_cluster`."""
    if not 0 < seconds <= LONGEST:
        raise InvalidParameter.of("seconds", seconds, f"within (0, {LONGEST:g}]")
    row_nbytes = as_integer("row_nbytes", row_nbytes, 1) if dataset is None else max(1, dataset.row_nbytes)
    members = [worker for worker in WorkerFacts.of_all(cluster_info(client)["workers"]) if choice.allows(worker)]
    serving = [worker.address for worker in members if only_serves(worker.resources)]
    workers = [worker.address for worker in members if not only_serves(worker.resources)]
    if not workers:
        raise ClusterError(
            f"none of the {len(members)} workers can train: all have the resource {SERVER_RESOURCE!r}. Add a worker "
            "without it"
        )
    try:
        return _measured(client, workers, serving[0] if serving else None, dataset, row_nbytes, seconds)
    except TimeoutError as error:
        raise ClusterError(f"the cluster could not be measured: {error}") from error
    except CacheBudgetError as error:
        raise ClusterError(f"the cluster cannot be measured: {error}") from error
    except OSError as error:
        raise ClusterError(f"a worker was lost while the cluster was measured: {error}") from error


async def look_at_machine(seconds: float) -> tuple[str, int, float]:
    """Name of this machine, how many of its processors this process may use, and how busy they are for some time."""
    before = ProcessorTimes.now()
    await asyncio.sleep(seconds)
    boot = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and network namespaces of a machine
    name = boot.read_text().strip() if boot.exists() else os.uname().nodename
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return name, cores, 1 - ProcessorTimes.now().idle_since(before)


def shared_links(machines: Sequence[str]) -> tuple[int, float]:
    """Most workers on a machine, and the fraction of a worker's peers on others; 0 if links are not shared equally."""
    counts, n_workers = Counter(machines).values(), len(machines)
    most = max(counts)
    return most, (n_workers - most) / max(1, n_workers - 1) if len({*counts}) == 1 else 0.0


@dataclass(frozen=True, slots=True)
class _Phase:
    """Bytes that passed the slowest place in some seconds, how long all of it took, and how busy processors were."""

    nbytes: int
    seconds: float
    took: float
    busy: float

    @property
    def rate(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9)


def _measured(
    client: Client, workers: list[str], server: str | None, dataset: Dataset | None, row_nbytes: int, seconds: float
) -> Measurement:
    began, n = time.perf_counter(), len(workers)
    everybody = [*workers, *([server] if server else [])]
    machines: dict[str, tuple[str, int, float]] = run_on_workers(
        client, look_at_machine, 0.03 * seconds, workers=everybody
    )
    names = {address: machines[address][0] for address in workers}
    cores, before = min(machine[1] for machine in machines.values()), max(machine[2] for machine in machines.values())
    each, outside = shared_links([*names.values()])
    install_plugin(client)

    def processor_seconds(phase: _Phase) -> float:
        """Those of all machines; 0 if they cannot be told from what others use."""
        own = max(0.0, phase.busy - before) if before < IDLE else 0.0
        return own * cores * len({*names.values()}) * phase.took

    alone = together = served = by_one = by_all = None
    link, cluster = 1e9, ClusterRates(n, 1e9, 1e9)  # with a single worker the link does not matter
    if n > 1:
        empties, shorts = _short_exchanges(client, workers, 0.05 * seconds)
        empty, per_message = min(empties), (min(shorts) - min(empties)) / (n - 1)

        def exchange(among: Sequence[str], server: str | None) -> Callable[[int, float, int], _Phase]:
            return functools.partial(_exchange, client, among, server, row_nbytes, before, empty, per_message)

        elsewhere = (worker for worker in workers if names[worker] != names[workers[0]])
        pair = [workers[0], next(elsewhere, workers[1])]
        together = _grown(exchange(workers, None), 0.25 * seconds)
        alone = together if n == 2 else _grown(exchange(pair, None), 0.15 * seconds)
        served = _grown(exchange(workers, server), 0.15 * seconds) if server else None
        link = together.rate
        if together.busy >= BUSY:  # processors limited it
            link = max(link, alone.rate / max(1.0, each * outside))
        # Processor time per byte at each end. Messages are counted separately.
        each_end = (processor_seconds(together) / n - MESSAGE_SECONDS * (n - 1)) / 2 / together.nbytes
        rate = 1 / each_end if each_end > 0 else cluster.send_rate
        extra = max(0.0, statistics.median(shorts) - statistics.median(empties))
        cluster = dataclasses.replace(
            cluster,
            send_rate=rate,
            receive_rate=rate,
            epoch_seconds=statistics.median(empties),
            first_message_seconds=extra / ((n - 1) * max(1.0, each / cores)),
        )
    cluster = dataclasses.replace(
        cluster,
        link_up=link,
        link_down=link,
        server_up=max(served.rate, link if served.busy >= BUSY else 0.0) if served else link if server else None,
        cores=cores,
        machine_workers=each,
        server_on_machine=bool(server) and machines[str(server)][0] in names.values(),
        index_seconds=INDEX_SECONDS,
        wire_overhead=0.0,  # the measured rates do not count headers
    )
    if dataset is not None:
        alone_in, all_in = (functools.partial(_read, client, among, dataset) for among in (workers[:1], workers))
        alone_in(0)  # this loads code
        chunk = alone_in(0)
        by_one = _grown(alone_in, 0.15 * seconds, 2, 2 * MOST_BYTES)
        by_all = _grown(all_in, 0.2 * seconds, 2, MOST_BYTES * n)
        busy = processor_seconds(by_all)
        cluster = dataclasses.replace(
            cluster,
            storage=max(by_all.rate, by_one.rate),
            storage_client=by_one.rate,
            request_seconds=max(0.0, chunk.seconds - chunk.nbytes / by_one.rate),
            # Storage that is faster than the link is not reached over the link.
            storage_over_links=by_one.rate < 1.2 * link,
            read_rate=by_all.nbytes / busy if busy else cluster.read_rate,
        )
    return Measurement(
        cluster=cluster,
        seconds=time.perf_counter() - began,
        link_alone=alone.rate if alone else 0.0,
        link_together=together.rate if together else 0.0,
        server=served.rate if served else None,
        storage_alone=by_one.rate if by_one else None,
        storage_together=by_all.rate if by_all else None,
        busy_before=before,
        busy_network=together.busy if together else 0.0,
        busy_storage=by_all.busy if by_all else None,
    )


def _exchange(
    client: Client,
    workers: Sequence[str],
    server: str | None,
    row_nbytes: int,
    before: float,
    empty: float,
    per_message: float,
    nbytes: int,
    seconds: float,
    least: int,
) -> _Phase:
    """The fastest exchange of generated rows, of which each worker holds some bytes."""
    n = len(workers)
    row = max(1, min(row_nbytes, MOST_BYTES // 32 // n))
    share = max(8 * n, nbytes // row)  # with few rows, none may move
    choices = Choices(delivery="server" if server else "peer")
    _, exchanges = _session(client, workers, blank_dataset(share * n, row, share), choices, server, seconds, least)

    def moved_by(measures: Measures) -> int:
        return measures.server_sent_bytes if server else max(measures.wire_received_bytes)

    fastest = max(exchanges, key=lambda exchange: moved_by(exchange.measures) / exchange.exchange_seconds)
    moved, took, busy = moved_by(fastest.measures), fastest.exchange_seconds, 1 - fastest.measures.cpu_idle
    work, model = Work(share * n, row, choices), ClusterRates(n, moved / took, moved / took)
    # The model adds what a message takes at both ends, and the cubes of the seconds of links and processors.
    ends = ends_seconds(work, model, loads_of(model, work, most_samples=10_000))
    own = min(max(0.0, busy - before), BUSY)
    links = max(took - empty - per_message * (1 if server else n - 1) - ends, took / 10) * math.pow(1 - own**3, 1 / 3)
    return _Phase(moved, links, took, busy)


def _read(client: Client, workers: Sequence[str], dataset: Dataset, nbytes: int, *_: float) -> _Phase:
    """The fastest of a load and an exchange that read about so many bytes, of the first chunks of a dataset."""
    workers = workers[: dataset.n_samples]
    n, chunk = len(workers), unit_rows(dataset)
    each = nbytes // (max(1, dataset.row_nbytes) * n)
    # A worker that needs whole blocks reads them in one call.
    block = min(group.step for group in RowBlocks(dataset, n).groups)
    unit = block if each >= block else chunk
    rows = min(max(1, each // unit) * unit * n, dataset.n_samples)
    # The exchange moves whole chunks, if every worker can have one.
    moves = n > 1 and rows >= n * chunk
    choices = Choices(Chunks(), "storage") if moves else Choices()
    load, exchanges = _session(client, workers, dataset.select(np.arange(rows)), choices, None, 0.0, int(moves))
    phases = [
        _Phase(
            record.measures.store_delivered_bytes,
            record.measures.store_seconds,
            record.exchange_seconds,
            1 - record.measures.cpu_idle,
        )
        for record in (load, *exchanges)
    ]
    return max(phases, key=lambda phase: phase.rate)


def _grown(
    measure: Callable[[int, float, int], _Phase], seconds: float, parts: int = 5, most: int = MOST_BYTES
) -> _Phase:
    """Measure with so many bytes that they take one of some parts of the time, as far as workers have room."""
    began = time.perf_counter()
    first = measure(LEAST_BYTES, 0.0, 1)
    nbytes = int(min(most, LEAST_BYTES * seconds / parts / max(first.seconds, 1e-9)))
    try:
        left = began + seconds - time.perf_counter()
        return measure(max(nbytes, LEAST_BYTES), left, LEAST_EXCHANGES)
    except CacheBudgetError:
        return first


def _short_exchanges(client: Client, workers: Sequence[str], seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of epochs in which no rows move, and of one short message from every worker to every other."""
    rows = blank_dataset(ROWS_PER_PAIR * len(workers) ** 2)
    _, exchanges = _session(client, workers, rows, Choices(every=2), None, seconds, 12)
    took = [exchange.exchange_seconds for exchange in exchanges[2:]]  # the first exchange opens connections
    return took[::2], took[1::2]


def _session(
    client: Client,
    workers: Sequence[str],
    dataset: Dataset,
    choices: Choices,
    server: str | None,
    seconds: float,
    least: int,
) -> tuple[EpochExchange, list[EpochExchange]]:
    """Open a session of all these workers for some seconds; its load, and its exchanges."""
    options = SessionOptions(workers=tuple(workers), server=server, on_loss="raise")
    choices = resolved(dataset, dataclasses.replace(choices, sharding="contiguous"))
    lost = "a worker was lost while the cluster was measured"
    try:
        choice = resolved_choice(client, options)
    except InvalidParameter as error:  # these workers were there at the start
        raise ClusterError(f"{lost}: {error}") from error
    request = SessionRequest(
        session_id=new_id(),
        client_id=client.id,
        dataset=DatasetReference.of(dataset),
        choices=choices,
        deliveries={choices.delivery: 0.0},
        options=options,
        settings=Settings.from_config(adaptive=is_adaptive(client)),
        start=Remainder(0, ()),
        choice=choice,
    )
    session, ends = OpenSession(client, request), time.perf_counter() + seconds
    try:
        if session.n_workers != len(workers):
            raise ClusterError(f"{lost}, or is paused: {session.n_workers} of {len(workers)} take part")
        loaded = session.calls.ask(EpochExchange, "advance", epoch=0)
        exchanges: list[EpochExchange] = []
        while len(exchanges) < least or (least and len(exchanges) < MOST_EXCHANGES and time.perf_counter() < ends):
            session.calls.tell("prefetch")
            exchanges.append(session.calls.ask(EpochExchange, "advance", epoch=len(exchanges) + 1))
            time.sleep(0.005 + exchanges[-1].exchange_seconds / 2)  # the next exchange is planned meanwhile
        return loaded, exchanges
    finally:
        session.close()


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
    suitable = suitable_deliveries(
        n_workers,
        excess=work.excess(n_workers) > 0,
        has_server=bool(serving),
        has_storage=cluster.storage is not None,
        server_holds_all=holds_all,
    )
    families: dict[str, Delivery] = {}
    for delivery in suitable:
        families.setdefault(delivery.family, delivery)
    ways = [work.with_choices(delivery=delivery.name) for delivery in families.values()]
    predicted = {prediction.work.delivery: prediction.exchange_seconds for prediction in compare_costs(cluster, ways)}
    return {delivery.name: time for delivery, time in predicted.items()}
