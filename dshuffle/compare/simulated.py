"""Sessions that are simulated in this process, without a cluster.

Who trains on what in which order is a function of the choices, the epoch and the rank, so nothing has to move in a
simulated session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.planning import Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.types import Samples
from dshuffle.rows import ByteMatrix
from dshuffle.runtime import Partition, PerRank
from dshuffle.runtime.dataset_inputs import checked_sharding, resolved, with_data
from dshuffle.sharding import Sharding
from dshuffle.store import Dataset
from dshuffle.training.fit import Steps

Orders = Sequence[Samples]
"""The samples of every worker in training order, one array per rank."""


def orders_of_first_epochs(spec: ShuffleSpec, epochs: int) -> Iterator[Orders]:
    """Yield who trains on what in which order, for the first epochs of a shuffle."""
    # Assignments do not depend on the delivery, and reading from the store needs the least planning.
    planner, ordered = EpochPlanner(spec.with_choices(delivery="storage")), spec.choices.exchange_epochs.order
    for epoch in range(epochs):
        ranks = (planner.advance() if epoch else planner.load()).ranks
        owns = [np.flatnonzero((ranks == rank) | (ranks < 0)) for rank in range(spec.n_workers)]
        yield [ordered(own, seed=spec.choices.seed, epoch=epoch, rank=rank) for rank, own in enumerate(owns)]


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

    def session(self, choices: Choices, sharding: Sharding | ArrayLike | None = None) -> SimulatedShuffler:
        """Return a session of a strategy, with a sharding or ranks of your own in place of its sharding.

        Its delivery makes no difference. Its caching only makes one if the assignment depends on who holds what.

        Raises
        ------
        InvalidParameter
            If the dataset cannot be shuffled in this way.
        """
        simple = dataclasses.replace(choices, delivery="storage")
        if sharding is not None:
            simple = dataclasses.replace(simple, sharding=checked_sharding(self.dataset, sharding))
        if not choices.assignment.needs_holders:
            simple = dataclasses.replace(simple, cache_fraction=None)
        spec = ShuffleSpec.at_first(self.dataset.n_samples, self.n_workers, resolved(self.dataset, simple))
        return SimulatedShuffler(self.dataset, self.rows, with_data(spec, self.dataset))


@dataclass(frozen=True, slots=True)
class SimulatedShuffler:
    """What the trainers that need no PyTorch take in place of a :class:`~dshuffle.Shuffler`."""

    dataset: Dataset
    rows: ByteMatrix
    spec: ShuffleSpec
    elastic: ClassVar[bool] = False

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return self.spec.n_workers

    def epochs(self, count: int) -> Iterator[SimulatedEpoch]:
        """Yield the first epochs of the session."""
        for number, orders in enumerate(orders_of_first_epochs(self.spec, count)):
            yield SimulatedEpoch(self, number, orders)


@dataclass(frozen=True, slots=True)
class SimulatedEpoch:
    """An epoch whose tasks run in this process, one after the other."""

    session: SimulatedShuffler
    number: int
    orders: Orders

    def partitions(self) -> list[Partition]:
        """The partitions of all ranks for one task, which may close its own."""
        sizes, session = [len(order) for order in self.orders], self.session
        where: Any = {"epoch": self.number, "shares": (min(sizes), max(sizes)), "weights": session.spec.weights}
        where["broadcast"] = getattr(session.spec.choices.sharding, "broadcast", None)
        return [
            Partition(session.dataset.layout, session.rows, order, order, rank=rank, **where)
            for rank, order in enumerate(self.orders)
        ]

    def map(self, fn: Callable[..., Any], *args: Any) -> list[Done]:
        """Run ``fn`` for each rank with its partition; see :meth:`dshuffle.Epoch.map`."""

        def of(value: Any, rank: int) -> Any:
            own = PerRank.of(value, rank)
            return own.value if isinstance(own, Done) else own

        return [Done(fn(partition, *(of(value, partition.rank) for value in args))) for partition in self.partitions()]

    def in_step(self, steps: Callable[..., Steps], *args: Any) -> Any:
        """Take the steps of each rank in turn, from one mean of all ranks to the next; return the model."""
        ranks, mean = [steps(partition, *args) for partition in self.partitions()], None
        while True:
            try:
                yielded = [rank.send(mean) for rank in ranks]
            except StopIteration as end:  # all ranks take the same number of steps to the same model
                return end.value
            total = sum(weight for _, weight in yielded)
            with np.errstate(over="ignore", invalid="ignore"):
                mean = sum(value * (weight / total) for value, weight in yielded)


class Done(NamedTuple):
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
