"""The table that the session machine runs: every transition of it, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from dshuffle.errors import DShuffleError, ExchangeError
from dshuffle.runtime.scheduler import machine as transitions
from dshuffle.runtime.scheduler.machine import ROWS, TRANSITIONS, IllegalTransition, SessionMachine, Transition, take
from dshuffle.runtime.scheduler.machine_state import (
    OWING,
    AllAnswers,
    AllVotes,
    BeginCall,
    Event,
    FinalLoss,
    Loss,
    OpenCall,
    Phase,
    Refusal,
    RunFailure,
)

from .machines import given_order, new_machine, replacing_machine, vote
from .simulator import COMMITTED

Taken = tuple[Phase, type[Event], Phase]
NOISE = ExchangeError("noise")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[Taken]:
    """The transitions that machines take: phase, event, and the phase afterwards."""
    counts: Counter[Taken] = Counter()

    def counting(transition: Transition, event: type[Event]) -> Transition:
        def handler(state: Any, details: Any, now: float) -> Any:
            phase = state.phase
            instructions = transition.handler(state, details, now)
            counts[phase, event, state.phase] += 1
            return instructions

        return dataclasses.replace(transition, handler=handler)

    for (phase, event), transition in TRANSITIONS.items():
        monkeypatch.setitem(transitions.TRANSITIONS, (phase, event), counting(transition, event))
    return counts


def answer_all(machine: SessionMachine) -> None:
    """Let all participants that owe an answer carry out the order of the phase."""
    answer = COMMITTED if machine.phase is Phase.COMMITTING else None
    run_id = 0 if machine.run is None else machine.run.run_id
    for rank in sorted(machine.answers.owing):
        machine.answered(given_order(machine, machine.phase.value, rank, run_id), answer, 1.0)


def vote_all(machine: SessionMachine, **counts: Any) -> None:
    for rank in sorted(machine.answers.owing):
        assert machine.run is not None
        machine.voted(machine.run.run_id, rank, vote(**counts), 1.0)


def refuse(machine: SessionMachine, error: DShuffleError = NOISE) -> None:
    run_id = 0 if machine.run is None else machine.run.run_id
    rank = min(machine.answers.owing)
    machine.refused(given_order(machine, machine.phase.value, rank, run_id), error, 1.0)


def machine_in(phase: Phase, n_members: int = 3) -> SessionMachine:
    """A machine in a phase. From the phase of waiting on, rank 1 is lost."""
    if phase in (Phase.NEW, Phase.OPENING):
        machine = new_machine(n_members, replaceable=range(n_members))
    else:
        machine = replacing_machine(n_members)
    if phase is Phase.OPENING:
        machine.open(0.0)
    if phase in (Phase.EXCHANGING, Phase.READY, Phase.COMMITTING, Phase.ABORTING):
        machine.begin(0.0)
    if phase in (Phase.READY, Phase.COMMITTING):
        vote_all(machine)
    if phase is Phase.COMMITTING:
        machine.advance(1.0)
    if phase is Phase.ABORTING:
        machine.voted(1, 0, vote(reason="noise", again=False), 1.0)
    if phase in (Phase.WAITING, Phase.RESTORING, Phase.INFORMING, Phase.ENDED):
        machine.lost([1], "has left", 0.0)
    if phase in (Phase.RESTORING, Phase.INFORMING):
        machine.replaced(1, 0.0)
    if phase is Phase.INFORMING:
        answer_all(machine)
    if phase is Phase.ENDED:
        machine.close(NOISE, 0.0)
    assert machine.phase is phase
    return machine


def lose_all(machine: SessionMachine) -> None:
    machine.lost(machine.participants, "has left", 1.0)


def lose_first(machine: SessionMachine) -> None:
    machine.lost([0], "has left", 1.0)


def close(machine: SessionMachine) -> None:
    machine.close(NOISE, 1.0)


def open_again(machine: SessionMachine) -> None:
    machine.open(1.0)


def begin(machine: SessionMachine) -> None:
    machine.begin(1.0)


def advance(machine: SessionMachine) -> None:
    machine.advance(1.0)


def lose_and_replace(machine: SessionMachine) -> None:
    """A replacement is reported before anybody was asked to look for one."""
    machine.lost([2], "has left", 1.0)
    assert machine.replaced(2, 1.0) == []


def lose_and_give_up(machine: SessionMachine) -> None:
    machine.lost([2], "has left", 1.0)
    assert machine.not_replaced([2], 1.0) == []


def replace_first(machine: SessionMachine) -> None:
    machine.replaced(1, 1.0)


def give_up_first(machine: SessionMachine) -> None:
    machine.not_replaced([1], 1.0)


def vote_apart(machine: SessionMachine) -> None:
    machine.voted(1, 0, vote(digest=7), 1.0)
    vote_all(machine)


def fail(machine: SessionMachine) -> None:
    machine.voted(1, 0, vote(reason="noise"), 1.0)


ANY = [phase for phase in Phase if phase not in (Phase.NEW, Phase.ENDED)]

# What happens to a machine in a phase, and the phase afterwards: the table of transitions, written a second time.
CASES: list[tuple[Phase, Callable[[SessionMachine], None], Phase]] = [
    (Phase.NEW, open_again, Phase.OPENING),
    (Phase.NEW, close, Phase.ENDED),
    *((phase, close, Phase.ENDED) for phase in ANY),
    *((phase, lose_all, Phase.ENDED) for phase in ANY),
    (Phase.OPENING, begin, Phase.OPENING),
    (Phase.OPENING, advance, Phase.OPENING),
    (Phase.OPENING, answer_all, Phase.IDLE),
    (Phase.OPENING, lose_first, Phase.ENDED),
    (Phase.OPENING, refuse, Phase.ENDED),
    (Phase.IDLE, begin, Phase.EXCHANGING),
    (Phase.IDLE, advance, Phase.EXCHANGING),
    (Phase.IDLE, lose_first, Phase.WAITING),
    (Phase.EXCHANGING, begin, Phase.EXCHANGING),
    (Phase.EXCHANGING, advance, Phase.EXCHANGING),
    (Phase.EXCHANGING, vote_all, Phase.READY),
    (Phase.EXCHANGING, vote_apart, Phase.ABORTING),
    (Phase.EXCHANGING, fail, Phase.ABORTING),
    (Phase.EXCHANGING, refuse, Phase.ABORTING),
    (Phase.EXCHANGING, lose_first, Phase.ABORTING),
    (Phase.READY, begin, Phase.READY),
    (Phase.READY, advance, Phase.COMMITTING),
    (Phase.READY, lose_first, Phase.ABORTING),
    (Phase.COMMITTING, begin, Phase.COMMITTING),
    (Phase.COMMITTING, advance, Phase.COMMITTING),
    (Phase.COMMITTING, answer_all, Phase.IDLE),
    (Phase.COMMITTING, refuse, Phase.ENDED),
    (Phase.COMMITTING, lose_first, Phase.COMMITTING),
    (Phase.COMMITTING, lose_and_replace, Phase.COMMITTING),
    (Phase.COMMITTING, lose_and_give_up, Phase.COMMITTING),
    (Phase.ABORTING, begin, Phase.ABORTING),
    (Phase.ABORTING, advance, Phase.ABORTING),
    (Phase.ABORTING, answer_all, Phase.IDLE),
    (Phase.ABORTING, refuse, Phase.ENDED),
    (Phase.ABORTING, lose_first, Phase.ABORTING),
    (Phase.ABORTING, lose_and_replace, Phase.ABORTING),
    (Phase.ABORTING, lose_and_give_up, Phase.ABORTING),
    (Phase.WAITING, begin, Phase.WAITING),
    (Phase.WAITING, advance, Phase.WAITING),
    (Phase.WAITING, lose_first, Phase.WAITING),
    (Phase.WAITING, replace_first, Phase.RESTORING),
    (Phase.WAITING, give_up_first, Phase.ENDED),
    (Phase.RESTORING, begin, Phase.RESTORING),
    (Phase.RESTORING, advance, Phase.RESTORING),
    (Phase.RESTORING, answer_all, Phase.INFORMING),
    (Phase.RESTORING, refuse, Phase.WAITING),
    (Phase.RESTORING, lose_first, Phase.WAITING),
    (Phase.INFORMING, begin, Phase.INFORMING),
    (Phase.INFORMING, advance, Phase.INFORMING),
    (Phase.INFORMING, answer_all, Phase.IDLE),
    (Phase.INFORMING, refuse, Phase.ENDED),
    (Phase.INFORMING, lose_first, Phase.INFORMING),
    (Phase.INFORMING, lose_and_replace, Phase.INFORMING),
    (Phase.INFORMING, lose_and_give_up, Phase.INFORMING),
    *((Phase.ENDED, happens, Phase.ENDED) for happens in (begin, close, lose_first, lose_all)),
    (Phase.ENDED, replace_first, Phase.ENDED),
    (Phase.ENDED, give_up_first, Phase.ENDED),
]


@pytest.mark.parametrize(
    ("phase", "happens", "afterwards"), CASES, ids=[f"{phase.name}-{happens.__name__}" for phase, happens, _ in CASES]
)
def test_what_happens_in_a_phase(phase: Phase, happens: Callable[[SessionMachine], None], afterwards: Phase) -> None:
    machine = machine_in(phase)
    happens(machine)
    assert machine.phase is afterwards


def aborts_and_tries_again() -> SessionMachine:
    machine = machine_in(Phase.EXCHANGING)
    fail(machine)
    answer_all(machine)
    return machine


def loses_in_a_run() -> SessionMachine:
    machine = machine_in(Phase.ABORTING)
    lose_first(machine)
    answer_all(machine)
    return machine


def loses_in_a_commit() -> SessionMachine:
    machine = machine_in(Phase.COMMITTING)
    lose_first(machine)
    answer_all(machine)
    return machine


def goes_on_with_the_run() -> SessionMachine:
    machine = machine_in(Phase.INFORMING)
    advance(machine)
    answer_all(machine)
    return machine


def loses_while_others_are_informed() -> SessionMachine:
    machine = machine_in(Phase.INFORMING)
    lose_first(machine)
    answer_all(machine)
    return machine


def has_waiting_client_when_all_are_ready() -> SessionMachine:
    machine = machine_in(Phase.EXCHANGING)
    advance(machine)
    vote_all(machine)
    return machine


def hears_of_a_failure_first() -> SessionMachine:
    machine = machine_in(Phase.ABORTING)
    answer_all(machine)
    begin(machine)
    return machine


def replaces_one_of_two() -> SessionMachine:
    machine = machine_in(Phase.WAITING)
    machine.lost([2], "has left", 1.0)
    machine.replaced(1, 1.0)
    return machine


def drops(n_replaced: int, *, client_waits: bool) -> SessionMachine:
    """A machine that goes on without rank 2, and perhaps with a replacement of rank 1."""
    machine = replacing_machine(3, optional=(2,))
    machine.lost([1, 2][1 - n_replaced :], "has left", 0.0)
    if client_waits:
        advance(machine)
    if n_replaced:
        machine.replaced(1, 1.0)
    machine.not_replaced([2], 1.0)
    return machine


def drops_one_of_two() -> SessionMachine:
    machine = replacing_machine(3, optional=(2,))
    machine.lost([1, 2], "has left", 0.0)
    machine.not_replaced([2], 1.0)
    return machine


def replaces_all(*, client_waits: bool) -> SessionMachine:
    machine = replacing_machine(2)
    lose_first(machine)
    if client_waits:
        advance(machine)
    machine.replaced(0, 1.0)
    machine.lost([1], "has left", 1.0)
    machine.replaced(1, 1.0)
    answer_all(machine)
    return machine


STORIES: list[tuple[Callable[[], SessionMachine], Phase]] = [
    (aborts_and_tries_again, Phase.EXCHANGING),
    (loses_in_a_run, Phase.WAITING),
    (loses_in_a_commit, Phase.WAITING),
    (goes_on_with_the_run, Phase.EXCHANGING),
    (loses_while_others_are_informed, Phase.WAITING),
    (has_waiting_client_when_all_are_ready, Phase.COMMITTING),
    (hears_of_a_failure_first, Phase.IDLE),
    (replaces_one_of_two, Phase.WAITING),
    (lambda: drops(0, client_waits=False), Phase.IDLE),
    (lambda: drops(0, client_waits=True), Phase.EXCHANGING),
    (lambda: drops(1, client_waits=False), Phase.RESTORING),
    (drops_one_of_two, Phase.WAITING),
    (lambda: replaces_all(client_waits=False), Phase.IDLE),
    (lambda: replaces_all(client_waits=True), Phase.EXCHANGING),
]


@pytest.mark.parametrize(("story", "afterwards"), STORIES)
def test_what_happens_in_several_phases(story: Callable[[], SessionMachine], afterwards: Phase) -> None:
    assert story().phase is afterwards


def test_the_cases_take_every_transition_of_the_table(taken: Counter[Taken]) -> None:
    for phase, happens, _ in CASES:
        happens(machine_in(phase))
    for story, _ in STORIES:
        story()
    possible = {(phase, event, target) for (phase, event), row in TRANSITIONS.items() for target in row.targets}
    assert taken.keys() == possible


def test_the_table_has_each_event_of_a_phase_once() -> None:
    assert len(TRANSITIONS) == sum(len(phases) for phases, *_ in ROWS)


def test_where_participants_owe_answers_all_can_happen_that_participants_cause() -> None:
    for phase in OWING:
        complete = AllVotes if phase is Phase.EXCHANGING else AllAnswers
        assert {event for owing, event in TRANSITIONS if owing is phase} >= {complete, Loss, FinalLoss, Refusal}


@pytest.mark.parametrize(
    ("phase", "event"),
    [(Phase.IDLE, OpenCall()), (Phase.OPENING, AllVotes()), (Phase.READY, RunFailure(NOISE, again=True))],
)
def test_an_event_that_the_table_does_not_have_is_refused(phase: Phase, event: Event) -> None:
    machine = machine_in(phase)
    with pytest.raises(IllegalTransition, match=f"the phase {phase.name} cannot take the event {type(event).__name__}"):
        take(machine, event, 1.0)
    assert machine.phase is phase


def test_a_phase_that_must_not_follow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(TRANSITIONS[Phase.IDLE, BeginCall], targets={Phase.READY: ""})
    monkeypatch.setitem(transitions.TRANSITIONS, (Phase.IDLE, BeginCall), wrong)
    with pytest.raises(
        IllegalTransition, match=re.escape("BeginCall() must not lead from the phase IDLE to EXCHANGING")
    ):
        replacing_machine(2).begin(0.0)
