"""The cluster as its client sees it: a usable client, the workers, and whether lost ones come back."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import dask
from distributed import Client, LocalCluster, Nanny
from distributed.core import Status

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.planning.shares import SharePolicy
from dshuffle.runtime.client.bounded_calls import answer
from dshuffle.runtime.server_resource import only_serves
from dshuffle.runtime.session_options import SessionOptions
from dshuffle.runtime.worker_choice import (
    EVERY_WORKER,
    WorkerChoice,
    WorkerFacts,
    identities,
    in_words,
    resources_in_words,
)

logger = logging.getLogger(__name__)


def check_client(client: Any) -> None:
    """Raise unless the client is synchronous and connected."""
    if not isinstance(client, Client):
        raise InvalidParameter.of("client", client, "a dask.distributed Client")
    if client.asynchronous:
        raise InvalidParameter.of("client", client, "a synchronous Client", "Call dshuffle from a separate thread.")
    if client.status != "running":
        raise ClusterError(f"the Dask client is {client.status}; make a new one")


def cluster_info(client: Client, seconds: float | None = None) -> dict[str, Any]:
    """Ask the scheduler for its information, with all workers by address under ``"workers"``.

    ``Client.scheduler_info`` is not reliable for this: it returns an attribute that the client refreshes every few
    seconds without the workers, so sometimes there seem to be none.

    Parameters
    ----------
    seconds
        How long to wait for the answer, but at least 15 s. By default ``dshuffle.timeout``.

    Raises
    ------
    ClusterError
        If the scheduler cannot be reached, or does not answer.
    """
    scheduler: Any = client.scheduler
    name = f"the scheduler at {getattr(scheduler, 'address', 'an unknown address')}"
    try:
        return dict(answer(client, lambda: scheduler.identity(n_workers=-1), name, seconds))
    except OSError as error:
        raise ClusterError(f"the scheduler cannot be reached: {error}. Make a new Client and a new Shuffler") from error


def running_workers(information: Mapping[str, Any], choice: WorkerChoice = EVERY_WORKER) -> int:
    """Number of workers of a choice that :func:`cluster_info` has, without those that leave or are paused."""
    workers = information["workers"]
    allowed = [worker.address for worker in WorkerFacts.of_all(workers) if choice.allows(worker)]
    return sum(workers[address]["status"] == Status.running.name for address in allowed)


def resolved_choice(client: Client, options: SessionOptions) -> WorkerChoice:
    """The workers that a session may have, by all their names, after a check against those of the cluster.

    Raises
    ------
    InvalidParameter
        If no worker has a name in ``workers``. In an elastic session it is enough if ``min_workers`` of them are there.
    ClusterError
        If no worker has the resources.
    """
    choice = options.choice
    if not choice.is_restricted:
        return choice
    present = WorkerFacts.of_all(cluster_info(client)["workers"])
    names = options.workers or ()
    missing = [name for name in names if not any(name in identities(worker) for worker in present)]
    if missing and not (options.elastic and len(names) - len(missing) >= options.min_workers):
        allowed = f"a list of addresses or names of workers of this cluster: {in_words(present)}"
        absent = f"These are not there: {', '.join(map(repr, missing))}."
        raise InvalidParameter.of("workers", list(names), allowed, absent)
    if missing:
        logger.warning("dshuffle: the session opens without these workers, which are not there: %s", ", ".join(missing))
    choice = choice.resolved(present)
    if not any(choice.allows(worker) and not only_serves(worker.resources) for worker in present):
        words = resources_in_words(choice.resources)
        raise ClusterError(
            f"none of the {len(names) or len(present)} workers has the resources {words}: {in_words(present)}. Start "
            f'workers with --resources "{words}"'
        )
    return choice


def warn_of_absent_names(client: Client, shares: SharePolicy) -> None:
    """Say which workers with a number of their own are not there, if a session opens without them."""
    if not shares.names:
        return
    present = {name for worker in WorkerFacts.of_all(cluster_info(client)["workers"]) for name in identities(worker)}
    if absent := [name for name in shares.names if name not in present]:
        logger.warning("dshuffle: shares has numbers for these workers, which are not there: %s", ", ".join(absent))


def is_adaptive(client: Client) -> bool:
    """Whether the cluster of a client scales itself, and so starts new workers in place of lost ones."""
    return getattr(client.cluster, "_adaptive", None) is not None


LOST_WORKER = "distributed.deploy.lost-worker-timeout"
"""Setting of Dask: time after which a cluster ends the job or the nanny of a worker that is away."""

DEFAULT_LOST = "15s"
"""Its default."""

RESTARTED_WITHIN = "1d"
"""Its value for local clusters. Their nannies start lost workers again, however long that takes."""


_lock, _keeping = threading.Lock(), contextlib.ExitStack()
_n_keeping = 0


def keep_nannies(client: Client) -> Callable[[], None]:
    """Keep a local cluster from ending the nannies that start lost workers again.

    It ends them again once the function that is returned has been called.

    A worker that imports PyTorch on a busy machine needs more than the default of 15 s to come back. Dask reads the
    setting in this process, when a worker is lost. A value of the user stays, and so does the default for an adaptive
    cluster, which starts another worker after this time. In the end the setting is what it was, and the cluster forgets
    workers whose nannies have ended, so that it can start them again.
    """
    global _n_keeping
    cluster, kept = client.cluster, contextlib.ExitStack()
    if not isinstance(cluster, LocalCluster) or is_adaptive(client):
        return kept.close
    nannies = all(isinstance(worker, Nanny) for worker in cluster.workers.values())
    with _lock:
        if nannies and (_n_keeping or dask.config.get(LOST_WORKER, DEFAULT_LOST) == DEFAULT_LOST):
            if not _n_keeping:
                _keeping.enter_context(dask.config.set({LOST_WORKER: RESTARTED_WITHIN}))
            _n_keeping += 1
            kept.callback(_keep_no_longer, cluster)
    return kept.close


def _keep_no_longer(cluster: LocalCluster) -> None:
    global _n_keeping
    with _lock:
        _n_keeping -= 1
        if not _n_keeping:
            _keeping.close()

    async def forget() -> None:
        for name, nanny in list(cluster.workers.items()):
            if nanny.status in (Status.closing_gracefully, Status.closing, Status.closed, Status.failed):
                await nanny.close()
                cluster.workers.pop(name, None)

    loop: Any = cluster.loop
    if cluster.status is Status.running:
        loop.add_callback(forget)  # on the loop that starts workers


def starts_no_more(client: Client, choice: WorkerChoice = EVERY_WORKER) -> str | None:
    """Say that an adaptive cluster will start no more workers although it may have more, if that is so.

    Dask starts workers only when tasks wait. A session never has waiting tasks, because it has one for each worker. And
    it does not notice when a worker is lost whose job has several.
    """
    adaptive = getattr(client.cluster, "_adaptive", None)
    if adaptive is not None and "group" in (getattr(client.cluster, "new_spec", None) or {}):
        return (
            "each job of the adaptive cluster has several workers, and then Dask submits no job in place of one that "
            "ends. Give each job one worker: processes=1"
        )
    if adaptive is None or adaptive.minimum >= adaptive.maximum or choice.is_restricted:
        return None
    n_workers = count_training_workers(client)
    if n_workers > max(adaptive.minimum, 1):
        return None
    return (
        f"the session trains on {n_workers} worker{'s' * (n_workers > 1)}, and the adaptive cluster starts no more for "
        "it, because a session has one task for each worker. For more workers, raise the minimum: "
        "cluster.adapt(minimum=...)"
    )


def count_training_workers(client: Client, choice: WorkerChoice = EVERY_WORKER) -> int:
    """Number of workers of a choice that would train: all but those that only serve."""
    workers = WorkerFacts.of_all(cluster_info(client)["workers"])
    return sum(choice.allows(worker) and not only_serves(worker.resources) for worker in workers)
