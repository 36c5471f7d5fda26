"""The only file that sends sample bytes over Dask: ``worker.rpc`` on one side, a handler on the other."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from distributed import Status, Worker
from distributed.protocol.serialize import to_serialize

from dshuffle.exchange.endpoints import Reply
from dshuffle.exchange.messages import MessageId

logger = logging.getLogger(__name__)


class DaskNetwork:
    """The participants of one session, reached through the comms of the worker that this process runs.

    Parameters
    ----------
    worker
        The Dask worker of this process.
    session_id
        Names the session on the other workers.
    addresses
        Address of every participant (rank, or the server).
    serve_here, acknowledge_here
        Answer for participants of this process: no byte of theirs crosses a wire.
    """

    def __init__(
        self,
        worker: Worker,
        session_id: str,
        addresses: Mapping[int, str],
        *,
        serve_here: Callable[[MessageId], Awaitable[Reply]],
        acknowledge_here: Callable[[MessageId], None],
    ) -> None:
        self._worker = worker
        self._session_id = session_id
        self._addresses = addresses
        self._serve_here = serve_here
        self._acknowledge_here = acknowledge_here
        self._acknowledged: dict[int, list[tuple[int, ...]]] = {}

    def is_local(self, participant: int) -> bool:
        """Whether a participant lives on this worker."""
        return bool(self._addresses[participant] == self._worker.address)

    async def fetch(self, message: MessageId) -> Reply:
        """Ask for a message; many may be under way at once, each over a comm of its own."""
        if self.is_local(message.sender):
            return await self._serve_here(message)
        sender = self._worker.rpc(self._addresses[message.sender])
        acknowledged = self._acknowledged.pop(message.sender, [])
        try:
            reply: Reply = await sender.dshuffle_fetch(
                session_id=self._session_id, message=dataclasses.astuple(message), acknowledged=acknowledged
            )
        except BaseException:  # perhaps they did not get there; twice does no harm
            self._acknowledge(message.sender, acknowledged)
            raise
        return reply

    async def acknowledge(self, message: MessageId) -> None:
        """Free the sender's window: along with the next request, or by a one-way message if that goes elsewhere."""
        if self.is_local(message.sender):
            self._acknowledge_here(message)
        else:
            self._acknowledge(message.sender, [dataclasses.astuple(message)])

    def _acknowledge(self, sender: int, acknowledged: list[tuple[int, ...]]) -> None:
        if acknowledged:
            self._acknowledged.setdefault(sender, []).extend(acknowledged)
            # The task that makes the next request has its turn before.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._flush, sender)

    def _flush(self, sender: int) -> None:
        if sender in self._acknowledged and self._worker.status not in (Status.closing, Status.closed, Status.failed):
            self._worker._ongoing_background_tasks.call_soon(self._send_acknowledgements, sender)

    async def _send_acknowledgements(self, sender: int) -> None:
        acknowledged = self._acknowledged.pop(sender, None)
        if not acknowledged:
            return
        try:
            rpc = self._worker.rpc(self._addresses[sender])
            await rpc.dshuffle_acknowledge(session_id=self._session_id, acknowledged=acknowledged, reply=False)
        except (OSError, RuntimeError):  # a worker that has gone or is closing
            logger.debug("dshuffle: %d acknowledgements did not reach %d", len(acknowledged), sender, exc_info=True)


async def probe(worker: Worker, address: str, nbytes: int) -> int:
    """Bytes that another worker sends when it is asked for so many, along the way that messages take."""
    reply = await worker.rpc(address).dshuffle_probe(nbytes=nbytes)
    return int(reply["rows"].nbytes)


async def meet(worker: Worker, address: str, **message: Any) -> Reply:
    """Bring one rank's array to where all ranks meet, and wait for the mean: long, if another rank is slow."""
    values = to_serialize(message.pop("values"))
    reply: Reply = await worker.rpc(address).dshuffle_meet(values=values, **message)
    return reply


async def disband(worker: Worker, address: str, **message: Any) -> None:
    """Tell where all ranks meet that one of them will not come."""
    await worker.rpc(address).dshuffle_disband(**message)


def as_frames(reply: Reply) -> Reply:
    """Mark the arrays of a reply so that Dask sends their memory as it is, without pickling."""
    return {key: to_serialize(value) if key in ("rows", "checksums") else value for key, value in reply.items()}
