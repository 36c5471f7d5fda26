"""What drives the state machine of a session."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dshuffle.errors import ClusterError
from dshuffle.runtime.scheduler.driver import MachineDriver
from dshuffle.runtime.scheduler.machine_state import PhaseOrder, SessionEnded

from .machines import new_machine


def test_an_event_that_must_not_happen_ends_the_session_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def drive() -> list[Any]:
        instructions: list[Any] = []
        machine = new_machine(1)
        driver = MachineDriver(machine, instructions.append, "session-7", heartbeat=15)
        driver.run(machine.open)
        driver.run(machine.open)
        return instructions

    order, ended = asyncio.run(drive())
    assert order == PhaseOrder("open", 0, 0)
    assert isinstance(ended, SessionEnded)
    assert isinstance(ended.error, ClusterError)
    assert "IllegalTransition: a session in the phase OPENING cannot take the event OpenCall()" in str(ended.error)
    assert "session session-7 failed" in caplog.text
