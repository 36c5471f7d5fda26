"""The cluster as a client sees it: calls that end, workers that are there, and waiting for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import dask
from distributed import Client, LocalCluster, Nanny
from distributed.core import Status

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.planning.shares import SharePolicy
from dshuffle.runtime.messages import retrieve
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

WORKERS = "a worker, or the scheduler,"
"""Who has not answered if not all of the workers have."""

ANSWER_WITHIN = 15.0
"""Seconds that every call may take, also with a shorter ``dshuffle.timeout``: the machine may be busy."""

LOG_AFTER = 3.0
"""Seconds after which a call that still waits says so for the first time; then after twice that time, and so on."""


def answer(
    client: Client,
    call: Callable[[], Awaitable[T]],
    sender: str,
    seconds: float | None = None,
    work_seconds: float = 0.0,
) -> T:
    """Return the answer to a call."""
    result: T = client.sync(_within, limit_of(seconds), call, sender, work_seconds)
    return result


def limit_of(seconds: float | None = None) -> float:
    """Seconds that a call may take, if ``seconds`` are given for it; by default ``dshuffle.timeout``."""
    return max(ANSWER_WITHIN, Settings.from_config().timeout if seconds is None else seconds)


def run_on_workers(
    client: Client,
    function: Callable[..., Any],
    *args: Any,
    workers: Sequence[str] | None = None,
    answer_seconds: float | None = None,
    work_seconds: float = 0.0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run a function on all workers as :meth:`distributed.Client.run` does, and return the results by address.

    ``answer_seconds`` and ``work_seconds`` are those of :func:`answer`.
    """
    names = None if workers is None else list(workers)

    def call() -> Awaitable[dict[str, Any]]:
        return client._run(function, *args, workers=names, **kwargs)

    return answer(client, call, WORKERS, answer_seconds, work_seconds)


async def _within(seconds: float, call: Callable[[], Awaitable[T]], sender: str, work_seconds: float) -> T:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(call())
    task.add_done_callback(retrieve)
    answer_due, pause = loop.time() + work_seconds, LOG_AFTER
    log_at = answer_due + pause
    try:
        while not (await asyncio.wait([task], timeout=min(log_at, answer_due + seconds) - loop.time()))[0]:
            waited = loop.time() - answer_due
            if waited >= seconds:
                raise TimeoutError(f"{sender} did not answer within {seconds:g} s")
            logger.warning("dshuffle: %s has not answered for %.0f s", sender, waited)
            pause *= 2
            log_at += pause
        return task.result()
    finally:
        task.cancel()  # and not awaited: Dask would flush the connection first, which can take forever


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
    """The workers that a session may have, by all their names, after a check against those of the cluster."""
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


STEP = 2.0
"""Seconds after which a wait for workers reports how many there are, and between two reports."""

PAUSE = 0.1
"""Seconds between two looks at the cluster."""

Waiting = Callable[[str], None]
"""Called during a wait for workers with a text such as ``"1 of 4 workers have connected"``."""


@contextlib.contextmanager
def log_if_slow(what: str, after: float = LOG_AFTER) -> Iterator[None]:
    """Log once what is being done if the body takes long, and how long it has taken when it ends."""
    done, began, is_slow = threading.Event(), time.monotonic(), False

    def say() -> None:
        nonlocal is_slow
        if not done.wait(after):
            is_slow = True
            logger.warning("dshuffle: %s (%.0f s so far)", what, time.monotonic() - began)

    thread = threading.Thread(target=say, name="dshuffle-log-if-slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if is_slow:
            logger.warning("dshuffle: this has taken %.0f s: %s", time.monotonic() - began, what)


def wait_for_workers(
    client: Client,
    min_workers: int,
    patience: str | float,
    waiting: Waiting | None = None,
    *,
    limit: str = "patience",
    choice: WorkerChoice = EVERY_WORKER,
) -> None:
    """Wait until a cluster has a number of workers.

    ``Client.wait_for_workers`` is not reliable for this: it replaces what the cluster object knows of its workers. If a
    worker leaves at this moment, the cluster object fails with a KeyError, and never again starts another worker in
    place of a lost one.
    """
    as_integer("min_workers", min_workers, 1)
    seconds = as_seconds("patience", patience)
    began, report_after, log_after = time.monotonic(), STEP, STEP
    while True:
        left = began + seconds - time.monotonic()
        information = cluster_info(client, left)
        n_running = running_workers(information, choice)
        if n_running >= min_workers:
            return
        jobs = _jobs_of(client, min_workers)
        waited = time.monotonic() - began
        if waited >= seconds:
            raise ClusterError(
                f"only {n_running} of min_workers={min_workers} workers{_of(choice)} are there after {seconds:g} s"
                f"{jobs}. Start more, or wait longer ({limit}). If workers or their jobs run, look at their logs: they "
                f"must reach the scheduler at {information['address']}"
            )
        if waited >= report_after:
            report_after = waited + STEP
            text = f"{n_running} of {min_workers} workers have connected"
            if waiting is not None:
                waiting(f"{text}{jobs}")
            elif waited >= log_after:
                log_after = 2 * waited
                logger.warning("dshuffle: %s after %.0f s%s", text, waited, jobs)
        time.sleep(min(PAUSE, STEP, seconds - waited))


def _of(choice: WorkerChoice) -> str:
    return " that workers= and resources= allow" if choice.is_restricted else ""


def _jobs_of(client: Client, n_workers: int) -> str:
    """What a cluster that watches its jobs, such as that of ``BatchJobs``, says about those without a worker.

    It raises an error if so many workers cannot come any more.
    """
    describe = getattr(client.cluster, "describe_jobs", None)
    return "" if describe is None or not (text := describe(n_workers)) else f"; {text}"
