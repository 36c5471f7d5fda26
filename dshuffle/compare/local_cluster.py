"""Clusters to run on: an existing scheduler, or a local cluster of the training workers and one server."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import dask
import psutil
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker
from distributed.system import MEMORY_LIMIT

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.runtime.client.cluster_view import count_training_workers
from dshuffle.runtime.session_spec import SERVER_RESOURCE
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
        parts = [
            f"links of {human_bit_rate(self.links)} into and out of each worker" if self.links else "",
            f"a store of {human_bit_rate(self.store)}" if self.store else "",
        ]
        return ", and ".join(filter(None, parts))

    def configuration(self, n_workers: int) -> dict[str, Any]:
        """What each worker gets in addition to this process's configuration of Dask."""
        each = self.links, self.store and self.store / n_workers
        return {key: f"{rate}B" for key, rate in zip(KEYS, each, strict=True) if rate}

    @classmethod
    def of(cls, client: Client) -> EmulatedRates:
        """What the workers of a cluster emulate, by their configuration; the slowest if they differ."""
        configurations = client.run(_configured, on_error="ignore").values()
        links, store = (
            min(
                (
                    parse_rate(key, str(configuration[key]))
                    for configuration in configurations
                    if configuration[key] is not None
                ),
                default=None,
            )
            for key in KEYS
        )
        return cls(links, store and store * count_training_workers(client))


PROCESSES_PER_CORE = 32
"""With more workers, most of them would wait for a processor most of the time."""

PROCESS_NBYTES = 150 << 20
"""Memory of a worker process before it has any data."""

AS_THEY_ARE = EmulatedRates()

KEYS = "dshuffle.emulated-links", "dshuffle.emulated-store"
"""Keys of the rates in Dask's configuration."""


def _configured() -> dict[str, Any]:
    return {key: dask.config.get(key, None) for key in KEYS}


@contextmanager
def connect(scheduler: str | None, n_workers: int, rates: EmulatedRates = AS_THEY_ARE) -> Iterator[Client]:
    """Yield a client of the scheduler at an address, or of a new :func:`local_cluster` if the address is None.

    Only a new cluster can have emulated rates.

    Raises
    ------
    ClusterError
        The scheduler does not answer.
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = min(psutil.virtual_memory().available, MEMORY_LIMIT)
    return max(4, min(PROCESSES_PER_CORE * cores, int(memory // PROCESS_NBYTES)))


@contextmanager
def local_cluster(n_workers: int, *, processes: bool = True, rates: EmulatedRates = AS_THEY_ARE) -> Iterator[Client]:
    """Yield a client of a new local cluster of single-threaded processes, and stop the cluster at the end.

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
    # LocalCluster gives all workers the same resources, so this uses SpecCluster.
    common = {
        **where,
        "nthreads": 1,
        "memory_limit": MEMORY_LIMIT // (n_workers + 1) if processes else 0,
        "dashboard": False,
    }
    if processes:
        common |= {
            "silence_logs": logging.WARNING,
            "config": rates.configuration(n_workers),
            # While the workers start, they load what the first session would wait for.
            "preload": [*dask.config.get("distributed.worker.preload"), "dshuffle"],
        }
    kind = QuietNanny if processes else Worker
    workers: dict[int | str, dict[str, Any]] = {
        rank: {"cls": kind, "options": dict(common)} for rank in range(n_workers)
    }
    workers["server"] = {"cls": kind, "options": {**common, "resources": {SERVER_RESOURCE: 1}}}
    scheduler = {
        "cls": Scheduler,
        "options": {**where, "port": 0, "dashboard": False, "dashboard_address": "127.0.0.1:0"},
    }
    with ExitStack() as stack:
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
