"""Submit the tasks of one call of :meth:`dshuffle.Epoch.map`.

All tasks go to the scheduler in one message. With one message per task, a round of 8 processes took 1.5 times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import dask
from distributed import Client, Future

from dshuffle.errors import InvalidParameter
from dshuffle.runtime.session_spec import PerRank
from dshuffle.runtime.task_keys import rank_of_key, task_key, task_name
from dshuffle.runtime.worker.partition_task import run_on_partition


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
    """Submit one task ``fn(partition, *args, **kwargs)`` to each worker, if possible in one message to the scheduler.

    Parameters
    ----------
    addresses
        Addresses of the workers, by rank.
    call
        Number of this call within the epoch.
    args, kwargs
        Arguments of ``fn``. A :class:`PerRank` has one value for each worker.

    Raises
    ------
    InvalidParameter
        If a :class:`PerRank` does not have one value per worker.
    """
    ranks = range(len(addresses))
    for value in (*args, *kwargs.values()):
        if isinstance(value, PerRank) and len(value.values) != len(ranks):
            raise InvalidParameter.of("len(PerRank.values)", len(value.values), f"{len(ranks)}, one value per worker")
    values = [value for values in (*args, *kwargs.values()) if isinstance(values, PerRank) for value in values.values]
    # Tasks in one message share their arguments if the scheduler and the workers are in one process. Dask also warns
    # about any message of 10 MiB or more, even if it has a separate part for each worker.
    apart = addresses[0].startswith("inproc://") or not all(isinstance(value, Future) for value in values)
    futures: list[Future[Any]] = []
    name = task_name(fn, args)
    # ``client.map`` takes one set of workers for all tasks. The scheduler calls this function for each task instead.
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
                key=[task_key(name, session_id, epoch, call, rank) for rank in group],
                pure=False,
            )
    return futures


def worker_of(addresses: Sequence[str], key: str) -> list[str]:
    """Workers on which a task may run, from the rank at the end of its key. The scheduler calls this function.

    Examples
    --------
    >>> worker_of(["tcp://10.0.0.1:1", "tcp://10.0.0.2:2"], "train-dshuffle-abc-3-0-1")
    ['tcp://10.0.0.2:2']
    """
    return [addresses[rank_of_key(key)]]
