"""Training without any shuffling, to compare with: samples in the order in which the dataset has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from distributed import Future
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning.values import as_integer
from dshuffle.runtime import Partition, Shuffler


class AsStored:
    """A shuffler for the trainers, whose tasks see each worker's samples in the order of the dataset.

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
        """As of the shuffler's epoch; ``fn`` gets a :class:`StoredOrder`."""
        return self._run(in_stored_order, fn, *args, **kwargs)


class StoredOrder:
    """What trainers use of a partition, in ascending order of samples.

    Examples
    --------
    >>> from dshuffle.rows import RowLayout
    >>> layout = RowLayout.of({"x": (np.dtype("f4"), ())})
    >>> rows = layout.empty(3)
    >>> layout.column(rows, "x")[:] = [0, 1, 2]
    >>> stored = StoredOrder(Partition(layout, rows, np.array([2, 0]), np.array([70, 50]), rank=0, epoch=3))
    >>> stored.sample_ids, stored["x"], [batch["x"] for batch in stored.batches(1)]
    (array([50, 70]), array([0., 2.], dtype=float32), [array([0.], dtype=float32), array([2.], dtype=float32)])
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._order = np.argsort(partition.sample_ids)
        self.sample_ids: NDArray[np.int64] = partition.sample_ids[self._order]
        self.rank, self.epoch = partition.rank, partition.epoch
        self.names, self.shares = partition.names, partition.shares

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """One array of all samples, a copy."""
        return self._partition[name][self._order]

    def batches(self, batch_size: int, *, drop_last: bool = False) -> Iterator[dict[str, NDArray[Any]]]:
        """Batches, in which a smaller last one may be left out."""
        batch_size = as_integer("batch_size", batch_size, 1)
        if drop_last and batch_size > len(self):
            raise InvalidParameter.of("batch_size", batch_size, f"in [1, {len(self)}], the partition's samples")
        end = len(self) - len(self) % batch_size if drop_last else len(self)
        for first in range(0, end, batch_size):
            yield self._partition.take(self._order[first : first + batch_size])


def in_stored_order(partition: Partition, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn`` on a partition in stored order; a task on each worker."""
    return fn(StoredOrder(partition), *args, **kwargs)
