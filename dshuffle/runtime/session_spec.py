"""Settings from ``dask.config`` (keys ``dshuffle.*``), read once on the client and sent along with the session.

What a session is, as all of its participants know it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import dask
from dask.utils import parse_bytes, parse_timedelta
from distributed.protocol.pickle import dumps, loads

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.planning import Assignment, Classes, GivenSharding, ShufflePlanSpec
from dshuffle.planning.delivery.relay import MESSAGE_BYTES, WINDOW_BYTES
from dshuffle.rows import RowLayout
from dshuffle.store import Dataset


@dataclass(frozen=True, slots=True)
class Settings:
    """How the exchange uses memory and time.

    Parameters
    ----------
    message_bytes
        Size of a full message. Below 4 MiB the cost of a message shows; above 10 MiB Dask hands it to its one
        offload thread.
    window_bytes
        Bytes that a worker has asked for and not yet unpacked, and bytes packed and not yet acknowledged: each at
        most so many. With coded deliveries at least one message of a row for every worker.
    timeout
        Seconds after which a request for a message counts as failed, and for which workers are waited for.
    memory_fraction
        Share of a worker's memory limit that its cache partition may take when ``memory_limit`` is not given.
    """

    message_bytes: int = MESSAGE_BYTES
    window_bytes: int = WINDOW_BYTES
    timeout: float = 300.0
    memory_fraction: float = 0.6

    def __post_init__(self) -> None:
        if self.message_bytes < 1:
            raise InvalidParameter.of("dshuffle.message-bytes", self.message_bytes, "at least 1 byte")
        if self.window_bytes < self.message_bytes:
            raise InvalidParameter.of(
                "dshuffle.window-bytes",
                self.window_bytes,
                f"at least one message ({self.message_bytes} bytes)",
            )
        if not self.timeout > 0:
            raise InvalidParameter.of("dshuffle.timeout", self.timeout, "a positive time")
        if not 0 < self.memory_fraction <= 1:
            raise InvalidParameter.of("dshuffle.memory-fraction", self.memory_fraction, "within (0, 1]")

    @classmethod
    def from_config(cls) -> Settings:
        """Read ``dshuffle.message-bytes``, ``.window-bytes``, ``.timeout`` and ``.memory-fraction``."""
        default = cls()
        return cls(
            message_bytes=parse_bytes(dask.config.get("dshuffle.message-bytes", default.message_bytes)),
            window_bytes=parse_bytes(dask.config.get("dshuffle.window-bytes", default.window_bytes)),
            timeout=parse_timedelta(dask.config.get("dshuffle.timeout", default.timeout)),
            memory_fraction=float(dask.config.get("dshuffle.memory-fraction", default.memory_fraction)),
        )

    @property
    def window(self) -> int:
        """The window in messages."""
        return self.window_bytes // self.message_bytes


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
