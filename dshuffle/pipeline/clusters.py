"""The cluster of a pipeline: started for it on this machine (or in :mod:`.jobs`), or running already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from distributed import Client
from distributed.system import MEMORY_LIMIT

from dshuffle.checks import as_integer
from dshuffle.compare import AS_THEY_ARE, EmulatedRates, connect, local_cluster
from dshuffle.errors import InvalidParameter
from dshuffle.runtime.client.cluster_view import Waiting, wait_for_workers
from dshuffle.runtime.settings import as_seconds
from dshuffle.units import parse_rate


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

        ``waiting`` is for :func:`.wait_for_workers`: it shows a text. An error that it raises ends the wait.
        """
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
