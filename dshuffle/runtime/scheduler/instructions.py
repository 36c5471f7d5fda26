"""Phases, runs and instructions of the scheduler's state machine of a session."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dshuffle.errors import DShuffleError, WorkerLost
from dshuffle.runtime.messages import Counts, Report

ATTEMPTS = 3
"""Runs of one epoch before its exchange counts as failed."""

Votes = dict[int, Counts]


class Phase(enum.Enum):
    """Phase of a session. The value of a phase in which participants owe an answer is the order they were given."""

    OPENING = "open"
    IDLE = "idle"
    EXCHANGING = "begin"
    READY = "ready"
    COMMITTING = "commit"
    ABORTING = "abort"
    WAITING = "waiting"
    RESTORING = "restore"
    INFORMING = "members"
    ENDED = "ended"


OWING = {Phase.OPENING, Phase.EXCHANGING, Phase.COMMITTING, Phase.ABORTING, Phase.RESTORING, Phase.INFORMING}
"""Phases in which participants owe an answer."""


PURPOSE = {
    Phase.OPENING: "to open the session",
    Phase.EXCHANGING: "for the samples of epoch {}",
    Phase.COMMITTING: "to end epoch {}",
    Phase.ABORTING: "to stop an exchange",
    Phase.RESTORING: "for replacements of lost workers to load their partitions",
    Phase.INFORMING: "to continue after workers were replaced",
}
"""What the session waits for in a phase, in words."""


@dataclass(slots=True)
class Run:
    """One attempt at an epoch's exchange, and what participants counted that are ready."""

    run_id: int
    epoch: int
    started: float
    attempt: int
    votes: Votes = field(default_factory=dict)
    ready_after: float = 0.0


@dataclass(frozen=True, slots=True)
class Tell:
    """Send an order, which is the value of a phase or ``"status"``, and report the answer.

    The turn is that of the phase. An answer may come when the phase has ended, and perhaps has begun again.
    """

    order: str
    who: int
    run_id: int
    turn: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Opened:
    """All participants have opened the session."""


@dataclass(frozen=True, slots=True)
class AllReady:
    """All participants are ready for the run's epoch."""

    run: Run


@dataclass(frozen=True, slots=True)
class Committed:
    """All participants have swapped to the run's epoch; what they report."""

    run: Run
    reports: Mapping[int, Report]


@dataclass(frozen=True, slots=True)
class EpochFailed:
    """Tell the client that an epoch failed. The session goes on, and the client may ask again."""

    error: DShuffleError


@dataclass(frozen=True, slots=True)
class Replace:
    """Find workers for these ranks, and report them with :meth:`SessionMachine.replaced`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replaced:
    """These ranks have new workers, which hold their partitions. Their tasks can run."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adopt:
    """Let other participants take these lost ranks as well, and report them with :meth:`SessionMachine.replaced`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GoesOnWithout:
    """The session goes on without a participant that was lost, because no other worker can come for it."""

    who: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell the client that the session has ended, and free the participants that are left."""

    error: DShuffleError


Instruction = Tell | Opened | AllReady | Committed | EpochFailed | Replace | Replaced | Adopt | GoesOnWithout | Ended


def worker_lost(losses: Iterable[str], *, tried: bool) -> WorkerLost:
    """The error of a session that ends because workers were lost, with a clause for each of them."""
    replacing = "No other worker could take the rank. " if tried else ""
    return WorkerLost(
        f"{'; '.join(losses)}. {replacing}The session has ended, and the dataset is unchanged. Make a new Shuffler on "
        "the remaining workers"
    )
