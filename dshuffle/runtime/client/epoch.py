"""The user's view of an epoch, whose tasks run on the workers that hold the samples.

Tasks are submitted to all workers in one message, and their results are fetched in one request. With one message per
task and one request per result, a round of 8 processes took 1.5 times as long.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import dask
from distributed import Client, Future, as_completed, wait

from dshuffle.errors import InvalidParameter, PeerFailed, WorkerLost
from dshuffle.runtime.client.epoch_tasks import EpochTasks
from dshuffle.runtime.client.session_client import PATIENCE, SessionClient
from dshuffle.runtime.collective import CollectiveId, run_together
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
    values = [value.values for value in (*args, *kwargs.values()) if isinstance(value, PerRank)]
    # Tasks in one message share their arguments if the scheduler and the workers are in one process. Dask also warns
    # about any message of 10 MiB or more, even if it has a separate part for each worker.
    apart = addresses[0].startswith("inproc://") or not all(isinstance(one, Future) for each in values for one in each)
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


def gathered(futures: Sequence[Future[Any]]) -> list[Any]:
    """Fetch the results of one task per worker in one request. If tasks failed, raise the error of the lowest rank."""
    try:
        results: list[Any] = futures[0].client.gather(list(futures))
    except Exception:
        for future in futures:
            future.result()
        raise
    return results


logger = logging.getLogger(__name__)

MOST_RESTARTS = 3
"""How often a call of :meth:`Epoch.together` starts because workers were replaced."""


class TaskSubmitter(Protocol):
    """What an epoch needs of the shuffler that made it."""

    @property
    def client(self) -> Client:
        """The Dask client."""

    @property
    def _calls(self) -> SessionClient: ...

    def _repr_html_(self) -> str: ...

    def _submit(
        self, epoch: Epoch, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Future[Any]]: ...

    def _new_collective(self) -> CollectiveId: ...

    def look_up_members(self) -> bool:
        """Whether the workers have changed since the last look."""


class Epoch:
    """One epoch, in which every worker holds its partition and tasks run on the worker that holds their samples.

    Attributes
    ----------
    number
        Number of the epoch, from 0.
    """

    def __init__(self, shuffler: TaskSubmitter, tasks: EpochTasks) -> None:
        self.number = tasks.epoch
        self._shuffler = shuffler
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<Epoch {self.number} of {self._shuffler!r}>"

    def _repr_html_(self) -> str:
        return f"<b>Epoch {self.number}</b>{self._shuffler._repr_html_()}"

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Run ``fn(partition, *args, **kwargs)`` as one Dask task on each worker.

        Parameters
        ----------
        fn
            Function to call with the worker's :class:`Partition`, which is valid until the function returns.
        *args, **kwargs
            Further arguments of ``fn``. Futures are replaced by their results. For a :class:`PerRank`, each worker gets
            its own value.

        Returns
        -------
        list of distributed.Future
            One future per worker, in rank order. If a task raises, its future has the original traceback.

        Raises
        ------
        ClusterError
            If this epoch has ended.
        """
        return self._shuffler._submit(self, fn, args, kwargs)

    def accept(self, futures: list[Future[Any]] | None = None) -> None:
        """Let the epoch end although tasks failed, were cancelled, or were lost with their workers.

        Without this call, moving on to the next epoch raises their errors, also if you have handled them: their samples
        may not have been trained on. The epoch still waits until all of its tasks have ended.

        Parameters
        ----------
        futures
            What :meth:`map` returned; by default the tasks of all calls so far.

        Raises
        ------
        InvalidParameter
            If the futures are not those of a call in this epoch.

        Examples
        --------
        >>> import numpy as np, dshuffle
        >>> from distributed import Client
        >>> dataset = dshuffle.create_dataset("memory://doc-accept", {"x": np.arange(10.0)}, overwrite=True)
        >>> def invert(partition):
        ...     return [1 / int(x) for x in partition["x"]]  # one of the values is 0
        >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
        ...     with dshuffle.Shuffler(client, dataset) as shuffler:
        ...         for epoch in shuffler.epochs(2):
        ...             futures = epoch.map(invert)
        ...             print(len(client.gather(futures, errors="skip")))
        ...             epoch.accept(futures)
        1
        1
        """
        self._tasks.accept(futures)

    def forget(self, futures: list[Future[Any]]) -> None:
        """Do not wait for the tasks of a call, or raise their errors, when the epoch ends.

        Parameters
        ----------
        futures
            What :meth:`map` returned.

        Raises
        ------
        InvalidParameter
            If the futures are not those of a call in this epoch.
        """
        self._tasks.forget(futures)

    def together(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn(partition, group, *args, **kwargs)`` on all workers at the same time, and wait for all of them.

        Parameters
        ----------
        fn
            Function to call with the worker's :class:`Partition` and the :class:`~dshuffle.runtime.Group` of all ranks.
            ``group.mean(array, weight)`` averages an array over the ranks. All ranks must call it the same number of
            times. A rank that waits for another whose ``fn`` has returned gets ``PeerFailed``.
        *args, **kwargs
            Further arguments of ``fn``, as in :meth:`map`.

        Returns
        -------
        list
            Return values of ``fn``, in rank order.

        Raises
        ------
        ClusterError
            If this epoch has ended.
        PeerFailed
            If a rank called ``group.mean`` more often than another.

        Notes
        -----
        If ``fn`` raises on a rank, the other ranks stop waiting and its error is raised here. If a worker is lost and
        replaced, ``fn`` starts again on all ranks. So it must not depend on what an earlier call left on the workers.
        The arrays are averaged on the worker of rank 0, whose link carries all arrays in and all means out. This works
        well for models of up to about a million numbers. Use an all-reduce for larger ones
        (:mod:`dshuffle.training.torch_ddp`).

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
        for restarts_left in reversed(range(MOST_RESTARTS)):
            futures = self._run_together(fn, args, kwargs)
            errors = [future.exception() for future in futures if future.status == "error"]
            # If a worker was replaced, its rank started again, and the others cannot go on with it.
            if not errors or not all(isinstance(error, PeerFailed) for error in errors):
                break
            if not self._shuffler.look_up_members():
                break
            if not restarts_left:  # the cause is a loss every time
                errors = [PeerFailed(str(error), transient=True) for error in errors]
                break
            logger.warning("dshuffle: a lost worker was replaced, so a call of together starts again on all ranks")
            self.forget(futures)
        for error in sorted(errors, key=lambda error: isinstance(error, PeerFailed)):
            assert error is not None
            raise error
        results: list[Any] = self._shuffler.client.gather(futures)
        return results

    def _run_together(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Future[Any]]:
        """Run ``fn`` on all ranks, and return the futures once all have ended."""
        shuffler = self._shuffler
        collective = shuffler._new_collective()
        futures = self.map(run_together, collective, fn, *args, **kwargs)
        try:
            with shuffler.client.as_current():
                first = next(iter(as_completed(futures, loop=shuffler.client.loop)))
                rank, failed = futures.index(first), first.status != "finished"
                # A rank that has returned does not take part in another mean, and all means that it took part in are
                # complete. So no rank loses a result. A rank that raises has told the others itself, unless its worker
                # is lost. If rank 0's worker is lost, the others notice that themselves, unless rank 0 had just moved.
                tell = rank or not failed or not isinstance(first.exception(), WorkerLost)
                reason = f"the task of rank {rank} has {'failed' if failed else 'ended'}"
                while True:
                    if tell:
                        # A rank that has ended made fewer calls than the others, as it would again.
                        shuffler._calls.end_collective(collective, reason, transient=failed)
                    with contextlib.suppress(TimeoutError):
                        wait(futures, timeout=PATIENCE)
                        break
                    # Again: the message may be lost, or a rank may come late to a worker that has opened again.
                    tell = True
        except BaseException:
            shuffler._calls.end_collective(collective, "the client has stopped waiting")
            raise
        return futures
