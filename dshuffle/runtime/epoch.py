"""One epoch, as users hold it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed import Future

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
