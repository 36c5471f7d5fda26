"""Measure a running cluster, so that the cost model can predict the time of each delivery on it."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Client, Future, KilledWorker

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.planning.cost import ClusterRates
from dshuffle.planning.cost.cluster import MESSAGE_SECONDS
from dshuffle.runtime.client.bounded_calls import run_on_workers
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.dataset_inputs import unit_rows
from dshuffle.runtime.measure import probe_tasks
from dshuffle.runtime.measure.probe_tasks import Kernels, Machine, Traffic
from dshuffle.runtime.measure.shared_links import SharedLinks, pairs_between_machines
from dshuffle.runtime.measure.short_exchanges import time_short_exchanges
from dshuffle.runtime.measure.task_results import task_results
from dshuffle.runtime.server_resource import SERVER_RESOURCE, only_serves
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker_choice import EVERY_WORKER, WorkerChoice, WorkerFacts
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)

LONGEST = 20.0
"""Maximum duration of a measurement in seconds."""
PAIRS = 2
"""Number of links that are measured alone."""
BUSY = 0.85
"""Processor utilization at which the processors, not the network, count as the bottleneck."""

REMOVED_WITHIN = 15.0
"""Seconds in which workers must remove the probe, also with a longer ``dshuffle.timeout``."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Results of a measurement.

    Parameters
    ----------
    cluster
        Measured rates, for :func:`~dshuffle.planning.cost.predict`.
    seconds
        Duration of the measurement.
    link_alone, link_together
        Bytes per second into a worker: from one other worker without other traffic, and from all others while all
        workers exchange.
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
    """Measure the links, storage and processors of a cluster.

    Other work of the cluster is not stopped, so measure an idle cluster. Some parts of the measurement are tasks: they
    wait for the tasks that their workers have already, however long these take. Rows are read from the dataset, each
    chunk at most once per worker and phase. Caches of the storage or the operating system affect the result. What an
    exchange takes whatever it moves is timed in a session of its own, with few rows that are stored nowhere.

    Parameters
    ----------
    client
        Client of the cluster.
    dataset
        Dataset that the workers read. If None, the storage is not measured.
    row_nbytes
        Bytes per sample, if there is no dataset.
    seconds
        Duration of the measurement, at most 20. Less than 3 seconds gives only a rough estimate.

    Notes
    -----
    Very short exchanges are timed in a separate session. So the scheduler needs dshuffle, too, and keeps its plugin.

    Raises
    ------
    InvalidParameter
        If ``seconds`` is not in (0, 20], or ``row_nbytes`` is not a positive integer.
    ClusterError
        If there is no worker that trains, a worker is lost during the measurement, or a worker or the scheduler does
        not answer within ``dshuffle.timeout``.
    """
    return measure_workers(client, EVERY_WORKER, dataset, row_nbytes=row_nbytes, seconds=seconds)


def measure_workers(
    client: Client, choice: WorkerChoice, dataset: Dataset | None, *, row_nbytes: int = 1024, seconds: float
) -> Measurement:
    """Measure some workers of a cluster. See :func:`measure_cluster`."""
    if not 0 < seconds <= LONGEST:
        raise InvalidParameter.of("seconds", seconds, f"within (0, {LONGEST:g}]")
    members = _members(client, choice)
    try:
        probe = _Probe(client, dataset, row_nbytes, *members)
        run_on_workers(client, probe_tasks.install, workers=probe.everybody)
        try:
            return probe.measure(seconds)
        finally:
            probe.remove()
    except TimeoutError as error:
        raise ClusterError(f"the cluster could not be measured: {error}") from error
    except (OSError, KilledWorker) as error:
        raise ClusterError(f"a worker was lost while the cluster was measured: {error}") from error


def _members(client: Client, choice: WorkerChoice) -> tuple[list[str], str | None]:
    info = [worker for worker in WorkerFacts.of_all(cluster_info(client)["workers"]) if choice.allows(worker)]
    servers = [worker.address for worker in info if only_serves(worker.resources)]
    workers = [worker.address for worker in info if not only_serves(worker.resources)]
    if not workers:
        raise ClusterError(
            f"none of the {len(info)} workers can train: all have the resource {SERVER_RESOURCE!r}. Add a worker "
            "without it"
        )
    return workers, servers[0] if servers else None


