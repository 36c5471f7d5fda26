"""What is simulated: a workload and its faults. Everything follows from the seed."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WAYS: list[dict[str, Any]] = [
    {"assignment": "global", "delivery": "peer"},
    {"assignment": "partial:0.3", "delivery": "peer"},
    {"assignment": "local", "delivery": "peer"},
    {"assignment": "global", "delivery": "storage"},
    {"assignment": "chunks:10", "delivery": "peer"},
    {"assignment": "global", "delivery": "peer", "cache_fraction": 0.7},
    {"assignment": "partial:0.3", "delivery": "peer", "cache_fraction": 0.7, "caching": "recent"},
    {"assignment": "global", "delivery": "server"},
    {"assignment": "global", "delivery": "coded", "cache_fraction": 0.7},
    {"assignment": "partial:0.3", "delivery": "clique", "cache_fraction": 0.7, "caching": "even"},
    {"assignment": "aligned", "delivery": "leftover"},
    {"assignment": "global", "delivery": "peer", "every": 2, "between": "reverse"},
    {"assignment": "partial:0.3", "delivery": "coded", "cache_fraction": 0.7, "every": 2},
]
SERVED = ("server", "coded", "clique", "leftover")
"""Deliveries whose server may be a worker that does not train."""

RATES = {"lose": 0.02, "late": 0.03, "corrupt": 0.05}
"""Faults of messages, and how often they strike."""

STRIKES = ("crash", "stop", "slow", "cut", "store away", "disconnect")
"""Faults that strike at random times."""

CHANGES = ("retire", "join")
"""What happens to the workers of sessions that may go on with others."""

MISTAKES = ("mistake", "cancel")
"""What users do to tasks: their functions raise errors, and they cancel futures."""

BUILD = "another build"
"""One worker draws other samples from the same seed."""

FAULTS = (*RATES, *STRIKES, *CHANGES, *MISTAKES, BUILD)

CALLS = (("map",), ("map", "map"), ("together",), ("map", "together"), ("nested",), ("nested", "map"))
"""The calls of an epoch. Tasks of the kind ``nested`` wait for another task."""

FETCHES = ("results", "skip", "exception", "never")
"""What the client does with futures: it gathers the results, with or without errors, looks at errors, or nothing."""

ON_LOSS = ("replace", "raise", "elastic")
N_CALLS = 4
EPOCHS = 3


@dataclass(frozen=True)
class Workload:
    """What a client does in a session.

    Parameters
    ----------
    calls
        The calls of each epoch.
    fetches
        What it does with the futures.
    late
        Whether it does so only after the last call of the epoch.
    ahead
        Whether the next epoch is exchanged during the present one.
    on_loss
        As for :class:`dshuffle.Shuffler`, or ``"elastic"``.
    resumes
        An epoch in whose middle the session ends, and another one goes on; -1 for none.
    """

    calls: tuple[str, ...] = ("map",)
    fetches: str = "results"
    late: bool = False
    ahead: bool = True
    on_loss: str = "replace"
    resumes: int = -1

    @classmethod
    def draw(cls, rng: random.Random) -> Workload:
        """Any workload."""
        calls, fetches, late, ahead = rng.choice(CALLS), rng.choice(FETCHES), rng.random() < 0.5, rng.random() < 0.7
        on_loss = rng.choices(ON_LOSS, [3, 1, 4])[0]
        return cls(calls, fetches, late, ahead, on_loss, rng.randrange(EPOCHS) if rng.random() < 0.3 else -1)

    def values(self) -> dict[str, str]:
        """What it is like, for :the coverage."""
        return {
            "calls": "+".join(self.calls),
            "fetches": self.fetches,
            "when": "late" if self.late else "at once",
            "exchange": "ahead" if self.ahead else "on demand",
            "on_loss": self.on_loss,
            "resumes": "resumed" if self.resumes >= 0 else "not resumed",
        }


@dataclass(frozen=True)
class Schedule:
    """Workloads and faults.

    Parameters
    ----------
    seed
        Of everything that is random.
    way
        Place in :data:`WAYS`.
    n_workers
        Workers at first.
    epochs
        Epochs of each session.
    faults
        What may happen.
    workloads
        One for each session. Two sessions run side by side, on the same workers.
    dedicated
        Whether a server does not train.
    spare
        Whether there is a worker that is not used at first.
    on_disk
        Whether the dataset is in a folder, and read with Zarr.
    """

    seed: int
    way: int
    n_workers: int
    epochs: int
    faults: frozenset[str]
    workloads: tuple[Workload, ...] = (Workload(),)
    dedicated: bool = False
    spare: bool = False
    on_disk: bool = False

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """The schedule of a seed."""
        rng = random.Random(seed)
        faults = {fault for fault in (*RATES, *STRIKES) if rng.random() < (0.15 if fault == "disconnect" else 0.35)}
        faults |= {fault for fault in MISTAKES if rng.random() < 0.25}
        way, n_workers = rng.randrange(len(WAYS)), rng.randint(2, 4)
        workloads = tuple(Workload.draw(rng) for _ in range(1 if rng.random() < 0.75 else 2))
        dedicated = n_workers > 2 and WAYS[way]["delivery"] in SERVED and rng.random() < 0.5
        if any(workload.on_loss == "elastic" for workload in workloads):
            faults |= {change for change in CHANGES if rng.random() < 0.7}
        spare, on_disk = rng.random() < 0.3, rng.random() < 0.05
        faults |= {BUILD} if rng.random() < 0.05 else set()
        return cls(seed, way, n_workers, EPOCHS, frozenset(faults), workloads, dedicated, spare, on_disk)

    def values(self, happened: Iterable[str]) -> list[tuple[str, str]]:
        """All that the schedule is like: aspect and value. Of the faults, those that happened."""
        way = WAYS[self.way]
        caching = "no excess" if "cache_fraction" not in way else way.get("caching", "uniform")
        found = [
            ("assignment", way["assignment"]),
            ("delivery", way["delivery"]),
            ("caching", caching),
            ("every", str(way.get("every", 1))),
            ("sessions", str(len(self.workloads))),
            ("server", "dedicated" if self.dedicated else "no server or a rank"),
            ("spare", "a spare worker" if self.spare else "no spare worker"),
            ("dataset", "zarr" if self.on_disk else "memory"),
            *(item for workload in self.workloads for item in workload.values().items()),
            *(("fault", fault) for fault in happened if fault in FAULTS),
        ]
        return sorted(set(found))


@functools.cache
def possible() -> set[tuple[str, str]]:
    """What can be covered: values of the schedules of many seeds, all of whose faults happen."""
    schedules = (Schedule.of(seed) for seed in range(5_000))
    return {value for schedule in schedules for value in schedule.values(schedule.faults)}
