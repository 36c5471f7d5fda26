"""Make something in a thread that has to be closed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


async def made_in_thread(executor: Executor, make: Callable[..., T], *args: Any, close: Callable[[T], None]) -> T:
    """Call a function in a thread, and close what it returns if the caller is cancelled meanwhile.

    A thread cannot be cancelled. Without this, nobody would have its result, and only the garbage collector would free
    the files in it. The caller does not wait, because a store may take long to answer.

    Parameters
    ----------
    executor
        Threads.
    make, *args
        The function and its arguments.
    close
        Called in the thread with the result, if nobody waits for that any more.
    """
    making = executor.submit(make, *args)
    try:
        return await asyncio.wrap_future(making)
    except asyncio.CancelledError:
        making.add_done_callback(functools.partial(_close_result, close))
        raise


def _close_result(close: Callable[[T], None], made: Future[T]) -> None:
    if not made.cancelled() and made.exception() is None:
        close(made.result())
