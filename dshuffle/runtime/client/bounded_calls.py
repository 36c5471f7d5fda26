"""Calls of a client to its cluster that end: with an answer, or with an error that says who did not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from distributed import Client

from dshuffle.runtime.replies import retrieve
from dshuffle.runtime.settings import Settings

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
    """Return the answer to a call.

    Parameters
    ----------
    call
        Makes the call. It runs on the client's event loop.
    sender
        Who is to answer, for the log and the error.
    seconds
        How long to wait, but at least 15 s. By default ``dshuffle.timeout``.
    work_seconds
        How long the work takes that is called for. The wait is longer by this time, and is logged later.

    Raises
    ------
    TimeoutError
        If there is no answer in time.
    OSError
        If the connection is lost.
    """
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

    Raises
    ------
    TimeoutError
        If there is no answer within ``dshuffle.timeout``.
    OSError
        If a connection is lost.
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
