"""A stand-in for the runtime: real partitions, made in this process and handed to real task functions."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster
from numpy.typing import NDArray

from dshuffle.errors import PeerFailed
from dshuffle.planning import Choices, ShuffleSpec, first_ranks, parse_assignment
from dshuffle.planning.remainder import workers_of
from dshuffle.rows import RowLayout
from dshuffle.runtime import Partition, PerRank
from dshuffle.runtime.collective import weighted_mean

from ..draws import next_ranks


def resolved(value: Any, rank: int) -> Any:
    value = value.values[rank] if isinstance(value, PerRank) else value
    return value.result() if isinstance(value, Future) else value


class FakeClient:
    def gather(self, futures: list[Future[Any]]) -> list[Any]:
        return [future.result() for future in futures]


class FakeFuture(Future[Any]):
    """Done when it is made."""

    client = FakeClient()


class FakeGroup:
    """Ranks that are threads, and meet at a barrier."""

    def __init__(self, rank: int, meeting: tuple[threading.Barrier, list[Any]]) -> None:
        self.rank = rank
        self.barrier, self.arrived = meeting
        self.size = self.barrier.parties

    def mean(self, values: NDArray[Any], weight: float = 1.0) -> NDArray[Any]:
        self.arrived[self.rank] = values, weight
        try:
            self.barrier.wait()
            mean = weighted_mean(list(self.arrived))
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerFailed("another rank has failed") from None
        return mean


@dataclass
class FakeEpoch:
    number: int
    partitions: list[Partition]

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        futures = []
        for partition in self.partitions:
            future = FakeFuture()
            try:
                own = [resolved(value, partition.rank) for value in args]
                future.set_result(fn(partition, *own, **kwargs))
            except Exception as error:
                future.set_exception(error)
            futures.append(future)
        return futures

    def together(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        n = len(self.partitions)
        meeting = threading.Barrier(n), [None] * n

        def run(partition: Partition) -> Any:
            try:
                return fn(partition, FakeGroup(partition.rank, meeting), *args, **kwargs)
            except BaseException:
                meeting[0].abort()
                raise

        with ThreadPoolExecutor(n) as pool:
            futures = [pool.submit(run, partition) for partition in self.partitions]
        errors = [future.exception() for future in futures if future.exception() is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerFailed)):
            raise error
        return [future.result() for future in futures]


@dataclass
class FakeShuffler:
    """Shuffles in this process, by the real assignments; with weights, by ``global``."""

    arrays: dict[str, NDArray[Any]]
    n_workers: int = 4
    assignment: str = "global"
    sharding: str | NDArray[np.int32] = "random"
    seed: int = 0
    weights: tuple[int, ...] = ()
    records: list[Any] = field(default_factory=list)
    client: FakeClient = field(default_factory=FakeClient)

    @property
    def dataset(self) -> SimpleNamespace:
        return SimpleNamespace(arrays={name: array[0] for name, array in self.arrays.items()})

    def epochs(self, count: int) -> Iterator[FakeEpoch]:
        n_samples = len(next(iter(self.arrays.values())))
        layout = RowLayout.of({name: (array.dtype, array.shape[1:]) for name, array in self.arrays.items()})
        rows = layout.empty(n_samples)
        for name, array in self.arrays.items():
            layout.column(rows, name)[:] = array
        ranks = self.sharding
        if isinstance(ranks, str):
            ranks = first_ranks(ranks, n_samples, self.n_workers, seed=self.seed)
        unequal = ShuffleSpec(n_samples, self.n_workers, Choices(seed=self.seed), first_weights=self.weights)
        for epoch in range(count):
            if self.weights:
                ranks = workers_of(unequal, epoch, np.arange(n_samples))
            elif epoch:
                parsed = parse_assignment(self.assignment)
                ranks = next_ranks(parsed, ranks, self.n_workers, seed=self.seed, epoch=epoch)
            order = np.random.default_rng([self.seed, epoch]).permutation(n_samples)
            shares = [order[ranks[order] == rank] for rank in range(self.n_workers)]
            sizes = [len(share) for share in shares]
            yield FakeEpoch(
                epoch,
                [
                    Partition(
                        *(layout, rows, share, share),
                        rank=rank,
                        epoch=epoch,
                        shares=(min(sizes), max(sizes)),
                        weights=self.weights,
                    )
                    for rank, share in enumerate(shares)
                ],
            )


@pytest.fixture
def fake_shuffler() -> type[FakeShuffler]:
    return FakeShuffler


@pytest.fixture(scope="session")
def cluster_of():
    """Make a cluster, for tests that need one of their own."""
    return _cluster


@pytest.fixture(scope="package")
def processes():
    """Three worker processes of one thread each."""
    with _cluster(3, processes=True) as client:
        yield client


@pytest.fixture(scope="package")
def threads():
    """Three workers that are threads of this process."""
    with _cluster(3, processes=False) as client:
        yield client


@contextmanager
def _cluster(n_workers: int, *, processes: bool) -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            processes=processes,
            memory_limit=0,
            dashboard_address=None,
            scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def ddp(torch: Any) -> Any:
    """The module of ``fit_torch_ddp``, which imports PyTorch."""
    return importlib.import_module("dshuffle.training.torch_ddp")
