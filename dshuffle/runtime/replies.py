"""Replies of dshuffle's handlers: always with a status, errors inside.

Dask answers an unknown operation with ``None`` and hands errors of handlers through the scheduler as bare text; so
every handler of ours returns a dictionary with a status, and who asks unwraps it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from distributed.protocol.serialize import ToPickle

from dshuffle.errors import ClusterError, DShuffleError

logger = logging.getLogger(__name__)

Reply = dict[str, Any]


def replying(handler: Callable[..., Awaitable[Reply | None]]) -> Callable[..., Awaitable[Reply]]:
    """Make a handler reply with its error rather than raise it."""

    @functools.wraps(handler)
    async def reply(*args: Any, **kwargs: Any) -> Reply:
        try:
            return {"status": "OK", **(await handler(*args, **kwargs) or {})}
        except DShuffleError as error:
            return {"status": "error", "error": ToPickle(error)}
        except Exception as error:
            logger.exception("dshuffle: %s failed", getattr(handler, "__name__", handler))
            return {"status": "error", "error": ToPickle(ClusterError(f"{type(error).__name__}: {error}"))}

    return reply


def unwrap(reply: Any, who: str) -> Reply:
    """The reply, if it is one; its error otherwise.

    Raises
    ------
    DShuffleError
        The error that the handler met, or ClusterError when nothing of ours answered.
    """
    if not isinstance(reply, dict) or "status" not in reply:
        raise ClusterError(f"{who} does not know dshuffle (its reply was {reply!r})")
    if reply["status"] == "OK":
        return reply
    error = reply["error"]
    raise error.data if isinstance(error, ToPickle) else error
