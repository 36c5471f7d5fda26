"""Waits for the tasks of a measurement, however long the workers are busy with other ones."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from distributed import Client, Future, KilledWorker

from dshuffle.errors import ClusterError, DShuffleError
from dshuffle.runtime.client.bounded_calls import LOG_AFTER, limit_of
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.client.waiting import log_if_slow
from dshuffle.runtime.replies import retrieve

T = TypeVar("T")

LOOK = 2.0
"""Seconds between two looks at the workers."""


def task_results(
    client: Client, futures: Sequence[Future[Any]], workers: Sequence[str], work_seconds: float = 0.0
) -> list[Any]:
    """Wait for tasks, and return their results.

    Parameters
    ----------
    workers
        Addresses of the only workers that may run the tasks.
    work_seconds
        How long a task runs.

    Raises
    ------
    ClusterError
        If one of the workers has left the cluster, a task fails there, or the scheduler does not answer.
    DShuffleError, KilledWorker
        The error of a task.
    """
    slow = (
        "the measurement waits for its tasks on the workers. They begin after the tasks that the workers have already"
    )
    with log_if_slow(slow, LOG_AFTER + work_seconds):
        _unless_lost(client, workers, lambda: _have_ended(futures))
    for error in (future.exception() for future in futures if future.status == "error"):
        if isinstance(error, (DShuffleError, KilledWorker)):
            raise error
        reason = f"{type(error).__name__}: {error}"
        raise ClusterError(f"a task of the measurement has failed on a worker ({reason})", transient=False) from error
    with log_if_slow("the measurement waits for the results of its tasks", LOG_AFTER):
        return list(_unless_lost(client, workers, lambda: client._gather(futures), limit_of()))


def _unless_lost(
    client: Client, workers: Sequence[str], call: Callable[[], Awaitable[T]], seconds: float = math.inf
) -> T:
    """The result of a call on the client's event loop, unless one of the workers leaves the cluster meanwhile.

    A task of a worker that has left, or its result, would wait for ever for a worker at this address.
    """
    task, began = client.sync(_started, call), time.monotonic()
    try:
        while not client.sync(_has_ended, task):
            if lost := set(workers) - set(cluster_info(client)["workers"]):
                raise ClusterError(f"a worker was lost while the cluster was measured: {', '.join(sorted(lost))}")
            if time.monotonic() - began > seconds:
                raise ClusterError(f"the results of a measurement have not come within {seconds:g} s")
        result: T = task.result()
        return result
    finally:
        with contextlib.suppress(RuntimeError):  # the client's event loop has ended, and the task with it
            client.sync(_cancelled, task)


async def _have_ended(futures: Sequence[Any]) -> None:
    """Wait until all tasks have ended. ``distributed.wait`` uses the client that was made last."""
    waits = [asyncio.ensure_future(future._state.wait()) for future in futures]
    try:
        await asyncio.wait(waits)
    finally:
        for wait in waits:
            wait.cancel()


async def _started(call: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
    task = asyncio.ensure_future(call())
    task.add_done_callback(retrieve)
    return task


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()


async def _has_ended(task: asyncio.Future[Any]) -> bool:
    """Whether it ends until the next look."""
    return bool((await asyncio.wait([task], timeout=LOOK))[0])
