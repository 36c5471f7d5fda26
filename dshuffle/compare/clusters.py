"""Clusters to run on: an existing scheduler, or a local cluster of the training workers and one server.

``connect`` and ``local_cluster`` yield their clients. ``RunningScheduler`` and ``LocalWorkers`` describe them, for
pipelines.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from typing import Any, ClassVar, Protocol, runtime_checkable

import dask
import distributed.utils
import psutil
from dask.system import CPU_COUNT
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker
from distributed.system import MEMORY_LIMIT

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.runtime.client.cluster_view import Waiting, count_training_workers, wait_for_workers
from dshuffle.runtime.session_spec import SERVER_RESOURCE
from dshuffle.runtime.settings import as_seconds
from dshuffle.units import human_bit_rate, parse_rate


@dataclass(frozen=True, slots=True)
class EmulatedRates:
    """Rates of the links and of the store that a local cluster emulates, because one machine has no network.

    Parameters
    ----------
    links
        Bytes per second of each worker's link, in each direction. None for no limit.
    store
        Bytes per second that all training workers read from the store together. Each gets an equal part, and so does
        the server. None for no limit.

    Examples
    --------
    >>> rates = EmulatedRates(links=25e6, store=100e6)
    >>> str(rates)
    'links of 200 Mbit/s into and out of each worker, and a store of 800 Mbit/s'
    >>> rates.configuration(4)
    {'dshuffle.emulated-links': '25000000.0B', 'dshuffle.emulated-store': '25000000.0B'}
    """

    links: float | None = None
    store: float | None = None

    def __str__(self) -> str:
        links = f"links of {human_bit_rate(self.links)} into and out of each worker" if self.links else ""
        store = f"a store of {human_bit_rate(self.store)}" if self.store else ""
        return ", and ".join(filter(None, (links, store)))

    def configuration(self, n_workers: int) -> dict[str, Any]:
        """What each worker gets in addition to this process's configuration of Dask."""
        each = self.links, self.store and self.store / n_workers
        return {key: f"{rate}B" for key, rate in zip(KEYS, each, strict=True) if rate}

    @classmethod
    def of(cls, client: Client) -> EmulatedRates:
        """What the workers of a cluster emulate, by their configuration; the slowest if they differ."""
        configured = client.run(_configured, on_error="ignore").values()
        links, store = (
            min((parse_rate(key, rates[place]) for rates in configured if rates and rates[place]), default=None)
            for place, key in enumerate(KEYS)
        )
        return cls(links, store and store * count_training_workers(client))


METHOD = "distributed.worker.multiprocessing-method"
"""Key of how Dask starts processes."""

PROCESSES_PER_CORE = 32
"""With more workers, most of them would wait for a processor most of the time."""

PROCESS_NBYTES = 150 << 20
"""Memory of a worker process before it has any data."""

AS_THEY_ARE = EmulatedRates()

KEYS = "dshuffle.emulated-links", "dshuffle.emulated-store"
"""Keys of the rates in Dask's configuration."""


def _configured() -> list[str | None]:
    return [dask.config.get(key, None) for key in KEYS]


@contextmanager
def connect(scheduler: str | None, n_workers: int, rates: EmulatedRates = AS_THEY_ARE) -> Iterator[Client]:
    """Yield a client of the scheduler at an address, or of a new :func:`local_cluster` if the address is None.

    Only a new cluster can have emulated rates. Raises :class:`ClusterError` if the scheduler does not answer.
    """
    if scheduler is None:
        with local_cluster(n_workers, rates=rates) as client:
            yield client
        return
    try:
        client = Client(scheduler)
    except (OSError, ValueError) as error:
        raise ClusterError(f"no Dask scheduler answers at {scheduler!r}: {error}") from error
    with client:
        yield client


