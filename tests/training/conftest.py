"""A stand-in for the runtime: real partitions, made in this process and handed to real task functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dshuffle.planning import first_assignment, next_assignment, parse_assignment
from dshuffle.rows import RowLayout
from dshuffle.runtime import Partition, PerRank


def resolved(value: Any, rank: int) -> Any:
    value = value.values[rank] if isinstance(value, PerRank) else value
    return value.result() if isinstance(value, Future) else value


@dataclass
class FakeEpoch:
    partitions: list[Partition]

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        futures = []
        for partition in self.partitions:
            future: Future[Any] = Future()
            try:
                own = [resolved(value, partition.rank) for value in args]
                future.set_result(fn(partition, *own, **kwargs))
            except Exception as error:
                future.set_exception(error)
            futures.append(future)
        return futures


@dataclass
class FakeShuffler:
    """Shuffles in this process, by the real assignments."""

    arrays: dict[str, NDArray[Any]]
    n_workers: int = 4
    assignment: str = "global"
    sharding: str = "random"
    seed: int = 0

    def epochs(self, count: int) -> Iterator[FakeEpoch]:
        n_samples = len(next(iter(self.arrays.values())))
        layout = RowLayout.of({name: (array.dtype, array.shape[1:]) for name, array in self.arrays.items()})
        rows = layout.empty(n_samples)
        for name, array in self.arrays.items():
            layout.column(rows, name)[:] = array
        ranks = first_assignment(self.sharding, n_samples, self.n_workers, seed=self.seed)
        for epoch in range(count):
            if epoch:
                parsed = parse_assignment(self.assignment)
                ranks = next_assignment(parsed, ranks, self.n_workers, seed=self.seed, epoch=epoch)
            order = np.random.default_rng([self.seed, epoch]).permutation(n_samples)
            shares = [order[ranks[order] == rank] for rank in range(self.n_workers)]
            yield FakeEpoch(
                [Partition(layout, rows, share, share, rank=rank, epoch=epoch) for rank, share in enumerate(shares)]
            )


@pytest.fixture
def fake_shuffler() -> type[FakeShuffler]:
    return FakeShuffler
