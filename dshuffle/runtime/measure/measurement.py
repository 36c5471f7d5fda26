"""Measure a cluster by short sessions for the cost model, and look for what commonly goes wrong on it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.metadata
import math
import os
import platform
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from dask.system import CPU_COUNT
from distributed import Client, Worker

from dshuffle.checks import as_integer
from dshuffle.errors import CacheBudgetError, ClusterError, DShuffleError, InvalidParameter
from dshuffle.planning import Choices, Chunks, Remainder, ShuffleSpec
from dshuffle.planning.cost import MESSAGE_SECONDS, ClusterRates, Work, compare_costs, ends_seconds, loads_of
from dshuffle.planning.delivery import suitable_deliveries
from dshuffle.runtime.client.cluster_view import answer, cluster_info, is_adaptive, run_on_workers, workers_of
from dshuffle.runtime.client.session_client import OpenSession, install_plugin, session_request
from dshuffle.runtime.dataset_inputs import resolved, unit_rows
from dshuffle.runtime.messages import EpochExchange
from dshuffle.runtime.process import ProcessorTimes, files_needed, member_nbytes
from dshuffle.runtime.session_spec import (
    EVERY_WORKER,
    SERVER_RESOURCE,
    DatasetReference,
    SessionOptions,
    WorkerChoice,
    only_serves,
)
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset
from dshuffle.store.dataset import blank_dataset
from dshuffle.store.row_blocks import RowBlocks
from dshuffle.units import human_bytes, human_rate, human_seconds

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

PROBE_SECONDS = 4.0
"""Duration of the measurement for the delivery ``"auto"`` if the user does not describe the cluster."""

PACKAGES = ("dshuffle", "dask", "distributed", "numpy", "zarr", "numba", "cloudpickle", "msgpack")
"""Packages that must have the same version everywhere."""

CLOCKS = 1.0
"""Seconds by which clocks may differ. Certificates and signatures of S3 requests have times."""

USED_MEMORY = 0.6
"""Part of its memory limit that a worker may use before a session opens."""

FEWEST_FILES = 1024
"""Open files that any process should be allowed, whatever the number of workers: chunks and objects at once."""

SLOW_LINK = 12.5e6
"""A link with fewer bytes per second (100 Mbit/s) is probably in the wrong network."""

MEASURING_SECONDS = 3.0
"""Duration of the measurement of links."""

LOST = "a worker was lost while the cluster was measured"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Results of a measurement."""

    cluster: ClusterRates
    seconds: float
    # Bytes per second into a worker: while two workers exchange, and while all do.
    link_alone: float = 0.0
    link_together: float = 0.0
    server: float | None = None  # bytes per second from the server to all workers; None without a dedicated server
    # Bytes of rows per second: read by one worker alone, and by all workers at once in total; None without a dataset.
    storage_alone: float | None = None
    storage_together: float | None = None
    # Processor utilization before the measurement, while all workers exchange, and while all workers read. If a value
    # is near 1, the processors were measured, not the network or the storage.
    busy_before: float = 0.0
    busy_network: float = 0.0
    busy_storage: float | None = None


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
    members = workers_of(client, choice)
    serving = [worker.address for worker in members if only_serves(worker.resources)]
    workers = [worker.address for worker in members if not only_serves(worker.resources)]
    if not workers:
        raise ClusterError(
            f"none of the {len(members)} workers can train: all have the resource {SERVER_RESOURCE!r}. Add a worker "
            "without it"
        )
    try:
        return _Meter(client, workers, next(iter(serving), None), row_nbytes, seconds).measured(dataset)
    except (TimeoutError, CacheBudgetError) as error:
        raise ClusterError(f"the cluster cannot be measured: {error}") from error
    except OSError as error:
        raise ClusterError(f"{LOST}: {error}") from error


async def look_at_machine(seconds: float) -> tuple[str, int, float]:
    """Name of this machine, how many of its processors this process may use, and how busy they are for some time."""
    before = ProcessorTimes.now()
    await asyncio.sleep(seconds)
    boot = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and network namespaces of a machine
    name = boot.read_text().strip() if boot.exists() else os.uname().nodename
    return name, CPU_COUNT, 1 - ProcessorTimes.now().idle_since(before)


def shared_links(machines: Sequence[str]) -> tuple[int, float]:
    """Most workers on a machine, and the fraction of a worker's peers on others; 0 if links are not shared equally."""
    counts, n_workers = Counter(machines).values(), len(machines)
    most = max(counts)
    return most, (n_workers - most) / max(1, n_workers - 1) if len({*counts}) == 1 else 0.0


