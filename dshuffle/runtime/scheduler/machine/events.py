"""What can happen to a session."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dshuffle.errors import DShuffleError


@dataclass(frozen=True, slots=True)
class OpenCall:
    """The client opens the session."""


@dataclass(frozen=True, slots=True)
class BeginCall:
    """The client prefetches the next epoch."""


@dataclass(frozen=True, slots=True)
class AdvanceCall:
    """The client waits for the next epoch."""


@dataclass(frozen=True, slots=True)
class AllAnswers:
    """All participants have carried out the order of the phase."""


@dataclass(frozen=True, slots=True)
class AllVotes:
    """All participants have voted ready."""


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A run has failed; ``again`` if another run can succeed."""

    error: DShuffleError
    again: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """A participant cannot carry out the order of the phase."""

    participant: int
    error: DShuffleError


@dataclass(frozen=True, slots=True)
class Loss:
    """Participants are lost that other workers can replace. Each has a clause that says how it was lost."""

    clauses: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class FinalLoss:
    """Participants are lost that no other worker can replace, or all are lost."""

    clauses: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Replacement:
    """Another worker takes a lost rank.

    Parameters
    ----------
    participant
        The lost rank.
    adopted
        Whether that worker has a rank already.
    kept
        Whether it is the lost worker, and still has the partition of this epoch.
    """

    participant: int
    adopted: bool
    kept: bool = False


@dataclass(frozen=True, slots=True)
class NoReplacement:
    """No other worker comes for lost participants."""

    participants: Collection[int]


@dataclass(frozen=True, slots=True)
class Closure:
    """The driver ends the session."""

    error: DShuffleError


Event = (
    OpenCall | BeginCall | AdvanceCall | AllAnswers | AllVotes | RunFailure | Refusal | Loss | FinalLoss | Replacement
    | NoReplacement | Closure
)  # fmt: skip
