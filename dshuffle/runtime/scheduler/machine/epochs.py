"""Transitions of the epochs of a session: it is opened, rows are exchanged, all swap to the epoch, or a run fails."""

from __future__ import annotations

from dshuffle.errors import ClusterError, ExchangeError
from dshuffle.runtime.scheduler.machine import events
from dshuffle.runtime.scheduler.machine.instructions import (
    EpochCommitted,
    EpochFailed,
    Instruction,
    RunReady,
    SessionOpened,
)
from dshuffle.runtime.scheduler.machine.phases import Phase
from dshuffle.runtime.scheduler.machine.state import SessionState
from dshuffle.runtime.scheduler.machine.votes import check_votes

ATTEMPTS = 3
"""Runs of one epoch before its exchange counts as failed."""


def open_members(state: SessionState, event: events.OpenCall, now: float) -> list[Instruction]:
    """Let all participants open the session."""
    return state.enter(Phase.OPENING, now)


def be_open(state: SessionState, event: events.AllAnswers, now: float) -> list[Instruction]:
    """All participants have opened the session."""
    state.phase = Phase.IDLE
    return [SessionOpened()]


def prefetch(state: SessionState, event: events.BeginCall, now: float) -> list[Instruction]:
    """Begin the exchange of the next epoch before the client waits for it."""
    # If the last prefetch has failed, the client hears of it first. If a rank was adopted, another session follows.
    return [] if state.unreported is not None or state.adopted else state.begin_run(now, 1)


def fetch(state: SessionState, event: events.AdvanceCall, now: float) -> list[Instruction]:
    """Begin the exchange of the next epoch, for which the client waits."""
    return state.become_idle(now)


def commit(state: SessionState, event: events.AdvanceCall, now: float) -> list[Instruction]:
    """Let all participants swap to the epoch, because all are ready."""
    return state.enter(Phase.COMMITTING, now)


def wait_for_commit(state: SessionState, event: events.AdvanceCall, now: float) -> list[Instruction]:
    """Let the client wait for a commit once more. An earlier call failed because tasks were still running."""
    state.silence.extend(now)
    return []


def compare_votes(state: SessionState, event: events.AllVotes, now: float) -> list[Instruction]:
    """All participants are ready. Abort the run if what they counted does not fit together."""
    run = state.run
    assert run is not None
    run.ready_after = now - run.started
    mismatch = check_votes(run.epoch, run.votes.values())
    if mismatch is not None:
        return abort(state, events.RunFailure(ExchangeError(mismatch, transient=False), again=False), now)
    state.phase = Phase.READY
    ready: list[Instruction] = [RunReady(run)]
    return ready + state.enter(Phase.COMMITTING, now) if state.client_waits else ready


def abort(state: SessionState, event: events.RunFailure, now: float) -> list[Instruction]:
    """Abort a run that has failed. All participants stay on the previous epoch."""
    state.failure = event
    return state.enter(Phase.ABORTING, now)


def abort_refused(state: SessionState, event: events.Refusal, now: float) -> list[Instruction]:
    """Abort a run that a participant cannot begin."""
    return abort(state, events.RunFailure(event.error, again=False), now)


def leave_aborted(state: SessionState, event: events.AllAnswers, now: float) -> list[Instruction]:
    """All participants have aborted the run: replace those that are lost, try again, or say why the epoch failed."""
    run, failure = state.run, state.failure
    if state.losses:
        state.failure, state.repeats_run = None, True
        return state.search(now)
    assert run is not None
    assert failure is not None
    state.failure = None
    if failure.again and run.attempt < ATTEMPTS:
        return state.begin_run(now, run.attempt + 1)
    state.phase, state.run = Phase.IDLE, None
    if not state.client_waits:
        state.unreported = failure.error
        return []
    state.client_waits = False
    return [EpochFailed(failure.error)]


def complete_commit(state: SessionState, event: events.AllAnswers, now: float) -> list[Instruction]:
    """All participants are on the next epoch."""
    run = state.run
    assert run is not None
    state.phase, state.epoch, state.run, state.client_waits = Phase.IDLE, run.epoch, None, False
    state.digests = {rank: counts.drawn for rank, counts in run.votes.items() if counts.drawn is not None}
    state.loss_counts.clear()
    committed: list[Instruction] = [EpochCommitted(run, state.answers.reports)]
    return committed + (state.search(now) if state.losses else [])


def end_commit(state: SessionState, event: events.Refusal, now: float) -> list[Instruction]:
    """End the session: some participants have swapped, and one cannot."""
    words = f"all workers were ready for epoch {state.epoch + 1}, but the commit failed: {event.error}"
    return state.end(ClusterError(words, transient=event.error.transient))


def end_session(state: SessionState, event: events.Refusal | events.Closure, now: float) -> list[Instruction]:
    """End the session with the error of the event."""
    return state.end(event.error)
