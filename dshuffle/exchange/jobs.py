"""Run the jobs of an event loop in threads: short ones together, so that they share the hand-over between threads.

A hand-over to a thread and back takes about 0.1 ms of processor time, as long as packing 100 KiB.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dshuffle.errors import ExchangeError

TOGETHER_NBYTES = 2**20
"""Bytes of the jobs that are handed over together."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    future: asyncio.Future[Any]
    call: Callable[..., Any]
    args: tuple[Any, ...]
    nbytes: int


class JobQueue:
    """Jobs of one event loop, in order of arrival, on a few threads."""

    # n_threads: number of jobs, or groups of short jobs, that run at a time.
    # name: prefix of the names of the threads.

    def __init__(self, n_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
        self._n_threads = self._idle = n_threads
        self._ended = asyncio.Event()
        self._waiting: deque[_Job] = deque()
        self._closed = False

    def run(self, call: Callable[..., Any], *args: Any, nbytes: int = TOGETHER_NBYTES) -> asyncio.Future[Any]:
        """Call a function in a thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self._closed:
            _fail(future)
            return future
        self._waiting.append(_Job(future, call, args, nbytes))
        if self._idle:
            loop.call_soon(self._start, loop)  # so that jobs that arrive in the same turn of the loop are together
        return future

    async def close(self) -> None:
        """Fail all jobs that have not started, and all that come. Returns when those that run have ended."""
        self._closed = True
        while self._waiting:
            _fail(self._waiting.popleft().future)
        while self._idle < self._n_threads:
            self._ended.clear()
            await self._ended.wait()
        self._executor.shutdown(wait=False)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._idle:
            group = [self._waiting.popleft()]
            nbytes = group[0].nbytes
            while self._waiting and nbytes + self._waiting[0].nbytes <= TOGETHER_NBYTES:
                group.append(self._waiting.popleft())
                nbytes += group[-1].nbytes
            self._idle -= 1
            self._executor.submit(self._work, loop, group)

    def _work(self, loop: asyncio.AbstractEventLoop, group: list[_Job]) -> None:
        results: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        for job in group:
            try:
                results.append((job.future, None if job.future.cancelled() else job.call(*job.args), None))
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # their locals hold rows
                results.append((job.future, None, error))
        with suppress(RuntimeError):  # the loop has been closed, so nobody waits
            loop.call_soon_threadsafe(self._finish, loop, results)
        # An error holds this frame and the executor's. They must not hold the jobs, whose futures hold the error.
        group.clear()
        del results, job

    def _finish(
        self,
        loop: asyncio.AbstractEventLoop,
        results: list[tuple[asyncio.Future[Any], Any, BaseException | None]],
    ) -> None:
        self._idle += 1
        self._ended.set()
        for future, result, error in results:
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._start(loop)


def _fail(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(ExchangeError("the session was closed"))
        future.exception()  # nobody may be waiting for it
