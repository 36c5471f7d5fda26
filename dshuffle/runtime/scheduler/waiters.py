"""Calls of the client that wait for the end of a phase."""

from __future__ import annotations

import asyncio


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
