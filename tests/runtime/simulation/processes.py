"""Processes of a simulated cluster, and what goes on in them: one may die, be suspended, or be slow."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

RUNNING_IN: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


@dataclass(eq=False)
class Process:
    """A process of the cluster.

    Parameters
    ----------
    address
        Its address.
    loop
        The event loop that all processes share.
    handlers
        Functions that other processes may call, by name.
    tasks
        What goes on in it, in order, so that a seed decides everything.
    dead
        Whether it was killed.
    stopped_until
        Virtual time until which it is suspended: no callback runs in it.
    slow_until, lag
        Virtual time until which each callback of its event loop takes up to ``lag`` seconds.
    draws_differently
        Whether its build draws other samples from the same seed.
    free_at
        Virtual time at which the last callback runs that is due.
    late_until
        Virtual time until which callbacks do not run when they are due.
    """

    address: str
    loop: asyncio.AbstractEventLoop
    handlers: dict[str, Any] = field(default_factory=dict)
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    dead: bool = False
    stopped_until: float = 0.0
    slow_until: float = 0.0
    lag: float = 0.0
    draws_differently: bool = False
    free_at: float = 0.0
    late_until: float = 0.0

    def stop(self, until: float) -> None:
        """Suspend it."""
        self.stopped_until = until
        self.late_until = max(self.late_until, until)

    def slow_down(self, until: float, lag: float) -> None:
        """Let its event loop be slow."""
        self.slow_until, self.lag = until, lag
        self.late_until = max(self.late_until, until)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine, and all tasks that it starts, in this process."""
        context = contextvars.copy_context()
        context.run(RUNNING_IN.set, self)
        return self.loop.create_task(work, context=context)

    def context_run(self, call: Callable[..., T], *args: Any) -> T:
        """Call a function in this process."""
        context = contextvars.copy_context()
        context.run(RUNNING_IN.set, self)
        return context.run(call, *args)

    def kill(self) -> None:
        """End everything in it."""
        self.dead = True
        self.stopped_until = self.slow_until = self.free_at = self.late_until = 0.0
        for task in list(self.tasks):
            task.cancel()

    def runs_at(self, now: float, random: Callable[[], float]) -> float:
        """When a callback runs that is due now. Callbacks keep their order."""
        due = max(now, self.stopped_until, self.free_at + 1e-6)
        if due < self.slow_until:
            due += self.lag * random()
        self.free_at = due
        self.late_until = max(self.late_until, due)
        return due


class Numbered:
    """An object whose place in sets depends on its number, not on its address in memory."""

    numbers = itertools.count()
    _number: int

    def __hash__(self) -> int:
        try:
            return self._number
        except AttributeError:  # it is in a set for the first time
            self._number = next(Numbered.numbers)
            return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class NumberedTask(Numbered, asyncio.Task[Any]):
    """A task."""


class NumberedFuture(Numbered, asyncio.Future[Any]):
    """A future."""


def tracked(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """Task factory that notes in which process a task runs."""
    context = options.get("context")
    process = context.get(RUNNING_IN) if context is not None else RUNNING_IN.get()
    task = NumberedTask(work, loop=loop, **options)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(process.tasks.pop)
        if process.dead:
            task.cancel()
    return task
