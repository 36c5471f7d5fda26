"""What the state machine of a session tells its driver to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dshuffle.errors import DShuffleError
from dshuffle.runtime.messages import Counts, Report


@dataclass(slots=True)
class Run:
    """One attempt at an epoch's exchange, and what participants counted that are ready."""

    run_id: int
    epoch: int
    started: float
    attempt: int
    votes: dict[int, Counts] = field(default_factory=dict)
    ready_after: float = 0.0


@dataclass(frozen=True, slots=True)
class PhaseOrder:
    """Give a participant the order of a phase, and report the answer.

    The name of the order is the value of the phase, or ``"status"``. The turn is that of the phase: an answer may come
    when the phase has ended, and perhaps has begun again.
    """

    name: str
    participant: int
    run_id: int
    turn: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """All participants have opened the session."""


@dataclass(frozen=True, slots=True)
class RunReady:
    """All participants are ready for the run's epoch."""

    run: Run


@dataclass(frozen=True, slots=True)
class EpochCommitted:
    """All participants have swapped to the run's epoch; what they report."""

    run: Run
    reports: Mapping[int, Report]


@dataclass(frozen=True, slots=True)
class EpochFailed:
    """Tell the client that an epoch failed. The session goes on, and the client may ask again."""

    error: DShuffleError


@dataclass(frozen=True, slots=True)
class ProcessQuestion:
    """Find out whether the process of a silent participant runs, and report it: `SessionMachine.note_running`."""

    participant: int
    silent_seconds: float
    turn: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ReplacementSearch:
    """Find workers for these ranks, and report them with :meth:`SessionMachine.replaced`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RanksRestored:
    """These ranks have new workers, which hold their partitions. Their tasks can run."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankAdoption:
    """Let other participants take these lost ranks as well, and report them with :meth:`SessionMachine.replaced`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParticipantDropped:
    """The session goes on without a participant that was lost, because no other worker can come for it."""

    participant: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Tell the client that the session has ended, and free the participants that are left."""

    error: DShuffleError


Instruction = (
    PhaseOrder
    | SessionOpened
    | RunReady
    | EpochCommitted
    | EpochFailed
    | ProcessQuestion
    | ReplacementSearch
    | RanksRestored
    | RankAdoption
    | ParticipantDropped
    | SessionEnded
)
