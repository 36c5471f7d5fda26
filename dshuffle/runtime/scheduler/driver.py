"""What drives the state machine of a session: time, tasks, and calls that wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from dshuffle.errors import ClusterError
from dshuffle.runtime.scheduler.machine import SessionMachine
from dshuffle.runtime.scheduler.machine_state import Instruction

logger = logging.getLogger(__name__)


class Waiters:
    """Futures that are released together."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self) -> asyncio.Future[None]:
        """Return a future that ends with the next :meth:`release`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        return waiter

    def release(self, error: Exception | None = None) -> None:
        """Let all futures end, or raise an error. A call that was cancelled does not wait any more."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


TICK = 0.5
"""Seconds between looks at the clock while participants owe answers."""


class MachineDriver:
    """Gives a machine its events and the time, and has its instructions carried out.

    Parameters
    ----------
    machine
        The state machine of a session.
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
