"""Wait for the workers of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from distributed import Client

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError
from dshuffle.runtime.cluster_view import running_workers
from dshuffle.runtime.quantities import as_seconds

logger = logging.getLogger(__name__)

STEP = 2.0
"""Seconds after which a wait says something, and looks at the jobs of the cluster."""

SAY_AFTER = 3.0
"""Seconds after which :func:`said` says something for the first time."""

PAUSE = 0.1
"""Seconds between two questions to the scheduler."""


Waiting = Callable[[str], None]
"""Called during a wait for workers with a text such as ``"1 of 4 workers have connected"``."""


@contextlib.contextmanager
def said(what: str, after: float = SAY_AFTER) -> Iterator[None]:
    """Log what is being done while the body runs, if it takes long, and then less and less often."""
    done = threading.Event()

    def say() -> None:
        pause = after
        while not done.wait(pause):
            logger.warning("dshuffle: %s", what)
            pause *= 2

    thread = threading.Thread(target=say, name="dshuffle-said", daemon=True)
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
    waiting: Waiting | None = None,
    *,
    limit: str = "patience",
) -> None:
    """Wait until a cluster has a number of workers.

    Parameters
    ----------
    waiting
        Called every two seconds. It may raise an error to end the wait. By default a line is logged, less and less
        often.
    limit
        Name of the parameter or setting that says how long to wait.

    Raises
    ------
    ClusterError
        If there are not enough in time, or the cluster knows that there will not be.
    """
    as_integer("min_workers", min_workers, 1)
    seconds = as_seconds("patience", patience)
    started, said = time.monotonic(), STEP
    while True:
        try:
            information = client.sync(_look, client, min_workers, min(STEP, started + seconds - time.monotonic()))
        except OSError as error:
            raise ClusterError(f"the scheduler cannot be reached: {error}") from error
        there, waited = running_workers(information), time.monotonic() - started
        if there >= min_workers:
            return
        jobs = _jobs_of(client, min_workers)
        if waited >= seconds:
            raise ClusterError(
                f"only {there} of min_workers={min_workers} workers are there after {seconds:g} s{jobs}. Start more, "
                f"or wait longer ({limit}). If workers or their jobs run, look at their logs: they must reach the "
                f"scheduler at {information['address']}"
            )
        text = f"{there} of {min_workers} workers have connected"
        if waiting is not None:
            waiting(f"{text}{jobs}")
        elif waited >= said:
            said = 2 * waited
            logger.warning("dshuffle: %s after %.0f s%s", text, waited, jobs)


async def _look(client: Client, n_workers: int, seconds: float) -> dict[str, Any]:
    """Information about the cluster, as soon as it has a number of workers or some seconds have passed.

    ``Client.wait_for_workers`` replaces what the cluster object knows of its workers. If a worker leaves at this
    moment, the cluster object fails with a KeyError, and never again starts another worker in place of a lost one.
    """
    assert client.scheduler is not None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        information: dict[str, Any] = await client.scheduler.identity(n_workers=-1)
        if running_workers(information) >= n_workers or loop.time() >= deadline:
            return information
        await asyncio.sleep(PAUSE)


def _jobs_of(client: Client, n_workers: int) -> str:
    """What a cluster that watches its jobs, such as that of ``BatchJobs``, says about those without a worker.

    It raises an error if so many workers cannot come any more.
    """
    describe = getattr(client.cluster, "describe_jobs", None)
    return "" if describe is None or not (text := describe(n_workers)) else f"; {text}"
