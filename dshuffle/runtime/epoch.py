"""Tasks on partitions: sent to all workers at once, and their results fetched at once.

With one submission a task, and one request a result, a round of 8 processes took one and a half times as long.

One epoch, as users hold it: tasks run where its samples are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import dask
from distributed import Client, Future, as_completed, wait

from dshuffle.errors import InvalidParameter, PeerFailed, WorkerLost
from dshuffle.runtime.collective import run_together
from dshuffle.runtime.session_spec import TASK_PREFIX, PerRank
from dshuffle.runtime.worker.worker_plugin import run_on_partition

if TYPE_CHECKING:
    from dshuffle.runtime.shuffler import Shuffler


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


class Epoch:
    """One epoch: every worker holds its partition, and tasks run where the data are.

    Attributes
    ----------
    number
        The epoch, from 0.
    """

    def __init__(self, shuffler: Shuffler, number: int) -> None:
        self.number = number
        self._shuffler = shuffler
        self._futures: list[Future[Any]] = []
        self._calls = itertools.count()

    def __repr__(self) -> str:
        return f"<Epoch {self.number} of {self._shuffler!r}>"

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Run ``fn(partition, *args, **kwargs)`` as one Dask task on each worker.

        Parameters
        ----------
        fn
            Gets the worker's :class:`Partition`, valid until it returns.
        *args, **kwargs
            Passed on; futures among them arrive as their results, and of a :class:`PerRank` each worker gets its own
            value.

        Returns
        -------
        list of distributed.Future
            In rank order. A task that raises carries its original traceback.

        Raises
        ------
        ClusterError
            If this epoch has ended.
        """
        return self._shuffler._submit(self, next(self._calls), fn, args, kwargs)

    def together(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn(partition, group, *args, **kwargs)`` on all workers at the same time, and wait for all of them.

        Parameters
        ----------
        fn
            Gets the worker's :class:`Partition`, and the :class:`~dshuffle.runtime.Group` of all ranks, whose
            ``group.mean(array, weight)`` averages an array over them. All ranks must call it equally often: who
            waits for one whose ``fn`` has returned gets ``PeerFailed``.
        *args, **kwargs
            As in :meth:`map`.

        Returns
        -------
        list
            What ``fn`` returned, in rank order.

        Raises
        ------
        ClusterError
            If this epoch has ended.
        PeerFailed
            If a rank came to more steps than another.

        Notes
        -----
        If ``fn`` raises on a rank, or a worker is lost, the others stop waiting, and its error is raised here. The
        arrays meet on the worker of rank 0, whose link carries all of them in and all means out: good for models of up
        to a million numbers or so. Larger ones want an all-reduce (:mod:`dshuffle.training.torch_ddp`).

        Examples
        --------
        >>> import numpy as np, dshuffle
        >>> from distributed import Client
        >>> dataset = dshuffle.create_dataset("memory://doc-together", {"x": np.arange(10.0)}, overwrite=True)
        >>> def mean(partition, group):
        ...     return float(group.mean(partition["x"].mean(), weight=len(partition)))
        >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
        ...     with dshuffle.Shuffler(client, dataset) as shuffler:
        ...         [epoch.together(mean) for epoch in shuffler.epochs(1)]
        [[4.5, 4.5]]
        """
        shuffler = self._shuffler
        place = shuffler._new_meeting()
        futures = self.map(run_together, place, fn, *args, **kwargs)
        try:
            with shuffler._client.as_current():
                first = next(iter(as_completed(futures, loop=shuffler._client.loop)))
                rank, failed = futures.index(first), first.status != "finished"
                # Whoever has returned comes to no further mean, and all of the last one's are known by then: nobody
                # loses anything that is still to come. A rank that raises has told the others itself, unless its worker
                # is no more. (If that was where they meet, they know.)
                if rank or not failed or not isinstance(first.exception(), WorkerLost):
                    shuffler._disband(place, f"the task of rank {rank} has {'failed' if failed else 'ended'}")
                wait(futures)
        except BaseException:
            shuffler._disband(place, "the client does not wait any more")
            raise
        errors = [future.exception() for future in futures if future.status == "error"]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerFailed)):
            raise error
        results: list[Any] = shuffler._client.gather(futures)
        return results
