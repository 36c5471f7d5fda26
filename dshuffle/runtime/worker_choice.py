"""Which workers of a cluster a session may have as members."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from dshuffle.runtime.server_resource import only_serves

MOST_NAMES = 8
"""Number of workers that an error lists."""


class DaskWorker(Protocol):
    """What a choice looks at of a worker. The scheduler's own ``WorkerState`` has it."""

    @property
    def address(self) -> str:
        """Its address."""

    @property
    def name(self) -> object:
        """Its name, which stays the same if its nanny starts it again."""

    @property
    def nanny(self) -> str | None:
        """Address of its nanny, if it has one."""

    @property
    def resources(self) -> dict[str, float]:
        """Its Dask resources, used or not."""


class WorkerFacts(NamedTuple):
    """The same of a worker that the scheduler has described to a client."""

    address: str
    name: object
    nanny: str | None
    resources: dict[str, float]

    @classmethod
    def of_all(cls, described: Mapping[str, Mapping[str, Any]]) -> list[Self]:
        """The workers in the scheduler's information, which is by address."""
        return [
            cls(address, worker.get("name"), worker.get("nanny"), worker.get("resources") or {})
            for address, worker in described.items()
        ]


def identities(worker: DaskWorker) -> frozenset[str]:
    """All texts that name a worker: its address, its name, and the address of its nanny."""
    return frozenset(str(text) for text in (worker.address, worker.name, worker.nanny) if text not in (None, ""))


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """The workers that may be members of a session, now and later. By default all of them.

    Parameters
    ----------
    workers
        Addresses and names of the workers; None for all.
    resources
        Amounts of Dask resources that a worker must have to train.
    server
        Addresses and names of the worker that serves. It may be beside the others.

    Examples
    --------
    >>> first = WorkerFacts("tcp://10.0.0.1:4000", "first", "tcp://10.0.0.1:3000", {"GPU": 1})
    >>> second = WorkerFacts("tcp://10.0.0.2:4000", "second", "tcp://10.0.0.2:3000", {})
    >>> [WorkerChoice(resources={"GPU": 1}).allows(worker) for worker in (first, second)]
    [True, False]

    The nanny of a worker starts it again at another address. After :meth:`resolved` it is still the same worker.

    >>> choice = WorkerChoice(frozenset({"tcp://10.0.0.2:4000"})).resolved([first, second])
    >>> choice.allows(second._replace(address="tcp://10.0.0.2:5000"))
    True
    """

    workers: frozenset[str] | None = None
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    server: frozenset[str] = frozenset()

    @property
    def is_restricted(self) -> bool:
        """Whether some workers may be left out."""
        return self.workers is not None or bool(self.resources)

    def allows(self, worker: DaskWorker) -> bool:
        """Whether a worker may be a member."""
        if not self.is_restricted:
            return True
        names = identities(worker)
        if names & self.server:
            return True
        if self.workers is not None and not names & self.workers:
            return False
        return only_serves(worker.resources) or all(
            worker.resources.get(name, 0) >= amount for name, amount in self.resources.items()
        )

    def resolved(self, present: Iterable[DaskWorker]) -> WorkerChoice:
        """The same choice, which also knows by their other names the workers that are present."""
        named, server = self.workers, self.server
        for worker in present:
            names = identities(worker)
            if self.workers is not None and named is not None and names & self.workers:
                named |= names
            if names & self.server:
                server |= names
        return dataclasses.replace(self, workers=named, server=server)


EVERY_WORKER = WorkerChoice()
"""The default choice."""


def in_words(workers: Collection[DaskWorker]) -> str:
    """Names and addresses of workers, for an error."""
    ordered = sorted(workers, key=lambda worker: (len(str(worker.name)), str(worker.name)))  # 10 comes after 9
    names = [f"{worker.name} ({worker.address})" for worker in ordered]
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def resources_in_words(resources: Mapping[str, float]) -> str:
    """Amounts of resources as the ``--resources`` of a Dask worker.

    Examples
    --------
    >>> resources_in_words({"GPU": 1.0, "MEM": 2.5})
    'GPU=1 MEM=2.5'
    """
    return " ".join(f"{name}={amount:g}" for name, amount in resources.items())