@dataclass(frozen=True, slots=True)
class _Phase:
    """Combined traffic of the workers in one phase, and its processor time."""

    rates: list[float]
    nbytes: int
    messages: int
    seconds: float
    busy_seconds: float
    busy: float

    @property
    def rate(self) -> float:
        """Bytes per second of all workers together: the mean of a lower and an upper bound.

        All bytes divided by the longest time is too low if the last answer is late. The sum of the workers' own rates
        is too high if some finish early and leave shared resources to the others.
        """
        return (self.nbytes / self.seconds + math.fsum(self.rates)) / 2 if self.seconds else 0.0

    @property
    def median(self) -> float:
        """Median bytes per second of a worker."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def processor_seconds(self) -> float:
        """Processor seconds per byte."""
        return self.busy_seconds / self.nbytes if self.nbytes else 0.0


@dataclass(frozen=True, slots=True)
class _Reads:
    """Reads by one worker alone and by all at once, and the seconds of a request for one chunk."""

    alone: _Phase
    together: _Phase
    chunk_seconds: float
    chunk_nbytes: int

    @property
    def request_seconds(self) -> float:
        """Seconds from a request to its first byte."""
        return max(0.0, self.chunk_seconds - self.chunk_nbytes / self.alone.rate)


class _Probe:
    def __init__(
        self, client: Client, dataset: Dataset | None, row_nbytes: int, workers: list[str], server: str | None
    ) -> None:
        self.client = client
        self.dataset = dataset
        self.row_nbytes = as_integer("row_nbytes", row_nbytes, 1) if dataset is None else dataset.row_nbytes
        self.name = uuid.uuid4().hex
        self.server = server
        self.everybody = [*workers, *([server] if server else [])]
        self.machines = self._machines()
        # The workers of a machine are adjacent, as the cost model counts them.
        self.workers = sorted(workers, key=lambda address: (self.machines[address].name, address))
        self.machine_names = {address: self.machines[address].name for address in self.workers}

    def measure(self, seconds: float) -> Measurement:
        """Run all phases in sequence."""
        began = time.perf_counter()
        idle = self._phase(lambda: self._sleep(0.03 * seconds), 0.0)
        pairs = pairs_between_machines(self.workers, self.machine_names, PAIRS)
        alone = [
            rate
            for sender, receiver in pairs
            for rate in self._pull([sender], [receiver], 0.15 * seconds / len(pairs), idle.busy).rates
        ]
        together = self._pull(self.workers, self.workers, 0.2 * seconds, idle.busy)
        served = self._pull([self.server], self.workers, 0.15 * seconds, idle.busy) if self.server else None
        reads = None if self.dataset is None else self._reads(self.dataset, seconds, idle.busy)
        kernels: Kernels = self._run(probe_tasks.kernels, self.workers[:1], self.row_nbytes)[0]
        link_alone = statistics.median(alone) if alone else math.inf
        cluster = self._cluster(link_alone, together, served, reads, kernels, 0.05 * seconds)
        return Measurement(
            cluster=cluster,
            seconds=time.perf_counter() - began,
            link_alone=link_alone if alone else 0.0,
            link_together=together.median,
            server=served.rate if served else None,
            storage_alone=reads.alone.rate if reads else None,
            storage_together=reads.together.rate if reads else None,
            busy_before=idle.busy,
            busy_network=together.busy,
            busy_storage=reads.together.busy if reads else None,
        )

    def remove(self) -> None:
        """Undo what the probe has installed. Workers that do not answer keep it, which does no harm."""
        bounds: dict[str, Any] = {"workers": self.everybody, "answer_seconds": REMOVED_WITHIN}
        try:
            run_on_workers(self.client, probe_tasks.remove, self.name, **bounds, on_error="ignore")
        except OSError as error:
            logger.warning("dshuffle: what the measurement has installed stays on the workers: %s", error)

    def _cluster(
        self,
        link_alone: float,
        together: _Phase,
        served: _Phase | None,
        reads: _Reads | None,
        kernels: Kernels,
        seconds: float,
    ) -> ClusterRates:
        # If processors, not links, limit the exchange of all workers, use the rate of a link alone.
        link, shared, limited = together.median, SharedLinks.of(self.machine_names), together.busy >= BUSY
        if limited or not link or shared.exist:
            link = max(link, link_alone)
        if math.isinf(link):  # with a single worker the link does not matter
            link = kernels.gather
        cores = min(machine.cores for machine in self.machines.values())
        # Processor time per byte at each end, including work besides the network. Messages are counted separately.
        of_messages = MESSAGE_SECONDS * together.messages
        each_end = max(0.0, together.busy_seconds - of_messages) / max(1, together.nbytes) / 2
        cluster = ClusterRates(
            n_workers=len(self.workers),
            link_up=link,
            link_down=link,
            server_up=max(served.rate, link if served.busy >= BUSY else 0.0) if served else None,
            cores=cores,
            machine_workers=shared.machine_workers,
            rack_workers=shared.machine_workers if shared.exist else None,
            oversubscription=shared.oversubscription(link, together.median, limited=limited) if shared.exist else 1.0,
            server_on_machine=bool(self.server) and self.machines[str(self.server)].name in self.machine_names.values(),
            send_rate=1 / (each_end + 1 / kernels.gather),
            receive_rate=1 / (each_end + 1 / kernels.scatter),
            encode_rate=kernels.encode,
            decode_rate=kernels.decode,
            index_seconds=kernels.index_seconds,
            wire_overhead=0.0,  # the measured rates do not count headers
        )
        if len(self.workers) > 1:
            short = time_short_exchanges(self.client, self.workers, self.server, seconds)
            messages = (len(self.workers) - 1) * max(1.0, shared.machine_workers / cores)
            cluster = dataclasses.replace(
                cluster, epoch_seconds=short.empty, first_message_seconds=short.message_seconds(messages)
            )
        if reads is None:
            return cluster
        processor_seconds = reads.together.processor_seconds or reads.alone.processor_seconds
        return dataclasses.replace(
            cluster,
            storage=max(reads.together.rate, reads.alone.rate),
            storage_client=reads.alone.rate,
            request_seconds=reads.request_seconds,
            # Storage that is faster than the link is not reached over the link.
            storage_over_links=reads.alone.rate < 1.2 * link,
            read_rate=1 / processor_seconds if processor_seconds else kernels.scatter,
        )

    # -- phases ------------------------------------------------------------------------------------------------

    def _pull(self, senders: Sequence[str], receivers: Sequence[str], seconds: float, background: float) -> _Phase:
        to, by = list(receivers), list(senders)
        run_on_workers(self.client, probe_tasks.connect, workers=to, senders=by, receivers=to)

        def work() -> list[Traffic]:
            done = run_on_workers(
                self.client,
                probe_tasks.pull,
                workers=list(receivers),
                work_seconds=seconds,
                senders=senders,
                receivers=receivers,
                seconds=seconds,
                shares_memory=Settings.from_config().shared_memory,
            )
            return [traffic for traffic in done.values() if traffic.nbytes]

        return self._phase(work, background)

    def _reads(self, dataset: Dataset, seconds: float, background: float) -> _Reads:
        self._run(probe_tasks.keep, self.workers, self.name, dataset)
        chunk_seconds = self._run(probe_tasks.request_seconds, self.workers[:1], self.name, 0)[0]
        alone = self._read(self.workers[:1], 0.15 * seconds, background)
        together = self._read(self.workers, 0.2 * seconds, background)
        return _Reads(alone, together, chunk_seconds, unit_rows(dataset) * dataset.row_nbytes)

    def _read(self, workers: Sequence[str], seconds: float, background: float) -> _Phase:
        def work() -> list[Traffic]:
            seeds = range(1, len(workers) + 1)
            return self._gather(
                [
                    self._submit(probe_tasks.read_chunks, w, self.name, seconds, s)
                    for w, s in zip(workers, seeds, strict=True)
                ],
                seconds,
            )

        return self._phase(work, background)

    def _phase(self, work: Callable[[], list[Traffic]], background: float) -> _Phase:
        """Run ``work`` and measure it. ``background`` is the processor utilization by others."""
        before, began = self._machines(), time.perf_counter()
        done = work()
        elapsed = time.perf_counter() - began
        after = self._machines()
        one_each = {machine.name: address for address, machine in after.items()}.values()
        spent = math.fsum(after[address].busy_seconds - before[address].busy_seconds for address in one_each)
        cores = sum(after[address].cores for address in one_each)
        processes = {after[address].process: address for address in self.everybody}.values()
        own = math.fsum(after[address].own_seconds - before[address].own_seconds for address in processes)
        busy = min(1.0, max(0.0, spent / (cores * elapsed)))  # rounding may make an idle machine negative
        return _Phase(
            rates=[traffic.rate for traffic in done],
            nbytes=sum(traffic.nbytes for traffic in done),
            messages=sum(traffic.messages for traffic in done),
            seconds=max((traffic.seconds for traffic in done), default=0.0),
            # On machines that others keep busy the difference is meaningless. Use these processes' own time there.
            busy_seconds=max((busy - background) * cores * elapsed, own),
            busy=busy,
        )

    def _sleep(self, seconds: float) -> list[Traffic]:
        time.sleep(seconds)
        return []

    # -- workers -----------------------------------------------------------------------------------------------

    def _machines(self) -> dict[str, Machine]:
        return run_on_workers(self.client, probe_tasks.where, workers=self.everybody)

    def _run(self, function: Callable[..., Any], workers: Sequence[str], *args: Any) -> list[Any]:
        return self._gather([self._submit(function, worker, *args) for worker in workers])

    def _submit(self, function: Callable[..., Any], worker: str, *args: Any) -> Future[Any]:
        return self.client.submit(function, *args, workers=[worker], allow_other_workers=False, pure=False)

    def _gather(self, futures: list[Future[Any]], work_seconds: float = 0.0) -> list[Any]:
        return task_results(self.client, futures, self.everybody, work_seconds)
