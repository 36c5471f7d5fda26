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
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.quantities import as_seconds

logger = logging.getLogger(__name__)

STEP = 2.0
"""Seconds after which a wait for workers reports how many there are, and between two reports."""

PAUSE = 0.1
"""Seconds between two looks at the cluster."""

ANSWER_WITHIN = 15.0
"""Seconds in which the scheduler must say which workers there are, even if there is less time to wait for them."""


@contextlib.contextmanager
def log_if_slow(what: str, after: float = LOG_AFTER) -> Iterator[None]:
    """Log what is being done while the body runs, if it takes long, and then less and less often."""
    done = threading.Event()

    def say() -> None:
        pause = after
        while not done.wait(pause):
            logger.warning("dshuffle: %s", what)
            pause *= 2

    thread = threading.Thread(target=say, name="dshuffle-log-if-slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def wait_for_workers(
    client: Client,
    min_workers: int,
    patience: str | float,
    waiting: Callable[[int], None] | None = None,
    *,
    limit: str = "patience",
) -> None:
    """Wait until a cluster has a number of workers.

    Parameters
    ----------
    waiting
        Called every two seconds with the number of connected workers. It may raise an error to end the wait. By default
        a line is logged, less and less often.
    limit
        Name of the parameter or setting that says how long to wait.

    Raises
    ------
    ClusterError
        If there are not enough in time, or the scheduler does not answer.
    """
    as_integer("min_workers", min_workers, 1)
    seconds = as_seconds("patience", patience)
    began, report_after, log_after = time.monotonic(), STEP, STEP
    while True:
        left = began + seconds - time.monotonic()
        information = cluster_info(client, max(ANSWER_WITHIN, left))
        # Those that Dask has paused may not take part.
        n_running = sum(worker["status"] == "running" for worker in information["workers"].values())
        if n_running >= min_workers:
            return
        waited = time.monotonic() - began
        if waited >= seconds:
            raise ClusterError(
                f"only {n_running} of min_workers={min_workers} workers are there after {seconds:g} s. Start more, or "
                f"wait longer ({limit}). If workers or their jobs run, look at their logs: they must reach the "
                f"scheduler at {information['address']}"
            )
        if waited >= report_after:
            report_after = waited + STEP
            if waiting is not None:
                waiting(n_running)
            elif waited >= log_after:
                log_after = 2 * waited
                logger.warning("dshuffle: %d of %d workers have connected after %.0f s", n_running, min_workers, waited)
        time.sleep(min(PAUSE, STEP, seconds - waited))