class QuietNanny(Nanny):
    """A nanny whose worker does not see Ctrl-C, which a terminal sends to all processes.

    The parent handles it, and closes the worker. Otherwise each worker would print tracebacks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # In the thread of the event loop. Processes that it starts inherit this, unless the first of them makes
        # multiprocessing start its tracker, which unblocks the signal.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        super().__init__(*args, **kwargs)


def _silence(client: Client) -> None:
    """Keep workers from reporting that the scheduler is gone while the cluster closes."""
    with suppress(Exception):  # workers that are busy, or gone themselves
        client.sync(client._run, _be_quiet, callback_timeout=1)


def _be_quiet() -> None:
    logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)


def most_processes() -> int:
    """Number of worker processes that the processors and the memory of this machine can bear."""
    memory = min(psutil.virtual_memory().available, MEMORY_LIMIT)
    return max(4, min(PROCESSES_PER_CORE * CPU_COUNT, int(memory // PROCESS_NBYTES)))


@contextmanager
def local_cluster(n_workers: int, *, processes: bool = True, rates: EmulatedRates = AS_THEY_ARE) -> Iterator[Client]:
    """Yield a client of a new local cluster of single-threaded processes, and stop the cluster at the end.

    The processes are forked from one that has loaded dshuffle, unless the configuration of Dask names another method
    than ``spawn``. The first cluster then starts in two seconds instead of five, and further ones in a fraction of one.
    Variables that were removed from the environment since the first cluster stay in the workers of later ones.

    Parameters
    ----------
    n_workers
        Number of workers that train. One more worker has the Dask resource ``dshuffle-server``. It serves the
        ``server`` delivery and never trains. All share the machine's memory equally.
    processes
        False for logical workers, which are threads of this process. There can be far more of them than cores. They
        compute the same results as processes, but there is no network between them, and their seconds say little about
        another cluster.
    rates
        Rates of the links and of the store, if they are emulated. Only processes can have them.

    Raises
    ------
    InvalidParameter
        ``n_workers`` is less than 1, or there are far too many processes for the machine.
    """
    if n_workers < 1:
        raise InvalidParameter.of("workers", n_workers, "an integer >= 1")
    if processes and n_workers > (most := most_processes()):
        hint = "Use fewer workers, or a cluster of several machines."
        raise InvalidParameter.of("workers", n_workers, f"at most {most} on this machine", hint)
    where: dict[str, Any] = {"host": "127.0.0.1"} if processes else {"protocol": "inproc://"}
    memory = MEMORY_LIMIT // (n_workers + 1) if processes else 0
    options = {**where, "nthreads": 1, "memory_limit": memory, "dashboard": False}
    if processes:
        # While the workers start, they load what the first session would wait for.
        preload = [*dask.config.get("distributed.worker.preload"), "dshuffle"]
        options |= {"silence_logs": logging.WARNING, "config": rates.configuration(n_workers), "preload": preload}
        options["env"] = dict(os.environ)  # the process that they are forked from may be older
    # LocalCluster gives all workers the same resources, so this uses SpecCluster.
    kind = QuietNanny if processes else Worker
    workers: dict[int | str, Any] = {rank: {"cls": kind, "options": dict(options)} for rank in range(n_workers)}
    workers["server"] = {"cls": kind, "options": {**options, "resources": {SERVER_RESOURCE: 1}}}
    where |= {"port": 0, "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": Scheduler, "options": where}
    with ExitStack() as stack:
        if processes and dask.config.get(METHOD) == "spawn":
            stack.enter_context(dask.config.set({METHOD: "forkserver"}))
            distributed.utils._forkserver_preload_set = True  # with a list of its own, which imports pandas
            get_context("forkserver").set_forkserver_preload(["dshuffle.compare.forked"])
        nanny = logging.getLogger("distributed.nanny")
        stack.callback(nanny.setLevel, nanny.level)
        if not processes:  # each worker would list what the process and the machine do, twice a second
            stack.enter_context(dask.config.set({"distributed.admin.system-monitor.interval": "30s"}))
        cluster = stack.enter_context(SpecCluster(workers=workers, scheduler=scheduler, silence_logs=logging.WARNING))
        client = stack.enter_context(Client(cluster))
        client.wait_for_workers(n_workers + 1)
        stack.callback(nanny.setLevel, logging.ERROR)  # from the end on: it may have to kill a worker that is busy
        if processes:
            stack.callback(_silence, client)
        yield client


@runtime_checkable
class ClusterSource(Protocol):
    """Where a pipeline runs."""

    @property
    def n_workers(self) -> int | None:
        """Number of workers that will train; None if only the running cluster knows it."""
        ...

    @property
    def awaited(self) -> tuple[int, str | float]:
        """Number of workers that a session waits for, and for how long: seconds, or text such as ``"5m"``."""
        ...

    def check(self) -> None:
        """Check what can be checked before the cluster is started. Called in the main thread."""
        return

    def open(self, waiting: Waiting | None = None) -> AbstractContextManager[Client]:
        """Start the cluster or connect to it, and wait for its workers. On leaving, stop what was started.

        ``waiting`` is for :func:`.wait_for_workers`: it shows a text. An error that it raises ends the wait.
        """
        ...


def _rate(name: str, text: object) -> float | None:
    if not isinstance(text, str | None):
        raise InvalidParameter.of(name, text, 'None, or text such as "1gbit"')
    return None if text is None else parse_rate(name, text)


@dataclass(frozen=True, slots=True)
class LocalWorkers(ClusterSource):
    """Worker processes on this machine, and one more that serves the delivery ``server`` and coded deliveries.

    Parameters
    ----------
    n_workers
        Number of workers that train.
    processes
        False for workers that are threads of this process. This is for tests and studies.
    links
        Rate of each worker's link that is emulated, such as ``"1gbit"``; None for no limit. Only for processes.
    store
        Rate at which all workers together read the store, likewise.

    Raises
    ------
    InvalidParameter
        If a value is not allowed.
    """

    n_workers: int = 4
    processes: bool = True
    links: str | None = None
    store: str | None = None

    def __post_init__(self) -> None:
        as_integer("n_workers", self.n_workers, 1)
        if not self.processes and self.rates != AS_THEY_ARE:
            raise InvalidParameter.of("processes", self.processes, "True with emulated rates (links, store)")
        _ = self.rates  # raises an error for what is not a rate

    def __str__(self) -> str:
        what = "worker processes" if self.processes else "threads as workers"
        return f"{self.n_workers} {what} on this machine, and a server"

    @property
    def rates(self) -> EmulatedRates:
        """Rates that are emulated."""
        return EmulatedRates(_rate("links", self.links), _rate("store", self.store))

    @property
    def awaited(self) -> tuple[int, str | float]:
        """All workers that train, for five minutes."""
        return self.n_workers, "5m"

    def open(self, waiting: Waiting | None = None) -> AbstractContextManager[Client]:
        """Start the workers."""
        return local_cluster(self.n_workers, processes=self.processes, rates=self.rates)


@dataclass(frozen=True, slots=True)
class RunningScheduler(ClusterSource):
    """A cluster that runs already, by the address of its scheduler.

    Parameters
    ----------
    address
        Address such as ``"tcp://head-node:8786"``.
    min_workers
        Number of workers to wait for.
    patience
        Time to wait for them: seconds, or text such as ``"5m"``.
    """

    address: str
    min_workers: int = 1
    patience: str | float = "5m"
    n_workers: ClassVar[None] = None  # only the running cluster knows it

    def __post_init__(self) -> None:
        as_integer("min_workers", self.min_workers, 1)
        as_seconds("patience", self.patience)

    def __str__(self) -> str:
        return f"the cluster at {self.address}"

    @property
    def awaited(self) -> tuple[int, str | float]:
        """Number of workers to wait for, and for how long."""
        return self.min_workers, self.patience

    @contextmanager
    def open(self, waiting: Waiting | None = None) -> Iterator[Client]:
        """Connect, and wait for the workers."""
        with connect(self.address, 1) as client:
            wait_for_workers(client, *self.awaited, waiting)
            yield client
