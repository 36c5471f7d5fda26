"""One epoch, as users hold it: tasks run where its samples are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed import Future, as_completed, wait

from dshuffle.errors import PeerFailed, WorkerLost
from dshuffle.runtime.group import run_together

if TYPE_CHECKING:
    from dshuffle.runtime.shuffler import Shuffler


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
