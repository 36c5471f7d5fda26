"""Clusters to run on: an existing scheduler, or a local cluster of the training workers and one server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed import Client, Nanny, Scheduler, SpecCluster, Worker
from distributed.system import MEMORY_LIMIT

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.runtime.cluster_view import SERVER_RESOURCE


@contextmanager
def connect(scheduler: str | None, n_workers: int) -> Iterator[Client]:
    """Yield a client of the scheduler at an address, or of a new :func:`local_cluster` if the address is None.

    Raises
    ------
    ClusterError
        The scheduler does not answer.
    """
    if scheduler is None:
        with local_cluster(n_workers) as client:
            yield client
        return
    try:
        client = Client(scheduler)
    except (OSError, ValueError) as error:
        raise ClusterError(f"no Dask scheduler answers at {scheduler!r}: {error}") from error
    with client:
        yield client


@contextmanager
def local_cluster(n_workers: int, *, processes: bool = True) -> Iterator[Client]:
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

    Raises
    ------
    InvalidParameter
        ``n_workers`` is less than 1.
    """
    if n_workers < 1:
        raise InvalidParameter.of("workers", n_workers, "an integer >= 1")
    where: dict[str, Any] = {"host": "127.0.0.1"} if processes else {"protocol": "inproc://"}
    # LocalCluster gives all workers the same resources, so this uses SpecCluster.
    common = {
        **where,
        "nthreads": 1,
        "memory_limit": MEMORY_LIMIT // (n_workers + 1) if processes else 0,
        "dashboard": False,
        **({"silence_logs": logging.WARNING} if processes else {}),
    }
    kind = Nanny if processes else Worker
    workers: dict[int | str, dict[str, Any]] = {
        rank: {"cls": kind, "options": dict(common)} for rank in range(n_workers)
    }
    workers["server"] = {"cls": kind, "options": {**common, "resources": {SERVER_RESOURCE: 1}}}
    scheduler = {
        "cls": Scheduler,
        "options": {**where, "port": 0, "dashboard": False, "dashboard_address": "127.0.0.1:0"},
    }
    with (
        SpecCluster(workers=workers, scheduler=scheduler, silence_logs=logging.WARNING) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(n_workers + 1)
        yield client
