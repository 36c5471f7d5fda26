"""Sessions that are simulated in this process, without a cluster.

Who trains on what in which order is a function of the choices, the epoch and the rank, so nothing has to move in a
simulated session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.types import Samples, group_by
from dshuffle.rows import ByteMatrix, RowLayout
from dshuffle.runtime import Partition, PerRank
from dshuffle.runtime.dataset_inputs import resolved, with_data
from dshuffle.store import Dataset

Orders = Sequence[Samples]
"""The samples of every worker in training order, one array per rank."""


def orders_of_first_epochs(spec: ShuffleSpec, epochs: int) -> Iterator[Orders]:
    """Yield who trains on what in which order, for the first epochs of a shuffle without broadcast samples."""
    if spec.n_broadcast:
        hint = "Pass only the ranks."
        raise InvalidParameter.of("sharding", str(spec.choices.sharding), "a sharding without broadcast samples", hint)
    # Assignments do not depend on the delivery, and reading from the store needs the least planning.
    planner = EpochPlanner(spec.with_choices(delivery="storage"))
    for epoch in range(epochs):
        plan = planner.advance() if epoch else planner.load()
        order, offsets = group_by(plan.ranks, spec.n_workers)
        owns = [order[offsets[rank] : offsets[rank + 1]] for rank in range(spec.n_workers)]
        seed, ordered = spec.choices.seed, spec.choices.exchange_epochs.order
        yield [ordered(own, seed=seed, epoch=epoch, rank=rank) for rank, own in enumerate(owns)]


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """A dataset in the memory of this process, on which sessions of any strategy can be simulated.

    Parameters
    ----------
    dataset
        The dataset.
    rows
        All of its rows, packed.
    n_workers
        Number of workers of a session.

    Examples
    --------
    >>> from dshuffle import create_dataset
    >>> from dshuffle.synthetic import keyed_regression
    >>> from dshuffle.training import fit_linear_regression
    >>> dataset = create_dataset("memory://doc-simulated", keyed_regression(200, n_dense=4), overwrite=True)
    >>> session = SimulatedCluster.of(dataset, n_workers=2).session(Choices("partial:0.5"))
    >>> len(fit_linear_regression(session, epochs=3, step=0.1).points)
    3
    """

    dataset: Dataset
    rows: ByteMatrix
    n_workers: int

    @classmethod
    def of(cls, dataset: Dataset, n_workers: int) -> SimulatedCluster:
        """Read all rows of a dataset."""
        rows, ids = dataset.layout.empty(dataset.n_samples), np.arange(dataset.n_samples)
        dataset.read_into(rows, ids, ids)
        rows.flags.writeable = False
        return cls(dataset, rows, n_workers)

    def session(self, choices: Choices) -> SimulatedShuffler:
        """Return a session of a strategy.

        Its delivery makes no difference. Its caching only makes one if the assignment depends on who holds what.

        Raises
        ------
        InvalidParameter
            If the dataset cannot be shuffled in this way.
        """
        simple = dataclasses.replace(choices, delivery="storage")
        if not choices.assignment.needs_holders:
            simple = dataclasses.replace(simple, cache_fraction=None)
        spec = ShuffleSpec.at_first(self.dataset.n_samples, self.n_workers, resolved(self.dataset, simple))
        return SimulatedShuffler(self.dataset, self.rows, with_data(spec, self.dataset))


@dataclass(frozen=True, slots=True)
class SimulatedShuffler:
    """What :func:`fit_linear_regression` and :func:`fit_parallel_sgd` need of a :class:`~dshuffle.Shuffler`."""

    dataset: Dataset
    rows: ByteMatrix
    spec: ShuffleSpec

    def epochs(self, count: int) -> Iterator[SimulatedEpoch]:
        """Yield the first epochs of the session."""
        for number, orders in enumerate(orders_of_first_epochs(self.spec, count)):
            yield SimulatedEpoch(self.dataset.layout, self.rows, number, orders)


@dataclass(frozen=True, slots=True)
class SimulatedEpoch:
    """An epoch whose tasks run in this process, one after the other."""

    layout: RowLayout
    rows: ByteMatrix
    number: int
    orders: Orders

    def _partitions(self) -> Iterator[Partition]:
        """The partitions of all ranks for one task, which may close its own."""
        shares = min(map(len, self.orders)), max(map(len, self.orders))
        for rank, order in enumerate(self.orders):
            yield Partition(self.layout, self.rows, order, order, rank=rank, epoch=self.number, shares=shares)

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Done]:
        """Run ``fn`` for each rank with its partition; see :meth:`dshuffle.Epoch.map`."""
        return [
            Done(
                fn(
                    partition,
                    *(PerRank.of(value, rank) for value in args),
                    **{name: PerRank.of(value, rank) for name, value in kwargs.items()},
                )
            )
            for rank, partition in enumerate(self._partitions())
        ]

    def in_step(
        self, fn: Callable[..., Generator[tuple[NDArray[Any], int], NDArray[Any], Any]], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Run a generator for each rank in turn, from one mean of all ranks to the next."""
        ranks = [fn(partition, *args, **kwargs) for partition in self._partitions()]
        results: list[Any] = []
        mean: Any = None
        while not results:
            yielded = []
            for rank in ranks:
                try:
                    yielded.append(rank.send(mean))
                except StopIteration as end:
                    results.append(end.value)
            total = sum(count for _, count in yielded)
            with np.errstate(over="ignore", invalid="ignore"):
                mean = sum(value * (count / total) for value, count in yielded)
        return results


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a task that has ended, in place of a future."""

    value: Any

    def result(self) -> Any:
        """Return the result."""
        return self.value

    @property
    def client(self) -> type[Done]:
        """What gathers results."""
        return Done

    @staticmethod
    def gather(results: Sequence[Done]) -> list[Any]:
        """Return the results of several tasks."""
        return [done.value for done in results]
