"""Training without any shuffling, to compare with: samples in the order in which the dataset has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distributed import Future

from dshuffle.runtime import Partition, Shuffler


class AsStored:
    """A shuffler whose tasks see each worker's samples in the order of the dataset.

    It has :meth:`epochs` alone, and its epochs only ``map``: enough for the trainers that average once an epoch
    (:func:`fit_linear_regression`, :func:`fit_parallel_sgd`) and for :func:`fit_matrix_completion`. Those that take
    steps together, and the parameter server, want a :class:`~dshuffle.Shuffler`.

    A session's own epochs are always in random order. With the assignment ``"local"`` nothing at all changes from one
    epoch to the next, as in training without a shuffle.

    Parameters
    ----------
    shuffler
        An open one; it must be closed as always.
    """

    def __init__(self, shuffler: Shuffler) -> None:
        self._shuffler = shuffler

    def epochs(self, count: int) -> Iterator[StoredEpoch]:
        """As of the shuffler."""
        for epoch in self._shuffler.epochs(count):
            yield StoredEpoch(epoch.map)


class StoredEpoch:
    """An epoch whose tasks get partitions in stored order."""

    def __init__(self, run: Callable[..., list[Future[Any]]]) -> None:
        self._run = run

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """As of the shuffler's epoch; ``fn`` gets :meth:`~dshuffle.Partition.as_stored`."""
        return self._run(in_stored_order, fn, *args, **kwargs)


def in_stored_order(partition: Partition, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn`` on a partition in stored order; a task on each worker."""
    stored = partition.as_stored()
    try:
        return fn(stored, *args, **kwargs)
    finally:
        stored.close()
