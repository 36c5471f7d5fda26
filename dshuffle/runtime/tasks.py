"""Tasks on partitions: sent to all workers at once, and their results fetched at once.

With one submission a task, and one request a result, a round of 8 processes took one and a half times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import dask
from distributed import Client, Future

from dshuffle.errors import InvalidParameter
from dshuffle.runtime.spec import TASK_PREFIX, PerRank
from dshuffle.runtime.worker import run_on_partition


def submit_to_all(
    client: Client,
    addresses: Sequence[str],
    session_id: str,
    epoch: int,
    call: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> list[Future[Any]]:
    """One task on each worker, ``fn(partition, *args, **kwargs)``, if possible in one message to the scheduler.

    Parameters
    ----------
    addresses
        Of the workers, by rank.
    call
        Which of the epoch's calls it is.
    args, kwargs
        A :class:`PerRank` among them has one value for each worker.

    Raises
    ------
    InvalidParameter
        If it has more or fewer.
    """
    ranks = range(len(addresses))
    for value in (*args, *kwargs.values()):
        if isinstance(value, PerRank) and len(value.values) != len(ranks):
            raise InvalidParameter.of("PerRank.values", len(value.values), f"{len(ranks)}, one a worker")
    values = [value.values for value in (*args, *kwargs.values()) if isinstance(value, PerRank)]
    # Tasks of one message share the objects that they are given, if no network is between scheduler and workers; and
    # Dask warns of a message from 10 MiB on, whether that is for one worker or in parts for all.
    apart = addresses[0].startswith("inproc://") or not all(isinstance(one, Future) for each in values for one in each)
    futures: list[Future[Any]] = []
    # ``client.map`` has one set of workers for all tasks; the scheduler asks a function for those of each.
    with dask.annotate(workers=functools.partial(worker_of, tuple(addresses))):  # type: ignore[attr-defined]
        for group in [[rank] for rank in ranks] if apart else [list(ranks)]:
            futures += client.map(
                run_on_partition,
                [session_id] * len(group),
                group,
                [epoch] * len(group),
                [fn] * len(group),
                [[PerRank.of(value, rank) for value in args] for rank in group],
                [{name: PerRank.of(value, rank) for name, value in kwargs.items()} for rank in group],
                key=[f"{TASK_PREFIX}{session_id}-{epoch}-{call}-{rank}" for rank in group],
                pure=False,
            )
    return futures


def worker_of(addresses: Sequence[str], key: str) -> list[str]:
    """Where a task may run, by the rank at the end of its key; called by the scheduler.

    Examples
    --------
    >>> worker_of(["tcp://10.0.0.1:1", "tcp://10.0.0.2:2"], f"{TASK_PREFIX}abc-3-0-1")
    ['tcp://10.0.0.2:2']
    """
    return [addresses[int(key.rsplit("-", 1)[1])]]


def gathered(futures: Sequence[Future[Any]]) -> list[Any]:
    """The results of tasks, one a worker, fetched at once; of several errors that of the lowest rank, in every run."""
    try:
        results: list[Any] = futures[0].client.gather(list(futures))
    except Exception:
        for future in futures:
            future.result()
        raise
    return results
