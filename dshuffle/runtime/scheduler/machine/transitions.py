"""The transitions of a session: what each event does in each phase, and in which phase the session is afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dshuffle.runtime.scheduler.machine import epochs, events, losses
from dshuffle.runtime.scheduler.machine.instructions import Instruction
from dshuffle.runtime.scheduler.machine.phases import OWING, Phase
from dshuffle.runtime.scheduler.machine.state import SessionState

Handler = Callable[[SessionState, Any, float], list[Instruction]]


class IllegalTransition(RuntimeError):
    """An event that cannot happen in a phase, or leads to a phase that it must not lead to: a bug."""


@dataclass(frozen=True, slots=True)
class Transition:
    """What an event does in a phase.

    Parameters
    ----------
    handler
        Carries it out on the state, and returns instructions. It may set ``state.phase``.
    targets
        Phases in which the session may be afterwards, each with its condition in words.
    """

    handler: Handler
    targets: Mapping[Phase, str]


def ignore(state: SessionState, event: events.Event, now: float) -> list[Instruction]:
    """Do nothing: the event comes too late, or asks for what the session does already."""
    return []


NEW, OPENING, IDLE, EXCHANGING, READY, COMMITTING, ABORTING, WAITING, RESTORING, INFORMING, ENDED = Phase
OPEN = tuple(phase for phase in Phase if phase not in (NEW, ENDED))

# fmt: off
ROWS: tuple[tuple[tuple[Phase, ...], type[events.Event], Handler, dict[Phase, str]], ...] = (
    # The session is opened.
    ((NEW,), events.OpenCall, epochs.open_members, {OPENING: ""}),
    ((OPENING,), events.AllAnswers, epochs.be_open, {IDLE: ""}),
    ((OPENING,), events.Refusal, epochs.end_session, {ENDED: ""}),
    ((OPENING,), events.Loss, losses.end_lost, {ENDED: ""}),
    # Rows are exchanged.
    ((IDLE,), events.BeginCall, epochs.prefetch,
        {EXCHANGING: "", IDLE: "a failure is reported first, or a rank is adopted"}),
    ((IDLE,), events.AdvanceCall, epochs.fetch, {EXCHANGING: "", IDLE: "a rank is adopted"}),
    ((EXCHANGING,), events.AllVotes, epochs.compare_votes,
        {READY: "", COMMITTING: "the client waits", ABORTING: "the votes do not fit together"}),
    # All swap to the epoch.
    ((READY,), events.AdvanceCall, epochs.commit, {COMMITTING: ""}),
    ((COMMITTING,), events.AdvanceCall, epochs.wait_for_commit, {}),
    ((COMMITTING,), events.AllAnswers, epochs.complete_commit, {IDLE: "", WAITING: "a participant is lost"}),
    ((COMMITTING,), events.Refusal, epochs.end_commit, {ENDED: ""}),
    # A run has failed.
    ((EXCHANGING,), events.RunFailure, epochs.abort, {ABORTING: ""}),
    ((EXCHANGING,), events.Refusal, epochs.abort_refused, {ABORTING: ""}),
    ((ABORTING,), events.AllAnswers, epochs.leave_aborted,
        {EXCHANGING: "another run can succeed", IDLE: "the epoch has failed", WAITING: "a participant is lost"}),
    ((ABORTING,), events.Refusal, epochs.end_session, {ENDED: ""}),
    # Participants are lost.
    ((IDLE, WAITING, RESTORING), events.Loss, losses.search_at_once, {WAITING: ""}),
    ((EXCHANGING, READY), events.Loss, losses.abort_lost, {ABORTING: ""}),
    ((COMMITTING, ABORTING, INFORMING), events.Loss, losses.excuse_lost, {}),
    (OPEN, events.FinalLoss, losses.end_lost, {ENDED: ""}),
    # Other workers take lost ranks.
    ((WAITING,), events.Replacement, losses.take_rank, {RESTORING: "all ranks are taken", WAITING: "others are lost"}),
    ((WAITING,), events.NoReplacement, losses.go_without,
        {ENDED: "somebody is needed", WAITING: "a participant is to adopt the rank, or others are lost",
         RESTORING: "nobody is needed, and other ranks are taken", IDLE: "nobody is needed",
         EXCHANGING: "nobody is needed, and a run is due"}),
    ((RESTORING,), events.AllAnswers, losses.inform,
        {INFORMING: "there are others", IDLE: "there are no others",
         EXCHANGING: "there are no others, and a run is due"}),
    ((RESTORING,), events.Refusal, losses.search_again, {WAITING: ""}),
    ((INFORMING,), events.AllAnswers, losses.complete_replacement,
        {IDLE: "", EXCHANGING: "a run is due", WAITING: "a participant is lost"}),
    ((INFORMING,), events.Refusal, epochs.end_session, {ENDED: ""}),
    # The driver ends the session.
    ((NEW, *OPEN), events.Closure, epochs.end_session, {ENDED: ""}),
    # The event is late or superfluous.
    ((OPENING, EXCHANGING, READY, COMMITTING, ABORTING, WAITING, RESTORING, INFORMING, ENDED), events.BeginCall,
        ignore, {}),
    ((OPENING, EXCHANGING, ABORTING, WAITING, RESTORING, INFORMING), events.AdvanceCall, ignore, {}),
    ((COMMITTING, ABORTING, INFORMING, ENDED), events.Replacement, ignore, {}),
    ((COMMITTING, ABORTING, INFORMING, ENDED), events.NoReplacement, ignore, {}),
    ((ENDED,), events.Loss, ignore, {}),
    ((ENDED,), events.FinalLoss, ignore, {}),
    ((ENDED,), events.Closure, ignore, {}),
)
# fmt: on
"""Phases, an event, what the event does in them, and the phases that may follow, each with its condition."""

TRANSITIONS = {
    (phase, event): Transition(handler, targets or {phase: ""})
    for phases, event, handler, targets in ROWS
    for phase in phases
}
"""The table that the session machine runs."""


def take(state: SessionState, event: events.Event, now: float) -> list[Instruction]:
    """Let an event happen, and then what follows from it: that nobody owes an answer any longer.

    Raises
    ------
    IllegalTransition
        If the table does not have the event in this phase, or not the phase that follows.
    """
    phase = state.phase
    transition = TRANSITIONS.get((phase, type(event)))
    if transition is None:
        raise IllegalTransition(f"a session in the phase {phase.name} cannot take the event {event}")
    instructions = transition.handler(state, event, now)
    if state.phase not in transition.targets:
        raise IllegalTransition(f"the event {event} must not lead from the phase {phase.name} to {state.phase.name}")
    return instructions + follow(state, now)


def follow(state: SessionState, now: float) -> list[Instruction]:
    """Let happen what follows once nobody owes an answer."""
    if state.phase not in OWING or state.answers.owing:
        return []
    return take(state, events.AllVotes() if state.phase is EXCHANGING else events.AllAnswers(), now)
