"""Waits for the tasks of a measurement, however long the workers are busy with other ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from distributed import Client, Future, KilledWorker

from dshuffle.errors import ClusterError, DShuffleError
from dshuffle.runtime.client.bounded_calls import LOG_AFTER, WORKERS, answer
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.client.waiting import log_if_slow

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
    with log_if_slow(
        "the measurement waits for its tasks on the workers. They begin after the tasks that the workers have already",
        LOG_AFTER + work_seconds,
    ):
        while not client.sync(_have_ended, futures):
            # The task of a worker that has left would wait for ever for a worker at this address.
            if lost := set(workers) - set(cluster_info(client)["workers"]):
                raise ClusterError(f"a worker was lost while the cluster was measured: {', '.join(sorted(lost))}")
    for error in (future.exception() for future in futures if future.status == "error"):
        if isinstance(error, (DShuffleError, KilledWorker)):
            raise error
        reason = f"{type(error).__name__}: {error}"
        raise ClusterError(f"a task of the measurement has failed on a worker ({reason})", transient=False) from error
    return list(answer(client, lambda: client._gather(futures), WORKERS))


async def _have_ended(futures: Sequence[Any]) -> bool:
    """Whether all tasks end until the next look. ``distributed.wait`` uses the client that was made last."""
    waits = [asyncio.ensure_future(future._state.wait()) for future in futures]
    try:
        return not (await asyncio.wait(waits, timeout=LOOK))[1]
    finally:
        for wait in waits:
            wait.cancel()
