"""What a session is, as all of its participants know it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.protocol.pickle import dumps, loads

from dshuffle.errors import ClusterError
from dshuffle.planning import Assignment, Classes, GivenSharding, ShufflePlanSpec
from dshuffle.rows import RowLayout
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset

PLUGIN = "dshuffle"
"""Name of the scheduler plugin, of the worker plugin and prefix of all handlers."""

TASK_PREFIX = "dshuffle-partition-"
"""With what the keys begin of the tasks that run on a partition; they end with its rank."""

PROTOCOL = 6
"""Raised whenever messages between processes change; a worker of another protocol is refused."""


@dataclass(frozen=True, slots=True)
class DatasetReference:
    """A dataset as it travels: its shape in the open, the way to open it sealed.

    Unpickling a :class:`Dataset` opens it, which reads from the store. The scheduler may have no access to that and
    must not wait for it, and a worker must not do it on its event loop; so only :meth:`open` does.
    """

    n_samples: int
    layout: RowLayout
    sealed: bytes = field(repr=False)

    @classmethod
    def of(cls, dataset: Dataset) -> DatasetReference:
        """Refer to an open dataset."""
        return cls(dataset.n_samples, dataset.layout, dumps(dataset))

    def open(self) -> Dataset:
        """Open it in this process."""
        dataset = loads(self.sealed)
        assert isinstance(dataset, Dataset)
        if dataset.n_samples != self.n_samples or dataset.layout != self.layout:
            raise ClusterError(
                f"the dataset at {dataset.url} is another here than on the client: {dataset!r}. Does every worker see "
                "the same storage?"
            )
        return dataset


@dataclass(frozen=True, slots=True)
class ShuffleOrder:
    """What a client asks the scheduler for: a wish, before ranks are given out.

    ``deliveries`` are those to choose from in each epoch, with the seconds that an exchange is expected to take.
    """

    session_id: str
    client_id: str
    dataset: DatasetReference
    assignment: Assignment
    deliveries: dict[str, float]
    caching: str
    sharding: str | GivenSharding
    cache_fraction: float | None
    relay: str
    balance: Classes | None
    seed: int
    memory_limit: int | None
    server: str | None
    settings: Settings


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A session after ranks were given out; the same object on every participant.

    Parameters
    ----------
    plan
        All that plans depend on. Its delivery is the one that needs the most memory, if epochs have different ones.
    deliveries
        Those that epochs may have.
    addresses
        Address of every rank, and of the server under :data:`dshuffle.planning.SERVER` if a delivery needs one.
    """

    session_id: str
    dataset: DatasetReference
    plan: ShufflePlanSpec
    deliveries: tuple[str, ...]
    memory_limit: int | None
    settings: Settings
    addresses: dict[int, str] = field(default_factory=dict)

    def with_plan(self, plan: ShufflePlanSpec) -> SessionSpec:
        """The same session, once this member has found what it needs of the dataset."""
        return dataclasses.replace(self, plan=plan)

    def with_memory_limit(self, memory_limit: int) -> SessionSpec:
        """The same session under another byte budget (a worker's own, where the user gave none)."""
        return dataclasses.replace(self, memory_limit=memory_limit)


@dataclass(frozen=True, slots=True)
class PerRank:
    """An argument of :meth:`Epoch.map` that is another one for each worker: its values in rank order.

    Examples
    --------
    >>> PerRank.of(PerRank(["a", "b"]), 1), PerRank.of("the same", 1)
    ('b', 'the same')
    """

    values: Sequence[Any]

    @staticmethod
    def of(value: Any, rank: int) -> Any:
        """What the worker of a rank gets for an argument."""
        return value.values[rank] if isinstance(value, PerRank) else value
