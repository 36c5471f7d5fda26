"""Transitions of a session that has lost workers.

First the participants that are left finish what they are doing: the commit, if it has begun, else the abort of the run.
So all of them are on the same epoch. Then other workers take the lost ranks, and each reads the partition of its rank
for that epoch again. At last the participants that were there before hear the new addresses. If no other worker comes,
a participant may adopt a rank beside its own. The session then stays on its epoch, and its client opens another one
with fewer workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dshuffle.errors import WorkerLost
from dshuffle.runtime.scheduler.machine import events
from dshuffle.runtime.scheduler.machine.epochs import ATTEMPTS
from dshuffle.runtime.scheduler.machine.instructions import (
    Instruction,
    ParticipantDropped,
    RankAdoption,
    RanksRestored,
)
from dshuffle.runtime.scheduler.machine.phases import Phase
from dshuffle.runtime.scheduler.machine.state import SessionState


def end_lost(state: SessionState, event: events.Loss | events.FinalLoss, now: float) -> list[Instruction]:
    """End the session, because it cannot go on without a participant that is lost."""
    return state.end(worker_lost(event.clauses.values(), searched=bool(state.losses)))


def search_at_once(state: SessionState, event: events.Loss, now: float) -> list[Instruction]:
    """Search for other workers: nothing is under way that has to end first."""
    _note(state, event)
    return state.search(now)


def abort_lost(state: SessionState, event: events.Loss, now: float) -> list[Instruction]:
    """Abort the run before other workers are searched for. It is repeated with them."""
    _note(state, event)
    state.failure, state.repeats_run = None, True
    return state.enter(Phase.ABORTING, now)


def excuse_lost(state: SessionState, event: events.Loss, now: float) -> list[Instruction]:
    """Let the phase end without the answers of lost participants."""
    _note(state, event)
    state.answers.owing -= event.clauses.keys()
    return []


def _note(state: SessionState, event: events.Loss) -> None:
    state.losses |= event.clauses
    state.newcomers -= event.clauses.keys()
    state.kept -= event.clauses.keys()


def take_rank(state: SessionState, event: events.Replacement, now: float) -> list[Instruction]:
    """Let another worker take a lost rank. Once all ranks are taken, they are restored together."""
    rank = event.participant
    del state.losses[rank]
    state.newcomers.add(rank)
    if event.kept:
        state.kept.add(rank)
    state.adopted = state.adopted | {rank} if event.adopted else state.adopted - {rank}
    return [] if state.losses else state.enter(Phase.RESTORING, now)


def go_without(state: SessionState, event: events.NoReplacement, now: float) -> list[Instruction]:
    """Drop lost participants that are optional, let others adopt lost ranks, or end the session."""
    if needed := set(event.participants) - state.optional:
        state.adoptions.update(needed)
        has_partitions = state.epoch >= state.first_epoch
        if state.shrinks and has_partitions and state.adoptions.most_common(1)[0][1] <= ATTEMPTS:
            return [RankAdoption(tuple(sorted(needed)))]
        return state.end(worker_lost(loss_clauses(state), searched=True))
    dropped: list[Instruction] = [ParticipantDropped(participant) for participant in event.participants]
    state.participants = tuple(rank for rank in state.participants if rank not in event.participants)
    for participant in event.participants:
        del state.losses[participant]
    if state.losses:
        return dropped
    if state.newcomers:
        return dropped + state.enter(Phase.RESTORING, now)
    state.search_began = math.inf
    return dropped + state.become_idle(now)


def search_again(state: SessionState, event: events.Refusal, now: float) -> list[Instruction]:
    """Search for another worker, because the one that was to take a rank cannot."""
    rank = event.participant
    state.newcomers.discard(rank)
    state.kept.discard(rank)
    state.losses[rank] = f"{state.name_of(rank)} cannot take a lost rank ({event.error})"
    state.unfit_reasons[rank] = state.losses[rank]
    return state.search(now)


def inform(state: SessionState, event: events.AllAnswers, now: float) -> list[Instruction]:
    """The newcomers hold their partitions. Tell all others the new addresses, if there are any others."""
    if len(state.newcomers) < len(state.participants):
        return state.enter(Phase.INFORMING, now)
    return complete_replacement(state, event, now)


def complete_replacement(state: SessionState, event: events.AllAnswers, now: float) -> list[Instruction]:
    """All participants know the new addresses: go on, or replace those that were lost meanwhile."""
    restored: list[Instruction] = [RanksRestored(tuple(sorted(state.newcomers)))]
    state.newcomers, state.kept = set(), set()
    state.unfit_reasons.clear()
    state.search_began = math.inf
    return restored + (state.search(now) if state.losses else state.become_idle(now))


def loss_clauses(state: SessionState) -> list[str]:
    """How participants were lost, and why other workers could not take their ranks."""
    clauses = []
    for rank, clause in state.losses.items():
        reason = state.unfit_reasons.get(rank, "")
        clauses.append(clause if reason in clause else f"{clause}; {reason}")
    return clauses


def worker_lost(clauses: Iterable[str], *, searched: bool) -> WorkerLost:
    """The error of a session that ends because workers were lost, with a clause for each of them."""
    replacing = "No other worker could take the rank. " if searched else ""
    return WorkerLost(
        f"{'; '.join(clauses)}. {replacing}The session has ended, and the dataset is unchanged. Make a new Shuffler on "
        "the remaining workers"
    )
