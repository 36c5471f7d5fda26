"""Sessions without shuffling: each worker trains on its samples in stored order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distributed import Future

from dshuffle import Partition, Shuffler


class StoredOrder:
    """Shuffler whose tasks see each worker's samples in the order of the dataset.

    It has only its dataset and :meth:`epochs`, and its epochs have only ``map``. This suffices for the trainers that
    average once an epoch (:func:`fit_linear_regression`, :func:`fit_parallel_sgd`) and for
    :func:`fit_matrix_completion`. Trainers that take steps together, and the parameter server, need a
    :class:`~dshuffle.Shuffler`.

    The epochs of a :class:`~dshuffle.Shuffler` are always in random order. Here, with the assignment ``"local"``, all
    epochs are the same, as in training without a shuffle.

    Parameters
    ----------
    shuffler
        Open shuffler. The caller must close it.
    """

    def __init__(self, shuffler: Shuffler) -> None:
        self._shuffler, self.dataset = shuffler, shuffler.dataset

    def epochs(self, count: int) -> Iterator[StoredEpoch]:
        """Yield the shuffler's epochs in stored order."""
        for epoch in self._shuffler.epochs(count):
            yield StoredEpoch(epoch.map)


class StoredEpoch:
    """Epoch whose tasks get partitions in stored order."""

    def __init__(self, run: Callable[..., list[Future[Any]]]) -> None:
        self._run = run

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Run ``fn`` on each worker with its partition in stored order; see :meth:`~dshuffle.Partition.as_stored`."""
        return self._run(in_stored_order, fn, *args, **kwargs)


def in_stored_order(partition: Partition, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` on a partition in stored order. Runs as a task on each worker."""
    stored = partition.as_stored()
    try:
        return fn(stored, *args, **kwargs)
    finally:
        stored.close()
