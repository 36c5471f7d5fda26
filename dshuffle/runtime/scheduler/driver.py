"""Drives the state machine of a session on the scheduler's event loop: events, time and tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from dshuffle.errors import ClusterError
from dshuffle.runtime.scheduler.machine.instructions import Instruction
from dshuffle.runtime.scheduler.machine.session_machine import SessionMachine

logger = logging.getLogger(__name__)

TICK = 0.5
"""Seconds between looks at the clock while participants owe answers."""


class MachineDriver:
    """Gives a machine its events and the time, and has its instructions carried out.

    Parameters
    ----------
    machine
        The state machine of a session.
    carry_out
        Carries out an instruction.
    session_id
        Id of the session, for the log.
    heartbeat
        The heartbeat of the session.
    """

    def __init__(
        self, machine: SessionMachine, carry_out: Callable[[Instruction], None], session_id: str, heartbeat: float
    ) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self._machine = machine
        self._carry_out = carry_out
        self._session_id = session_id
        self._loop = asyncio.get_running_loop()
        # Time does not count as silence where looks are further apart than a third of the heartbeat.
        self._interval = min(TICK, heartbeat / 6)
        self._ticking = False

    def run(self, method: Callable[..., list[Instruction]], *arguments: Any, **options: Any) -> None:
        """Call a method of the machine with the time, and carry out the instructions that it returns."""
        try:
            self._carry_out_all(method(*arguments, now=self._loop.time(), **options))
        except Exception as error:  # a bug: nobody must wait for what does not come
            logger.exception("dshuffle: session %s failed", self._session_id)
            words = f"{type(error).__name__}: {error}"
            self._carry_out_all(self._machine.close(ClusterError(words), self._loop.time()))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until it ends, or the session does."""
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def cancel_all(self) -> None:
        """Cancel all coroutines that run."""
        for task in self.tasks:
            task.cancel()

    def _carry_out_all(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._carry_out(instruction)
        if self._machine.busy and not self._ticking:
            self._ticking = True
            self._loop.call_later(self._interval, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self.run(self._machine.tick)
