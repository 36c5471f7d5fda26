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
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.quantities import as_seconds

logger = logging.getLogger(__name__)

STEP = 2.0
"""Seconds between two looks at the cluster."""

SAY_AFTER = 3.0
"""Seconds after which :func:`said` says something for the first time."""

LEAST = 0.01
"""Seconds of the last look. Dask takes 0 for no limit."""


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
        If there are not enough in time.
    """
    as_integer("min_workers", min_workers, 1)
    seconds = as_seconds("patience", patience)
    started, said = time.monotonic(), STEP
    while True:
        waited = time.monotonic() - started
        try:
            client.wait_for_workers(min_workers, timeout=min(STEP, max(LEAST, seconds - waited)))
        except TimeoutError as error:
            information, waited = cluster_info(client), time.monotonic() - started
            there, address = len(information["workers"]), information["address"]
            if waited >= seconds:
                raise ClusterError(
                    f"only {there} of min_workers={min_workers} workers are there after {seconds:g} s. Start more, or "
                    f"wait longer ({limit}). If workers or their jobs run, look at their logs: they must reach the "
                    f"scheduler at {address}"
                ) from error
            if waiting is not None:
                waiting(there)
            elif waited >= said:
                said = 2 * waited
                logger.warning("dshuffle: %d of %d workers have connected after %.0f s", there, min_workers, waited)
        except OSError as error:
            raise ClusterError(f"the scheduler cannot be reached: {error}") from error
        else:
            return
