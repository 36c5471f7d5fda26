"""What can happen to a session. The label of an event is its name in the diagram."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from dshuffle.errors import DShuffleError


@dataclass(frozen=True, slots=True)
class OpenCall:
    """The client opens the session."""

    label: ClassVar[str] = "open"


@dataclass(frozen=True, slots=True)
class BeginCall:
    """The client prefetches the next epoch."""

    label: ClassVar[str] = "begin"


@dataclass(frozen=True, slots=True)
class AdvanceCall:
    """The client waits for the next epoch."""

    label: ClassVar[str] = "advance"


@dataclass(frozen=True, slots=True)
class AllAnswers:
    """All participants have carried out the order of the phase."""

    label: ClassVar[str] = "all have answered"


@dataclass(frozen=True, slots=True)
class AllVotes:
    """All participants have voted ready."""

    label: ClassVar[str] = "all have voted ready"


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A run has failed; ``again`` if another run can succeed."""

    error: DShuffleError
    again: bool
    label: ClassVar[str] = "a participant votes that the run has failed"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A participant cannot carry out the order of the phase."""

    participant: int
    error: DShuffleError
    label: ClassVar[str] = "an order is refused"


@dataclass(frozen=True, slots=True)
class Loss:
    """Participants are lost that other workers can replace. Each has a clause that says how it was lost."""

    clauses: Mapping[int, str]
    label: ClassVar[str] = "a participant is lost"


@dataclass(frozen=True, slots=True)
class FinalLoss:
    """Participants are lost that no other worker can replace, or all are lost."""

    clauses: Mapping[int, str]
    label: ClassVar[str] = "a participant is lost that cannot be replaced"


@dataclass(frozen=True, slots=True)
class Replacement:
    """Another worker takes a lost rank; ``adopted`` if that worker has a rank already."""

    participant: int
    adopted: bool
    label: ClassVar[str] = "another worker takes a lost rank"


@dataclass(frozen=True, slots=True)
class NoReplacement:
    """No other worker comes for lost participants."""

    participants: Collection[int]
    label: ClassVar[str] = "no other worker comes"


@dataclass(frozen=True, slots=True)
class Closure:
    """The driver ends the session."""

    error: DShuffleError
    label: ClassVar[str] = "the session is closed"


Event = (
    OpenCall
    | BeginCall
    | AdvanceCall
    | AllAnswers
    | AllVotes
    | RunFailure
    | Refusal
    | Loss
    | FinalLoss
    | Replacement
    | NoReplacement
    | Closure
)
