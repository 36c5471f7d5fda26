"""Epochs as users see them, and their tasks: how they are submitted, and whether they have ended."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import dask
from distributed import Future, as_completed, wait

from dshuffle.errors import ClusterError, InvalidParameter, PeerFailed, WorkerLost
from dshuffle.planning import name_of
from dshuffle.runtime.client.session_client import PATIENCE, OpenSession, SessionClient
from dshuffle.runtime.collective import CollectiveId, run_together
from dshuffle.runtime.messages import UnfinishedTask, rank_of_key, task_key, task_name
from dshuffle.runtime.session_spec import PerRank
from dshuffle.runtime.worker.worker_plugin import run_on_partition

logger = logging.getLogger(__name__)

MOST_RESTARTS = 3
"""How often a call of :meth:`Epoch.together` starts because workers were replaced."""

Call: TypeAlias = "list[Future[Any]]"  # Dask 2025.9 does not know types of results
"""The tasks of one call of :meth:`dshuffle.Epoch.map`, by rank."""

_collectives = itertools.count(1)  # later calls in a session have higher numbers


def submit_to_all(
    session: OpenSession, epoch: int, call: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Call:
    """Submit one task ``fn(partition, *args, **kwargs)`` to each worker, if possible in one message."""
    addresses, ranks, session_id = session.ranks, range(session.n_workers), session.session_id
    values: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, PerRank):
            if len(value.values) != len(ranks):
                allowed = f"{len(ranks)}, one value per worker"
                raise InvalidParameter.of("len(PerRank.values)", len(value.values), allowed)
            values += value.values
    # Tasks in one message share their arguments if the scheduler and the workers are in one process. Dask also warns
    # about any message of 10 MiB or more, even if it has a separate part for each worker.
    apart = addresses[0].startswith("inproc://") or not all(isinstance(value, Future) for value in values)
    futures: Call = []
    name = task_name(fn, args)

    def row(rank: int) -> tuple[Any, ...]:
        own = {name: PerRank.of(value, rank) for name, value in kwargs.items()}
        return session_id, rank, epoch, fn, [PerRank.of(value, rank) for value in args], own

    # ``client.map`` takes one set of workers for all tasks. The scheduler calls this function for each task instead.
    with dask.annotate(workers=functools.partial(worker_of, addresses)):  # type: ignore[attr-defined]
        for group in [[rank] for rank in ranks] if apart else [list(ranks)]:
            keys = [task_key(name, session_id, epoch, call, rank) for rank in group]
            columns = map(list, zip(*map(row, group), strict=True))
            futures += session.client.map(run_on_partition, *columns, key=keys, pure=False)
    return futures


def worker_of(addresses: Sequence[str], key: str) -> list[str]:
    """Workers on which a task may run, from the rank at the end of its key. The scheduler calls this function."""
    return [addresses[rank_of_key(key)]]


@dataclass(slots=True)
class EpochTasks:
    """The tasks of one epoch, call by call."""

    epoch: int
    n_calls: int = 0  # so far, with those whose tasks are not waited for
    # Number of a call -> its tasks, for the calls whose tasks must end before the epoch does.
    calls: dict[int, Call] = field(default_factory=dict)
    accepted: set[int] = field(default_factory=set)  # numbers of the calls whose tasks need not finish
    error: BaseException | None = None  # that has kept the epoch from ending
    interrupted: bool = False  # whether the session was lost, and the loop has heard of it otherwise than by a task
    over: bool = False  # whether another epoch has begun, or the shuffler is closed
    called_at: float = 0.0

    @property
    def any_call_done(self) -> bool:
        """Whether all tasks of some call have ended."""
        return any(all(future.done() for future in call) for call in self.calls.values())

    @property
    def futures(self) -> list[Future[Any]]:
        """The tasks of all calls."""
        return [future for call in self.calls.values() for future in call]

    def next_call(self) -> int:
        """The number of a new call."""
        self.n_calls, self.called_at = self.n_calls + 1, time.monotonic()
        self.error = None
        return self.n_calls - 1

    def accept(self, call: Call | None) -> None:
        """Let the epoch end although tasks of a call, or of all calls so far, did not finish."""
        self.accepted |= set(self.calls) if call is None else {self.number_of(call)}
        self.error = None

    def wait(self, session: SessionClient) -> None:
        """Wait until all tasks have ended."""
        with session.client.as_current():  # the default would be the client created last
            while pending := [future for future in self.futures if not future.done()]:
                try:
                    wait(pending, timeout=PATIENCE)
                except TimeoutError:
                    session.say_why()
                except CancelledError:
                    continue

    def end(self, session: SessionClient) -> None:
        """Wait for all tasks, and end the epoch."""
        try:
            self.wait(session)
            numbers = sorted(self.calls.keys() - self.accepted)
            if numbers:
                ask = {"epoch": self.epoch, "calls": numbers}
                self._raise_for(session.ask(tuple[UnfinishedTask, ...], "unfinished", **ask))
        except Exception as error:
            self.error = error
            raise
        self.calls.clear()
        self.error = None

    def _raise_for(self, unfinished: Sequence[UnfinishedTask]) -> None:
        """Raise the error of the first task that has failed, with a note of all that did not finish."""
        if not unfinished:
            return
        futures = [self.calls[task.call][task.rank] for task in unfinished]
        errors = [future.exception() for future in futures if future.status == "error"]
        errors.sort(key=lambda error: isinstance(error, WorkerLost))  # stable: by call and rank
        words = f"tasks of epoch {self.epoch} did not finish, so their samples were not trained on"
        error: BaseException = ClusterError(words) if not errors or errors[0] is None else errors[0]
        ranks = sorted({task.rank for task in unfinished})
        names = ", ".join(map(name_of, ranks[:5])) + (", ..." if len(ranks) > 5 else "")
        counts = sorted(Counter(task.outcome for task in unfinished).items())
        outcomes = " and ".join(f"{count} {outcome}" for outcome, count in counts)
        note = (
            f"Tasks of epoch {self.epoch}: {outcomes} ({names}). To go on without their results, also after you have "
            "run other tasks in their place, call epoch.accept(), and then shuffler.epochs() for the other epochs"
        )
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise error

    def number_of(self, call: Call) -> int:
        """The number of a call, from what it has returned."""
        for number, futures in self.calls.items():
            if futures == call:
                return number
        raise InvalidParameter.of("futures", call, f"a list that a call of map has returned in epoch {self.epoch}")


class Epoch:
    """One epoch, in which every worker holds its partition and tasks run on the worker that holds their samples.

    Attributes
    ----------
    number
        Number of the epoch, from 0.
    """

    def __init__(self, shuffler: object, session: OpenSession, tasks: EpochTasks) -> None:
        self.number = tasks.epoch
        self._shuffler = shuffler  # which stays open while its epochs are in use
        self._session, self._tasks = session, tasks

    def __repr__(self) -> str:
        return f"<Epoch {self.number} of {self._shuffler!r}>"

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Run ``fn(partition, *args, **kwargs)`` as one Dask task on each worker.

        Parameters
        ----------
        fn
            Function to call with the worker's :class:`Partition`, which is valid until the function returns. What a
            function of a script changes in global variables is lost after the task.
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
        session, tasks = self._session, self._tasks
        if tasks.over:
            raise ClusterError(f"epoch {self.number} has ended, and no task of it can begin", transient=False)
        session.check_process()
        call = tasks.next_call()
        tasks.calls[call] = futures = submit_to_all(session, self.number, call, fn, args, kwargs)
        return list(futures)

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
        del self._tasks.calls[self._tasks.number_of(futures)]

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
            failed = bool(errors) and all(isinstance(error, PeerFailed) for error in errors)
            if not (failed and self._session.look_up_members()):
                break
            if not restarts_left:  # the cause is a loss every time
                raise PeerFailed(str(errors[0]), transient=True)
            logger.warning("dshuffle: a lost worker was replaced, so a call of together starts again on all ranks")
            self.forget(futures)
        if errors:
            first: Any = min(errors, key=lambda error: isinstance(error, PeerFailed))
            raise first
        results: list[Any] = self._session.client.gather(futures)
        return results

    def _run_together(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Run ``fn`` on all ranks, and return the futures once all have ended."""
        session = self._session
        collective = CollectiveId(session.session_id, next(_collectives), session.n_workers, session.ranks[0])
        futures = self.map(run_together, collective, fn, *args, **kwargs)
        try:
            with session.client.as_current():
                first = next(iter(as_completed(futures, loop=session.client.loop)))
                rank, failed = futures.index(first), first.status != "finished"
                # A rank that has returned does not take part in another mean, and all means that it took part in are
                # complete. So no rank loses a result. A rank that raises has told the others itself, unless its worker
                # is lost. If rank 0's worker is lost, the others notice that themselves, unless rank 0 had just moved.
                must_tell = rank or not failed or not isinstance(first.exception(), WorkerLost)
                reason = f"the task of rank {rank} has {'failed' if failed else 'ended'}"
                while True:
                    if must_tell:
                        # A rank that has ended made fewer calls than the others, as it would again.
                        session.end_collective(collective, reason, transient=failed)
                    with contextlib.suppress(TimeoutError):
                        wait(futures, timeout=PATIENCE)
                        break
                    # Again: the message may be lost, or a rank may come late to a worker that has opened again.
                    must_tell = True
        except BaseException:
            session.end_collective(collective, "the client has stopped waiting")
            raise
        return futures


def gathered(futures: Sequence[Future[Any]]) -> list[Any]:
    """Fetch the results of one task per worker in one request. If tasks failed, raise the error of the lowest rank."""
    try:
        results: list[Any] = futures[0].client.gather(list(futures))
    except Exception:
        for future in futures:
            future.result()
        raise
    return results
