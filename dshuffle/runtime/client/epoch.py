"""The user's view of an epoch, whose tasks run on the workers that hold the samples."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Future, as_completed, wait

from dshuffle.errors import PeerFailed, WorkerLost
from dshuffle.runtime.client.epoch_sequence import EpochSequence
from dshuffle.runtime.client.epoch_tasks import EpochTasks, submit_to_all
from dshuffle.runtime.client.session_client import PATIENCE
from dshuffle.runtime.collective import run_together

logger = logging.getLogger(__name__)

MOST_RESTARTS = 3
"""How often a call of :meth:`Epoch.together` starts because workers were replaced."""


class Epoch:
    """One epoch, in which every worker holds its partition and tasks run on the worker that holds their samples.

    Attributes
    ----------
    number
        Number of the epoch, from 0.
    """

    def __init__(self, sequence: EpochSequence, tasks: EpochTasks) -> None:
        self.number = tasks.epoch
        self._sequence = sequence
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<Epoch {self.number} of {self._sequence!r}>"

    def _repr_html_(self) -> str:
        return f"<b>Epoch {self.number}</b>{self._sequence._repr_html_()}"

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
        sequence, tasks = self._sequence, self._tasks
        sequence.check_current(tasks)
        current, call = sequence.membership.current, tasks.next_call()
        session_id = current.calls.session_id
        futures = submit_to_all(sequence.client, current.ranks, session_id, self.number, call, fn, args, kwargs)
        tasks.calls[call] = futures
        sequence.watch_tasks()
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
            if not self._sequence.membership.current.look_up_members():
                break
            if not restarts_left:  # the cause is a loss every time
                errors = [PeerFailed(str(error), transient=True) for error in errors]
                break
            logger.warning("dshuffle: a lost worker was replaced, so a call of together starts again on all ranks")
            self.forget(futures)
        for error in sorted(errors, key=lambda error: isinstance(error, PeerFailed)):
            assert error is not None
            raise error
        results: list[Any] = self._sequence.client.gather(futures)
        return results

    def _run_together(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Future[Any]]:
        """Run ``fn`` on all ranks, and return the futures once all have ended."""
        sequence = self._sequence
        collective = sequence.new_collective()
        futures = self.map(run_together, collective, fn, *args, **kwargs)
        try:
            with sequence.client.as_current():
                first = next(iter(as_completed(futures, loop=sequence.client.loop)))
                rank, failed = futures.index(first), first.status != "finished"
                # A rank that has returned does not take part in another mean, and all means that it took part in are
                # complete. So no rank loses a result. A rank that raises has told the others itself, unless its worker
                # is lost. If rank 0's worker is lost, the others notice that themselves, unless rank 0 had just moved.
                must_tell = rank or not failed or not isinstance(first.exception(), WorkerLost)
                reason = f"the task of rank {rank} has {'failed' if failed else 'ended'}"
                while True:
                    if must_tell:
                        # A rank that has ended made fewer calls than the others, as it would again.
                        sequence.calls.end_collective(collective, reason, transient=failed)
                    with contextlib.suppress(TimeoutError):
                        wait(futures, timeout=PATIENCE)
                        break
                    # Again: the message may be lost, or a rank may come late to a worker that has opened again.
                    must_tell = True
        except BaseException:
            sequence.calls.end_collective(collective, "the client has stopped waiting")
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
