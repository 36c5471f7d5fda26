"""Acknowledgements of messages: a receiver tells a sender which rows are in their slots.

They travel with the next request to the same sender, or in a message of their own if there is none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from distributed import Status, Worker

logger = logging.getLogger(__name__)


AcknowledgementSender = Callable[[int, list[tuple[int, ...]]], Awaitable[None]]


class Acknowledgements:
    """Acknowledgements of one session that have not been sent.

    Parameters
    ----------
    worker
        Dask worker of this process.
    send
        Sends acknowledgements to a sender in a message of their own.
    """

    def __init__(self, worker: Worker, send: AcknowledgementSender) -> None:
        self._worker = worker
        self._send_alone = send
        self._unsent: dict[int, list[tuple[int, ...]]] = {}

    def close(self) -> None:
        """Send what has not been sent. What is added from now on is dropped, because the runs have ended."""
        for sender in list(self._unsent):
            self._flush(sender)
        self._send_alone = _dropped

    def take(self, sender: int) -> list[tuple[int, ...]]:
        """Remove and return the acknowledgements for a sender, to send them with a request."""
        return self._unsent.pop(sender, [])

    def add(self, sender: int, messages: list[tuple[int, ...]]) -> None:
        """Acknowledge messages of a sender with the next request, or by themselves if there is none."""
        if messages:
            self._unsent.setdefault(sender, []).extend(messages)
            # Deferred twice, so that the task that makes the next request runs first.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._flush, sender)

    def _flush(self, sender: int) -> None:
        if sender in self._unsent and self._worker.status not in (Status.closing, Status.closed, Status.failed):
            self._worker._ongoing_background_tasks.call_soon(self._send, sender, self._send_alone)

    async def _send(self, sender: int, send_alone: AcknowledgementSender) -> None:
        acknowledged = self.take(sender)
        if not acknowledged:
            return
        try:
            await send_alone(sender, acknowledged)
        except (OSError, RuntimeError):  # the worker has left or is closing
            logger.debug("dshuffle: %d acknowledgements did not reach %d", len(acknowledged), sender, exc_info=True)


async def _dropped(sender: int, acknowledged: list[tuple[int, ...]]) -> None:
    """Nobody waits for these acknowledgements any more."""
