"""Replies of dshuffle's handlers: dictionaries with a status, and the error if there is one.

Dask answers an unknown operation with ``None``, and the scheduler forwards errors of handlers as plain text. Therefore
every dshuffle handler returns a dictionary with a status, which the caller unwraps.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from distributed.protocol.serialize import ToPickle

from dshuffle.errors import ClusterError, DShuffleError
from dshuffle.runtime.message_fields import from_fields, to_fields

logger = logging.getLogger(__name__)

Reply = dict[str, Any]
T = TypeVar("T")


async def within(seconds: float, call: Awaitable[T]) -> T:
    """Await a call to another process, for some seconds at most.

    Raises
    ------
    TimeoutError
        If the call has not ended.
    """
    return await unless(asyncio.sleep(seconds), call, TimeoutError(f"no answer within {seconds:g} s"))


async def unless(event: Awaitable[object], call: Awaitable[T], error: Exception) -> T:
    """Await a call to another process, and raise an error if an event comes first.

    ``asyncio.wait_for`` would wait until the cancelled call has ended. But Dask then flushes the connection, which can
    take forever if the other process is stopped.
    """
    task, awaited = asyncio.ensure_future(call), asyncio.ensure_future(event)
    task.add_done_callback(retrieve)
    try:
        await asyncio.wait([task, awaited], return_when=asyncio.FIRST_COMPLETED)
    finally:
        awaited.cancel()
        if not task.done():
            task.cancel()
    if not task.done() or task.cancelled():
        raise error
    return task.result()


def retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a call that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


class Arrays(dict[str, Any]):
    """A reply with arrays, which Dask sends as frames of their own."""


def replying(operation: str, method: Callable[..., Any]) -> Callable[..., Awaitable[Reply]]:
    """Make a handler of a method, which may be a coroutine. It replies with its error instead of raising it."""

    async def reply(**message: Any) -> Reply:
        try:
            result = method(**message)
            if inspect.isawaitable(result):
                result = await result
            return {"status": "OK", **(result if isinstance(result, Arrays) else {"message": to_fields(result)})}
        except DShuffleError as error:
            return {"status": "error", "error": ToPickle(error)}
        except Exception as error:
            logger.exception("dshuffle: %s failed", operation)
            return {"status": "error", "error": ToPickle(ClusterError(f"{type(error).__name__}: {error}"))}

    reply.__name__ = operation  # Dask logs it
    return reply


def unwrap(reply: Any, sender: str) -> Reply:
    """Return a reply, or raise the error that it contains.

    Raises
    ------
    DShuffleError
        The error of the handler, or ClusterError if the answer did not come from a dshuffle handler.
    """
    if not isinstance(reply, dict) or "status" not in reply:
        raise ClusterError(f"dshuffle is not set up on {sender}: the reply was {reply!r}. Make a new Shuffler")
    if reply["status"] == "OK":
        return reply
    error = reply["error"]
    raise error.data if isinstance(error, ToPickle) else error


def message_in(reply: Any, kind: type[T], sender: str) -> T:
    """Return the message that a reply contains, or raise its error.

    Raises
    ------
    DShuffleError
        The error of the handler, or ClusterError if the reply does not contain a message of this type.
    """
    return from_fields(kind, unwrap(reply, sender).get("message"), sender)