class _Phase(NamedTuple):
    """Bytes that passed the slowest place in some seconds, how long all of it took, and how busy processors were."""

    nbytes: int
    seconds: float
    took: float
    busy: float

    @property
    def rate(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9)


class _Meter:
    """Measures some workers, and the one that serves, for some seconds."""

    def __init__(self, client: Client, workers: list[str], server: str | None, row_nbytes: int, seconds: float) -> None:
        self.client, self.workers, self.server = client, workers, server
        self.row_nbytes, self.seconds = row_nbytes, seconds
        self.empty = self.per_message = 0.0  # seconds of an exchange without rows, and of a message in another one

    def measured(self, dataset: Dataset | None) -> Measurement:
        """Measure links, the server, the storage of a dataset, and processors."""
        began, n = time.perf_counter(), len(self.workers)
        workers, server, seconds = self.workers, self.server, self.seconds
        everybody = [*workers, *([server] if server else [])]
        machines: dict[str, tuple[str, int, float]] = run_on_workers(
            self.client, look_at_machine, 0.03 * seconds, workers=everybody
        )
        names = {address: machines[address][0] for address in workers}
        cores = min(cores for _, cores, _ in machines.values())
        self.before = before = max(busy for *_, busy in machines.values())
        each, outside = shared_links([*names.values()])
        install_plugin(self.client)

        def processor_seconds(phase: _Phase) -> float:
            """Those of all machines; 0 if they cannot be told from what others use."""
            own = max(0.0, phase.busy - before) if before < IDLE else 0.0
            return own * cores * len({*names.values()}) * phase.took

        found: dict[str, Any] = {"busy_before": before}
        link = 1e9  # with a single worker it does not matter
        rates: dict[str, Any] = {
            "cores": cores,
            "machine_workers": each,
            "server_on_machine": bool(server) and machines[str(server)][0] in names.values(),
            "index_seconds": INDEX_SECONDS,
            "wire_overhead": 0.0,  # the measured rates do not count headers
        }
        exchange = functools.partial(functools.partial, self._exchange)
        if n > 1:
            empties, shorts = _short_exchanges(self.client, workers, 0.05 * seconds)
            self.empty, self.per_message = min(empties), (min(shorts) - min(empties)) / (n - 1)
            elsewhere = (worker for worker in workers if names[worker] != names[workers[0]])
            together = _grown(exchange(workers, None), 0.25 * seconds)
            pair = [workers[0], next(elsewhere, workers[1])]
            alone = together if n == 2 else _grown(exchange(pair, None), 0.15 * seconds)
            link = together.rate
            if together.busy >= BUSY:  # processors limited it
                link = max(link, alone.rate / max(1.0, each * outside))
            found |= {"link_alone": alone.rate, "link_together": together.rate, "busy_network": together.busy}
            # Processor time per byte at each end. Messages are counted separately.
            each_end = (processor_seconds(together) / n - MESSAGE_SECONDS * (n - 1)) / 2 / together.nbytes
            if each_end > 0:
                rates |= {"send_rate": 1 / each_end, "receive_rate": 1 / each_end}
            rates["epoch_seconds"] = statistics.median(empties)
            extra = max(0.0, statistics.median(shorts) - statistics.median(empties))
            rates["first_message_seconds"] = extra / ((n - 1) * max(1.0, each / cores))
        if server:
            rates["server_up"] = link
            if n > 1:
                served = _grown(exchange(workers, server), 0.15 * seconds)
                rates["server_up"] = max(served.rate, link if served.busy >= BUSY else 0.0)
                found["server"] = served.rate
        if dataset is not None:
            alone_in, all_in = (functools.partial(self._read, among, dataset) for among in (workers[:1], workers))
            alone_in(0)  # this loads code
            chunk = alone_in(0)
            by_one = _grown(alone_in, 0.15 * seconds, 2, 2 * MOST_BYTES)
            by_all = _grown(all_in, 0.2 * seconds, 3, MOST_BYTES * n)
            rates |= {
                "storage": max(by_all.rate, by_one.rate),
                "storage_client": by_one.rate,
                "request_seconds": max(0.0, chunk.seconds - chunk.nbytes / by_one.rate),
                # Storage that is faster than the link is not reached over the link.
                "storage_over_links": by_one.rate < 1.2 * link,
            }
            if busy := processor_seconds(by_all):
                rates["read_rate"] = by_all.nbytes / busy
            found |= {"storage_alone": by_one.rate, "storage_together": by_all.rate, "busy_storage": by_all.busy}
        return Measurement(ClusterRates(n, link, link, **rates), time.perf_counter() - began, **found)

    def _exchange(self, workers: Sequence[str], server: str | None, nbytes: int, seconds: float, least: int) -> _Phase:
        """The fastest exchange of generated rows, of which each worker holds some bytes."""
        n = len(workers)
        row = max(1, min(self.row_nbytes, MOST_BYTES // 32 // n))
        share = max(8 * n, nbytes // row)  # with few rows, none may move
        choices, rows = Choices(delivery="server" if server else "peer"), blank_dataset(share * n, row, share)
        _, exchanges = _session(self.client, workers, rows, choices, server, seconds, least)

        def moved_by(exchange: EpochExchange) -> int:
            measures = exchange.measures
            return measures.server_sent_bytes if server else max(measures.wire_received_bytes)

        fastest = max(exchanges, key=lambda exchange: moved_by(exchange) / exchange.exchange_seconds)
        moved, took, busy = moved_by(fastest), fastest.exchange_seconds, 1 - fastest.measures.cpu_idle
        work, model = Work(share * n, row, choices), ClusterRates(n, moved / took, moved / took)
        # The model adds what a message takes at both ends.
        ends = ends_seconds(work, model, loads_of(model, work, most_samples=10_000))
        without = took - self.empty - self.per_message * (1 if server else n - 1) - ends
        return _Phase(moved, max(without, took / 10) * self._outside_processors(busy), took, busy)

    def _outside_processors(self, busy: float) -> float:
        """Part of some seconds that links or the store take: the model adds its cube to that of processors."""
        return math.cbrt(1 - min(max(0.0, busy - self.before), BUSY) ** 3)

    def _read(
        self, workers: Sequence[str], dataset: Dataset, nbytes: int, seconds: float = 0.0, least: int = 1
    ) -> _Phase:
        """The fastest of a load and of exchanges that read about so many bytes, of the first chunks of a dataset."""
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
        part = dataset.select(np.arange(rows))
        load, exchanges = _session(self.client, workers, part, choices, None, seconds, least * moves)
        phases = [
            _Phase(
                measures.store_delivered_bytes,
                measures.store_seconds * self._outside_processors(1 - measures.cpu_idle),
                record.exchange_seconds,
                1 - measures.cpu_idle,
            )
            for record in (load, *exchanges)
            for measures in [record.measures]
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
    settings = Settings.from_config(adaptive=is_adaptive(client))
    asked = {"deliveries": {choices.delivery: 0.0}, "start": Remainder(0, ())}
    try:
        request = session_request(client, dataset, choices, options, settings, **asked)
    except InvalidParameter as error:  # these workers were there at the start
        raise ClusterError(f"{LOST}: {error}") from error
    session, ends = OpenSession(client, request), time.perf_counter() + seconds
    try:
        if session.n_workers != len(workers):
            raise ClusterError(f"{LOST}, or is paused: {session.n_workers} of {len(workers)} take part")
        loaded = session.ask(EpochExchange, "advance", epoch=0)
        exchanges: list[EpochExchange] = []
        while len(exchanges) < least or (least and len(exchanges) < MOST_EXCHANGES and time.perf_counter() < ends):
            session.tell("prefetch")
            exchanges.append(session.ask(EpochExchange, "advance", epoch=len(exchanges) + 1))
            time.sleep(0.005 + exchanges[-1].exchange_seconds / 2)  # the next exchange is planned meanwhile
        return loaded, exchanges
    finally:
        session.close()


def work_of(dataset: Dataset, choices: Choices) -> Work:
    """Describe an epoch of a dataset for the cost model."""
    return Work(dataset.n_samples, max(1, dataset.row_nbytes), choices, chunk_rows=unit_rows(dataset))


def expected_seconds(
    client: Client, dataset: Dataset, choices: Choices, options: SessionOptions, *, memory_fraction: float
) -> dict[str, float]:
    """Predict the seconds of an exchange for each delivery. Simpler deliveries come first, so that they win ties.

    ``server`` and a coded delivery are included only if the cluster has a dedicated server. The coded delivery also
    requires that the server can hold all rows.
    """
    workers, server = workers_of(client, options.choice), options.server
    serving = [
        worker
        for worker in workers
        if (only_serves(worker.resources) if server is None else server in (worker.address, str(worker.name)))
    ]
    cluster, n_workers = options.cluster, len(workers) - len(serving)
    if cluster is None:
        cluster = measure_workers(client, options.choice, dataset, seconds=PROBE_SECONDS).cluster
    elif cluster.n_workers != n_workers:
        allowed = f"{n_workers}, the number of workers that train"
        raise InvalidParameter.of("cluster.n_workers", cluster.n_workers, allowed)
    described, whole = cluster_info(client)["workers"], dataset.n_samples * dataset.row_nbytes
    limits = [described.get(worker.address, {}).get("memory_limit") for worker in serving[:1]]
    work = work_of(dataset, choices.with_one_delivery())
    suitable = suitable_deliveries(
        n_workers,
        excess=work.excess(n_workers) > 0,
        has_server=bool(serving),
        has_storage=cluster.storage is not None,
        server_holds_all=all(not limit or whole <= memory_fraction * limit for limit in limits),
    )
    families: dict[str, str] = {}
    for delivery in suitable:
        families.setdefault(delivery.family, delivery.name)
    ways = [work.with_choices(delivery=name) for name in families.values()]
    return {each.work.delivery.name: each.exchange_seconds for each in compare_costs(cluster, ways)}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do; nothing if the remedy is empty."""

    subject: str
    observation: str
    remedy: str = ""
    is_error: bool = False

    @property
    def level(self) -> str:
        """How bad it is: ``"ok"``, ``"warning"`` or ``"error"``."""
        return "error" if self.is_error else "warning" if self.remedy else "ok"


def look_at_process() -> dict[str, Any]:
    """Facts about the process in which this runs. Runs on the client, the scheduler and every worker."""
    installed = {name: [*importlib.metadata.distributions(name=name)] for name in PACKAGES}
    versions = {"python": platform.python_version()}
    versions |= {name: found[0].version if found else "missing" for name, found in installed.items()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"versions": versions, "clock": time.time(), "open_files": soft, "most_open_files": hard}


async def look_at_worker(dataset: DatasetReference | None, dask_worker: Worker) -> dict[str, Any]:
    """Facts about a worker, and whether it can open a dataset. Runs on every worker."""
    seen = ""
    try:
        if dataset is not None:
            await asyncio.to_thread(dataset.open)
    except Exception as error:  # whatever a store raises
        seen = f"{type(error).__name__}: {error}"
    return {
        **look_at_process(),
        "dataset_error": seen,
        "trains": not only_serves(dask_worker.state.total_resources),
        "memory": psutil.Process().memory_info().rss,
        "memory_limit": dask_worker.memory_manager.memory_limit or 0,
    }


def diagnose(client: Client, dataset: Dataset | None = None) -> list[Finding]:
    """Look at a client, its scheduler and all workers."""
    workers = cluster_info(client)["workers"]
    reference = None if dataset is None else DatasetReference.of(dataset)
    facts, findings, before = {"client": look_at_process()}, list[Finding](), time.time()
    try:
        replies = run_on_workers(client, look_at_worker, reference, on_error="return")
    except OSError as error:
        text = f"the workers cannot be looked at: {error}. See the dashboard for those that hang"
        raise ClusterError(text) from error
    try:
        replies["scheduler"] = answer(client, lambda: client._run_on_scheduler(look_at_process), "the scheduler")
    except Exception as error:  # whatever the import raises there
        replies["scheduler"] = error
    after = time.time()

    def look(subject: str, wrong: list[str], bad: str, remedy: str, fine: str, *, is_error: bool = False) -> None:
        """Add what is wrong at some places, of which the first three are named, or that all is fine."""
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        bad = f"{bad} {', '.join(wrong[:3])}{more}"
        findings.append(Finding(subject, bad, remedy, is_error) if wrong else Finding(subject, fine))

    if workers:
        text = f"{len(workers)} on {len({worker['host'] for worker in workers.values()})} hosts"
        if serving := sum(only_serves(worker["resources"]) for worker in workers.values()):
            text += f", of which {serving} only serve"
        paused = [where for where, worker in workers.items() if worker["status"] == "paused"]
        remedy = "Dask pauses a worker at 80 % of its memory limit. Free memory there, or raise the limit."
        look("workers", paused, f"{text}; paused:", remedy, text)
    else:
        findings.append(Finding("workers", "there are none", "Start workers, and wait for them.", True))
    for where, reply in replies.items():
        if isinstance(reply, BaseException):
            is_missing = isinstance(reply, ImportError)
            remedy = "Install the same version of dshuffle there." if is_missing else "See the log there."
            findings.append(Finding("reachable", f"{where}: {type(reply).__name__}: {reply}", remedy, True))
        else:
            facts[where] = reply
    own = {where: process for where, process in facts.items() if "memory" in process}

    here, is_same = facts["client"]["versions"], True
    for name in here:
        installed = {where: process["versions"][name] for where, process in facts.items()}
        [(usual, _)] = Counter(installed.values()).most_common(1)
        if differences := [f"{where} has {version}" for where, version in installed.items() if version != usual]:
            is_same = False
            is_minor = name == "python" and len({version.rpartition(".")[0] for version in installed.values()}) == 1
            remedy = "Install the same versions everywhere."
            look("versions", differences, f"{name} is {usual}, but", remedy, "", is_error=not is_minor)
    if is_same:
        text = ", ".join(f"{name} {here[name]}" for name in ("python", "dshuffle", "distributed", "zarr", "numba"))
        findings.append(Finding("versions", f"the same everywhere: {text}"))

    apart = {where: max(before - process["clock"], process["clock"] - after - 1.0) for where, process in facts.items()}
    wrong = [f"{where} by {human_seconds(seconds)}" for where, seconds in apart.items() if seconds > CLOCKS]
    remedy = "Synchronize the clocks (NTP). S3 refuses requests of a wrong time, and logs cannot be compared."
    look("clocks", wrong, "differ from the client's:", remedy, "agree within a second")

    # A connection for each worker; workers raise their limits to the hard ones.
    needed = max(FEWEST_FILES, files_needed(len(workers)))
    limits = {where: each["most_open_files" if where in own else "open_files"] for where, each in facts.items()}
    wrong = [f"{where} {limit}" for where, limit in limits.items() if 0 <= limit < needed]
    bad = f"{len(workers)} workers need {needed}, and few are allowed:"
    remedy = f"Raise the limit to {needed} or more (ulimit -n; for workers the hard limit, ulimit -Hn)."
    look("open files", wrong, bad, remedy, f"at least {needed} are allowed everywhere")

    limited = {where: worker for where, worker in own.items() if worker["memory_limit"]}
    wrong = [
        f"{where} uses {human_bytes(worker['memory'])} of {human_bytes(worker['memory_limit'])}"
        for where, worker in limited.items()
        if worker["memory"] > USED_MEMORY * worker["memory_limit"]
    ]
    fine = "every worker may use more" if limited else "none of the workers has a limit"
    look("memory", wrong, "little is left:", "Restart these workers, or raise the limit.", fine)
    trains = [worker["memory_limit"] for worker in limited.values() if worker["trains"]]
    if dataset is not None and trains and dataset.n_samples >= len(trains):
        needed = member_nbytes(ShuffleSpec(dataset.n_samples, len(trains), Choices()), dataset.layout)
        room = int(Settings.from_config().memory_fraction * min(trains))
        text = f"a partition takes {human_bytes(needed)} of the {human_bytes(room)} that a worker may use for it"
        remedy = "Use more workers, a larger memory limit, or a cache_directory." if needed > room else ""
        findings.append(Finding("memory", text, remedy))
    if dataset is not None:
        wrong = [f"{where}: {worker['dataset_error']}" for where, worker in own.items() if worker["dataset_error"]]
        remedy = "All workers must see the same data under the same URL, with the same credentials."
        fine = f"{dataset.n_samples:,} samples, the same on every worker"
        look("dataset", wrong, "it cannot be opened:", remedy, fine, is_error=True)
    return findings


def of_links(client: Client, dataset: Dataset, seconds: float = MEASURING_SECONDS) -> Finding:
    """Rates at which workers receive from each other and read the dataset, measured."""
    try:
        found = measure_cluster(client, dataset, seconds=seconds)
    except DShuffleError as error:
        return Finding("links", str(error), "See the logs of the workers.", True)
    text = f"all workers together read {human_rate(found.storage_together)} of rows from the dataset"
    if found.link_alone:
        alone, together = human_rate(found.link_alone), human_rate(found.link_together)
        text = f"a worker receives {alone} from another one, and {together} while all exchange; {text}"
    slow = 0 < found.link_alone < SLOW_LINK
    return Finding("links", text, "Workers may use the wrong network. Name it with interface=." if slow else "")
