"""An event loop whose time is virtual: it jumps to the next event instead of waiting. Threads are simulated as well."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import selectors
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .processes import RUNNING_IN, NumberedFuture

LONGEST = 50_000.0
"""Virtual seconds after which a schedule counts as one that never ends. Others take some hundred."""


class NothingHappensAnyMore(AssertionError):
    """All coroutines wait, and no event will come."""


class NothingEnds(AssertionError):
    """Events come again and again, and a schedule does not end."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, for one thread. Callbacks of a process that is suspended or slow run later."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.rng = rng
        self.ends = False  # then nothing is late any longer
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        super().__init__(selectors.SelectSelector())
        self._threads = SimulatedThreads(self, n_threads=100)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        return asyncio.wrap_future((executor or self._threads).submit(func, *args), loop=self)

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        process = RUNNING_IN.get() if context is None else context.get(RUNNING_IN)
        if process is not None and self.now < process.late_until and not self.ends:
            return self.call_at(process.runs_at(self.now, self.rng.random), callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _run_once(self) -> None:
        """One round of callbacks, as in asyncio, but for sockets and the clock."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise NothingHappensAnyMore("all coroutines wait for each other")
            self.now = max(self.now, timers[0][0])
            if self.now > LONGEST:
                raise NothingEnds(f"the schedule goes on after {LONGEST:,.0f} s")
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _write_to_self(self) -> None:
        """There is no other thread that could wait in ``select``."""


class SimulatedThreads:
    """In place of a ThreadPoolExecutor: calls run on the loop, one after the other on each thread, at random times.

    A call takes some virtual time. Its effect happens at the end of that time.
    """

    def __init__(self, loop: VirtualLoop, n_threads: int, longest: float = 0.5) -> None:
        self._loop = loop
        self._busy_until = [0.0] * n_threads
        self._longest = longest
        self._waiting: dict[Future[Any], None] = {}  # in order

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        thread = min(range(len(self._busy_until)), key=self._busy_until.__getitem__)
        start = max(self._loop.now, self._busy_until[thread])
        takes = self._loop.rng.choice([1e-6, 0.001, 0.02, self._longest])  # above 0, so that the order is kept
        self._busy_until[thread] = start + takes
        self._waiting[future] = None
        self._loop.call_at(start + takes, self._run, future, fn, args)
        return future

    def _run(self, future: Future[Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._waiting.pop(future, None)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(fn(*args))
        except BaseException as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for future in list(self._waiting) if cancel_futures else []:
            future.cancel()
