"""Wait for the workers of a cluster."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from distributed import Client

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError
from dshuffle.runtime.client.bounded_calls import LOG_AFTER
from dshuffle.runtime.client.cluster_view import cluster_info, running_workers
from dshuffle.runtime.quantities import as_seconds
from dshuffle.runtime.worker_choice import EVERY_WORKER, WorkerChoice

logger = logging.getLogger(__name__)

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

    Parameters
    ----------
    waiting
        Called every two seconds. It may raise an error to end the wait. By default a line is logged, less and less
        often.
    limit
        Name of the parameter or setting that says how long to wait.
    choice
        The workers that count.

    Raises
    ------
    ClusterError
        If there are not enough in time, or the cluster knows that there will not be, or the scheduler does not answer.
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
