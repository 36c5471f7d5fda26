"""The cluster as a client sees it: calls that end, workers that are there, and waiting for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import dask
from distributed import Client, LocalCluster, Nanny
from distributed.core import Status

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.runtime.messages import unless
from dshuffle.runtime.session_spec import (
    EVERY_WORKER,
    SessionOptions,
    WorkerChoice,
    WorkerFacts,
    identities,
    in_words,
    only_serves,
    resources_in_words,
)
from dshuffle.runtime.settings import Settings, as_seconds

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_WITHIN = 15.0
"""Seconds that every call may take, also with a shorter ``dshuffle.timeout``: the machine may be busy."""

LOG_AFTER = 3.0
"""Seconds after which a call that still waits says so for the first time; then after twice that time, and so on."""

LOST_WORKER, DEFAULT_LOST = "distributed.deploy.lost-worker-timeout", "15s"
"""Setting of Dask, and its default: time after which a cluster ends the job or the nanny of a worker that is away."""

RESTARTED_WITHIN = "5m"
"""Its value for local clusters whose nannies start lost workers again."""

STEP = 2.0
"""Seconds after which a wait for workers reports how many there are, and between two reports."""

PAUSE = 0.1
"""Seconds between two looks at the cluster."""

Waiting = Callable[[str], None]
"""Called during a wait for workers with a text such as ``"1 of 4 workers have connected"``."""


def limit_of(seconds: float | None = None) -> float:
    """Seconds that a call may take, if ``seconds`` are given for it; by default ``dshuffle.timeout``."""
    return max(ANSWER_WITHIN, Settings.from_config().timeout if seconds is None else seconds)


def answer(client: Client, call: Callable[[], Awaitable[T]], sender: str, seconds: float | None = None) -> T:
    """Return the answer to a call, or raise TimeoutError."""
    limit = limit_of(seconds)

    async def pass_time() -> None:
        waited, pause = 0.0, LOG_AFTER
        while waited + pause < limit:
            await asyncio.sleep(pause)
            waited = pause = waited + pause
            logger.warning("dshuffle: %s has not answered for %.0f s", sender, waited)
        await asyncio.sleep(limit - waited)

    async def ask() -> T:
        return await unless(pass_time(), call(), TimeoutError(f"{sender} did not answer within {limit:g} s"))

    result: T = client.sync(ask)
    return result


def run_on_workers(
    client: Client, function: Callable[..., Any], *args: Any, workers: Sequence[str] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Run a function on all workers as :meth:`distributed.Client.run` does, and return the results by address."""
    names = None if workers is None else list(workers)
    return answer(client, lambda: client._run(function, *args, workers=names, **kwargs), "a worker, or the scheduler,")


def check_client(client: Any) -> None:
    """Raise unless the client is synchronous and connected."""
    if not isinstance(client, Client):
        raise InvalidParameter.of("client", client, "a dask.distributed Client")
    if client.asynchronous:
        raise InvalidParameter.of("client", client, "a synchronous Client", "Call dshuffle from a separate thread.")
    if client.status != "running":
        raise ClusterError(f"the Dask client is {client.status}; make a new one")


def address_of(client: Client) -> str:
    """Address of the scheduler."""
    return str(getattr(client.scheduler, "address", ""))


def cluster_info(client: Client, seconds: float | None = None) -> dict[str, Any]:
    """Ask the scheduler for its information, with all workers by address under ``"workers"``.

    ``Client.scheduler_info`` returns an attribute that the client refreshes every few seconds without the workers.
    """
    scheduler: Any = client.scheduler
    name = f"the scheduler at {address_of(client)}"
    try:
        return dict(answer(client, lambda: scheduler.identity(n_workers=-1), name, seconds))
    except OSError as error:
        raise ClusterError(f"the scheduler cannot be reached: {error}. Make a new Client and a new Shuffler") from error


def workers_of(
    client: Client, choice: WorkerChoice = EVERY_WORKER, *, running: bool = False, seconds: float | None = None
) -> list[WorkerFacts]:
    """The workers of a cluster that a choice allows; with ``running``, without those that leave or are paused."""
    described = cluster_info(client, seconds)["workers"]
    workers = [worker for worker in WorkerFacts.of_all(described) if choice.allows(worker)]
    return [worker for worker in workers if not running or described[worker.address]["status"] == Status.running.name]


def count_training_workers(client: Client, choice: WorkerChoice = EVERY_WORKER) -> int:
    """Number of workers of a choice that would train: all but those that only serve."""
    return sum(not only_serves(worker.resources) for worker in workers_of(client, choice))


def resolved_choice(client: Client, options: SessionOptions) -> WorkerChoice:
    """The workers that a session may have, by all their names, after a check against those of the cluster."""
    choice = options.choice
    if not choice.is_restricted:
        return choice
    present = workers_of(client)
    names, known = options.workers or (), frozenset().union(*map(identities, present))
    missing = [name for name in names if name not in known]
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


def is_adaptive(client: Client) -> bool:
    """Whether the cluster of a client scales itself, and so starts new workers in place of lost ones."""
    return getattr(client.cluster, "_adaptive", None) is not None


def keep_nannies(client: Client) -> None:
    """Let a local cluster keep the nannies of lost workers for longer than by Dask's default.

    A worker that imports PyTorch on a busy machine needs more than 15 s to come back. A value of the user stays, and so
    does the default for an adaptive cluster, which starts another worker after this time. The setting stays.
    """
    cluster: Any = client.cluster
    if not isinstance(cluster, LocalCluster) or is_adaptive(client):
        return
    is_default = dask.config.get(LOST_WORKER, DEFAULT_LOST) == DEFAULT_LOST
    if is_default and all(isinstance(worker, Nanny) for worker in cluster.workers.values()):
        dask.config.set({LOST_WORKER: RESTARTED_WITHIN})


def wait_for_workers(
    client: Client,
    min_workers: int,
    patience: str | float,
    waiting: Waiting | None = None,
    *,
    limit: str = "patience",
    choice: WorkerChoice = EVERY_WORKER,
) -> None:
    """Wait until a cluster has a number of running workers.

    ``Client.wait_for_workers`` replaces what the cluster object knows of its workers. If a worker leaves at this
    moment, the cluster object never again starts another worker in place of a lost one.
    """
    as_integer("min_workers", min_workers, 1)
    seconds = as_seconds("patience", patience)
    began, report_after = time.monotonic(), STEP
    describe_jobs = getattr(client.cluster, "describe_jobs", lambda n_workers: "")  # of BatchJobs; it may raise
    while True:
        n_running = len(workers_of(client, choice, running=True, seconds=began + seconds - time.monotonic()))
        if n_running >= min_workers:
            return
        jobs, waited = describe_jobs(min_workers), time.monotonic() - began
        jobs = jobs and f"; {jobs}"
        if waited >= seconds:
            among = " that workers= and resources= allow" if choice.is_restricted else ""
            raise ClusterError(
                f"only {n_running} of min_workers={min_workers} workers{among} are there after {seconds:g} s"
                f"{jobs}. Start more, or wait longer ({limit}). If workers or their jobs run, look at their logs: they "
                f"must reach the scheduler at {address_of(client)}"
            )
        if waited >= report_after:
            report_after = 2 * waited if waiting is None else waited + STEP
            text = f"{n_running} of {min_workers} workers have connected{jobs}"
            if waiting is None:
                logger.warning("dshuffle: %s after %.0f s", text, waited)
            else:
                waiting(text)
        time.sleep(min(PAUSE, seconds - waited))
