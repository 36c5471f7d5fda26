"""The table of the session machine, under random schedules and event by event."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from dshuffle.errors import ClusterError, ExchangeError
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.scheduler.machine import Phase, SessionEnded, SessionMachine

from .machines import machine_of, new_machine
from .simulator import FAULTS, simulate

ROWS = {(phase, event) for phase, row in SessionMachine.TRANSITIONS.items() for event in row}


def test_random_schedules_take_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Counter[Any] = Counter()
    take = SessionMachine.take

    def counted(machine: SessionMachine, event: Any, *details: Any) -> Any:
        taken[machine.phase, event] += 1
        return take(machine, event, *details)

    monkeypatch.setattr(SessionMachine, "take", counted)
    simulate(range(300))
    # The simulated client makes one call at a time, and does not close sessions. Its workers can do what they are told,
    # except that some cannot take a rank.
    missing = {(phase, event) for phase, event in ROWS - taken.keys() if event not in ("begin", "advance", "closed")}
    refusals = {(phase, "refused") for phase in Phase if phase is not Phase.RESTORING}
    rare = {(phase, "lost for good") for phase in (Phase.IDLE, Phase.RESTORING, Phase.ENDED)}
    assert missing <= refusals | rare | {(Phase.ENDED, "lost")}


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
def test_a_session_can_be_closed_and_lost_in_every_phase(phase: Phase) -> None:
    for event in ("closed", "lost for good"):
        machine = machine_of(2)
        machine._machine.phase = phase
        details = ExchangeError("closed") if event == "closed" else {0: "rank 0 has left", 1: "rank 1 has left"}
        [ended] = machine.take(event, details, 1.0)
        assert isinstance(ended, SessionEnded)
        assert (machine.phase, machine.busy) == (Phase.ENDED, False)
        assert machine.close(ExchangeError("again"), 2.0) == machine.begin(2.0) == []


def test_a_bug_ends_the_session_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def drive() -> SessionEnded:
        session: Any = Coordinator.__new__(Coordinator)
        told: list[Any] = []
        session.machine, session._loop = new_machine(1)._machine, asyncio.get_running_loop()
        session.spec = type("Spec", (), {"session_id": "session-7"})
        session._carry_out = told.append
        session.run(session.machine.take, "replaced")
        return told[0]

    ended = asyncio.run(drive())
    assert isinstance(ended.error, ClusterError)
    assert "KeyError: 'replaced'" in str(ended.error)
    assert "session session-7 failed" in caplog.text


@pytest.mark.parametrize(("count", "least"), [(250, 4), pytest.param(2000, 50, marks=pytest.mark.slow)])
def test_random_schedules(count: int, least: int) -> None:
    seen = simulate(range(count))
    expected = [*FAULTS, "committed", "ExchangeError", "WorkerLost", "replaced"]
    assert min(seen[what] for what in expected) > least, seen
