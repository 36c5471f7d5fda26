"""The cluster of a pipeline: started for it on this machine or in a batch system, or running already."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import dask
from dask.utils import parse_bytes
from distributed import Client
from distributed.system import MEMORY_LIMIT

from dshuffle.checks import as_integer
from dshuffle.compare import AS_THEY_ARE, EmulatedRates, connect, local_cluster
from dshuffle.errors import InvalidParameter
from dshuffle.runtime.client.cluster_view import DEFAULT_LOST, LOST_WORKER
from dshuffle.runtime.client.waiting import wait_for_workers
from dshuffle.runtime.quantities import as_seconds
from dshuffle.units import parse_rate

Waiting = Callable[[int], None]
"""Called with the number of connected workers during the wait for them; see :func:`.wait_for_workers`."""


@runtime_checkable
class ClusterSource(Protocol):
    """Where a pipeline runs."""

    @property
    def n_workers(self) -> int | None:
        """Number of workers that will train; None if only the running cluster knows it."""
        ...

    @property
    def worker_memory(self) -> int | None:
        """Memory limit of a worker in bytes; None if it is not known."""
        ...

    @property
    def awaited(self) -> tuple[int, str | float]:
        """Number of workers that a session waits for, and for how long: seconds, or text such as ``"5m"``."""
        ...

    def check(self) -> None:
        """Check what can be checked before the cluster is started. Called in the main thread."""
        ...

    def open(self, waiting: Waiting | None = None) -> AbstractContextManager[Client]:
        """Start the cluster or connect to it, and wait for its workers. On leaving, stop what was started.

        ``waiting`` is for :func:`.wait_for_workers`: it shows the progress, and ends the wait of a cancelled run.
        """
        ...

    def to_dict(self) -> dict[str, Any]:
        """The source as JSON can hold it."""
        ...


def _rate(name: str, text: object) -> float | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidParameter.of(name, text, 'None, or text such as "1gbit"')
    return parse_rate(name, text)


@dataclass(frozen=True, slots=True)
class LocalWorkers:
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
    def worker_memory(self) -> int | None:
        """Memory limit of a worker in bytes; None without one."""
        return MEMORY_LIMIT // (self.n_workers + 1) if self.processes else None

    @property
    def awaited(self) -> tuple[int, str | float]:
        """All workers that train, for five minutes."""
        return self.n_workers, "5m"

    def check(self) -> None:
        """Nothing is known before the workers start."""

    def open(self, waiting: Waiting | None = None) -> AbstractContextManager[Client]:
        """Start the workers."""
        return local_cluster(self.n_workers, processes=self.processes, rates=self.rates)

    def to_dict(self) -> dict[str, Any]:
        """The source as JSON can hold it."""
        return {"kind": "local", **dataclasses.asdict(self)}


@dataclass(frozen=True, slots=True)
class RunningScheduler:
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

    def __post_init__(self) -> None:
        as_integer("min_workers", self.min_workers, 1)
        as_seconds("patience", self.patience)

    def __str__(self) -> str:
        return f"the cluster at {self.address}"

    @property
    def n_workers(self) -> None:
        """Only the running cluster knows it."""
        return

    @property
    def worker_memory(self) -> None:
        """Only the running cluster knows it."""
        return

    @property
    def awaited(self) -> tuple[int, str | float]:
        """Number of workers to wait for, and for how long."""
        return self.min_workers, self.patience

    def check(self) -> None:
        """Nothing is known before the scheduler answers."""

    @contextmanager
    def open(self, waiting: Waiting | None = None) -> Iterator[Client]:
        """Connect, and wait for the workers."""
        with connect(self.address, 1) as client:
            wait_for_workers(client, *self.awaited, waiting)
            yield client

    def to_dict(self) -> dict[str, Any]:
        """The source as JSON can hold it."""
        return {"kind": "scheduler", **dataclasses.asdict(self)}


SOON = "5s"
"""Value of ``LOST_WORKER`` for batch jobs, unless the user has set another one. A nanny starts a worker again within
it. After it, a job whose worker was lost is submitted again."""

SYSTEMS = ("HTCondor", "LSF", "Moab", "OAR", "PBS", "SGE", "SLURM")
"""Batch systems of dask-jobqueue, as its classes begin."""


@dataclass(frozen=True, slots=True)
class BatchJobs:
    """Workers in the jobs of a batch system, through dask-jobqueue.

    Parameters
    ----------
    system
        ``"SLURM"``, ``"PBS"``, ``"SGE"``, ``"LSF"``, ``"OAR"``, ``"Moab"`` or ``"HTCondor"``.
    jobs
        Number of jobs to submit. A job that ends, at its walltime or because its node fails, is submitted again.
    min_workers
        Number of workers to start with, while other jobs wait in the queue; by default all of them. A session uses the
        workers that are there when it opens. Later ones replace lost workers.
    patience
        Time to wait for them: seconds, or text such as ``"1h"``.
    options
        Arguments of the class of dask-jobqueue, such as ``{"cores": 1, "memory": "16 GiB", "walltime": "02:00:00",
        "interface": "ib0", "local_directory": "/local/scratch"}``. Without ``processes``, here or in the configuration
        of dask-jobqueue, a job is a single worker.

    Raises
    ------
    InvalidParameter
        If a value is not allowed.
    """

    system: str
    jobs: int
    min_workers: int | None = None
    patience: str | float = "1h"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.system.lower() not in map(str.lower, SYSTEMS):
            raise InvalidParameter.of("system", self.system, f"one of {', '.join(SYSTEMS)}")
        as_integer("jobs", self.jobs, 1)
        workers = as_integer("options['processes']", self._processes, 1) * self.jobs
        if (memory := self.options.get("memory")) is not None:
            try:
                parse_bytes(memory)
            except (ValueError, TypeError):
                raise InvalidParameter.of("options['memory']", memory, 'bytes, such as "16 GiB"') from None
        if self.min_workers is not None and as_integer("min_workers", self.min_workers, 1) > workers:
            raise InvalidParameter.of("min_workers", self.min_workers, f"at most {workers}, the workers of all jobs")
        as_seconds("patience", self.patience)

    def __str__(self) -> str:
        return f"{self.n_workers} workers in {self.jobs} {self.system} jobs"

    @property
    def n_workers(self) -> int:
        """Number of workers to start with."""
        return self.min_workers or self.jobs * self._processes

    @property
    def _processes(self) -> Any:
        """Workers of a job. Dask-jobqueue's own default is several for a job of several cores."""
        name = self.options.get("config_name", self.system.lower())
        for processes in (self.options.get("processes"), dask.config.get(f"jobqueue.{name}.processes", None)):
            if processes is not None:
                return processes
        return 1

    @property
    def awaited(self) -> tuple[int, str | float]:
        """Number of workers to wait for, and for how long."""
        return self.n_workers, self.patience

    @property
    def worker_memory(self) -> int | None:
        """Memory limit of a worker in bytes; None if the configuration of dask-jobqueue has it."""
        memory = self.options.get("memory")
        return None if memory is None else int(parse_bytes(memory)) // int(self._processes)

    def check(self) -> None:
        """Check that dask-jobqueue is installed."""
        jobqueue()

    @contextmanager
    def open(self, waiting: Waiting | None = None) -> Iterator[Client]:
        """Submit the jobs, and wait for the workers. Jobs that end are submitted again."""
        [name] = [name for name in SYSTEMS if name.lower() == self.system.lower()]
        with contextlib.ExitStack() as stack:
            if dask.config.get(LOST_WORKER, DEFAULT_LOST) == DEFAULT_LOST:
                stack.enter_context(dask.config.set({LOST_WORKER: SOON}))
            try:
                options = {**self.options, "processes": self._processes}
                cluster = stack.enter_context(getattr(jobqueue(), f"{name}Cluster")(**options))
            except (TypeError, ValueError) as error:
                raise InvalidParameter.because("options", f"dask-jobqueue refuses them for {name}: {error}") from error
            cluster.adapt(minimum_jobs=self.jobs, maximum_jobs=self.jobs)
            client = stack.enter_context(Client(cluster))
            wait_for_workers(client, *self.awaited, waiting)
            yield client

    def to_dict(self) -> dict[str, Any]:
        """The source as JSON can hold it."""
        return {"kind": "jobs", **{**dataclasses.asdict(self), "options": dict(self.options)}}


def jobqueue() -> Any:
    """Import dask-jobqueue.

    Its import sets a handler for SIGINT. So the first one must be in the main thread, and the handler is set back, to
    keep Ctrl-C a KeyboardInterrupt.

    Raises
    ------
    InvalidParameter
        If it is not installed.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module("dask_jobqueue")
    except ImportError as error:
        raise InvalidParameter.because(
            "cluster", f"BatchJobs needs dask-jobqueue ({error})", "Install it: pip install dask-jobqueue"
        ) from error
    finally:
        if signal.getsignal(signal.SIGINT) is not handler:
            signal.signal(signal.SIGINT, handler)


KINDS: dict[str, type[Any]] = {"local": LocalWorkers, "scheduler": RunningScheduler, "jobs": BatchJobs}


def source_from_dict(fields: Mapping[str, Any]) -> ClusterSource:
    """The source that ``to_dict`` wrote."""
    options = {name: value for name, value in fields.items() if name != "kind"}
    if fields.get("kind") not in KINDS:
        raise InvalidParameter.of("cluster['kind']", fields.get("kind"), f"one of {', '.join(KINDS)}")
    source: ClusterSource = KINDS[fields["kind"]](**options)
    return source
