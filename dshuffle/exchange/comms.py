"""Transfer of sample bytes over Dask: ``worker.rpc`` on one side, a handler on the other.

No other module sends samples over the network.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from distributed import Worker
from distributed.protocol.serialize import to_serialize
from numpy.typing import NDArray

from dshuffle.emulated_links import emulated
from dshuffle.exchange.acknowledgements import Acknowledgements
from dshuffle.exchange.last_data import seconds_since_data
from dshuffle.exchange.messages import MessageId
from dshuffle.exchange.replies import Refusal, Reply, RowsReply, from_fields, to_fields
from dshuffle.exchange.shared_memory import host

logger = logging.getLogger(__name__)


class DaskNetwork:
    """The network of one session, using the comms of this process's Dask worker.

    Parameters
    ----------
    worker
        Dask worker of this process.
    session_id
        Session id on the other workers.
    addresses
        Address of each participant (a rank or the server).
    serve_here, acknowledge_here
        Handlers for participants in this process, which are called without using the network.
    shares_memory
        Whether long messages from workers of this host pass through shared memory.
    """

    def __init__(
        self,
        worker: Worker,
        session_id: str,
        addresses: Mapping[int, str],
        *,
        serve_here: Callable[[MessageId], Awaitable[Reply]],
        acknowledge_here: Callable[[MessageId], None],
        shares_memory: bool,
    ) -> None:
        self._worker = worker
        self._session_id = session_id
        self._addresses = addresses
        self._serve_here = serve_here
        self._acknowledge_here = acknowledge_here
        self._acknowledgements = Acknowledgements(worker, self._send_acknowledged)
        # Messages within a process need not be copied at all.
        self._host = host() if shares_memory and not worker.address.startswith("inproc:") else ""
        self._unmappable: set[str] = set()

    def close(self) -> None:
        """Forget the handlers, which refer to the session. Its connections belong to the Dask worker."""
        self._serve_here, self._acknowledge_here = _closed, _ignored
        self._acknowledgements.close()

    def close_idle(self, most: int) -> None:
        """Close the connections of this worker that carry no request, if there are more than some."""
        pool = self._worker.rpc
        if sum(map(len, pool.available.values())) > most:
            pool.collect()

    def is_local(self, participant: int) -> bool:
        """Whether a participant runs on this worker."""
        return bool(self._addresses[participant] == self._worker.address)

    def heard(self) -> dict[int, float]:
        """Participant -> seconds since bytes came from it, for those that this worker waits for, if it is known."""
        ages = {participant: seconds_since_data(self._worker, where) for participant, where in self._addresses.items()}
        return {participant: age for participant, age in ages.items() if age is not None}

    async def fetch(self, message: MessageId) -> Reply:
        """Request a message. Concurrent requests use separate comms."""
        if self.is_local(message.sender):
            return await self._serve_here(message)
        address = self._addresses[message.sender]
        fields = await self._request(message, address, "" if address in self._unmappable else self._host)
        try:
            reply = from_fields(fields, address)
        except OSError as error:
            logger.warning("dshuffle: messages from %s use the network, not shared memory: %s", address, error)
            self._unmappable.add(address)
            reply = from_fields(await self._request(message, address, ""), address)
        return await received(self._worker, reply) if isinstance(reply, RowsReply) else reply

    async def acknowledge(self, message: MessageId) -> None:
        """Acknowledge a message with the next request to its sender, or with a one-way message if there is none."""
        if self.is_local(message.sender):
            self._acknowledge_here(message)
        else:
            self._acknowledgements.add(message.sender, [tuple(message)])

    async def _request(self, message: MessageId, address: str, host: str) -> object:
        acknowledged = self._acknowledgements.take(message.sender)
        try:
            fields: object = await self._worker.rpc(address).dshuffle_fetch(
                session_id=self._session_id, message=tuple(message), acknowledged=acknowledged, host=host
            )
        except BaseException:  # the acknowledgements may be lost; sending them twice is harmless
            self._acknowledgements.add(message.sender, acknowledged)
            raise
        return fields

    async def _send_acknowledged(self, sender: int, acknowledged: list[tuple[int, ...]]) -> None:
        rpc = self._worker.rpc(self._addresses[sender])
        await rpc.dshuffle_acknowledge(session_id=self._session_id, acknowledged=acknowledged, reply=False)


async def _closed(message: MessageId) -> Reply:
    return Refusal("the session was closed")


def _ignored(message: MessageId) -> None:
    """Nobody waits for the acknowledgement any more."""


async def request_rows(
    worker: Worker, address: str, session_id: str, epoch: int, sample_ids: NDArray[np.int64]
) -> object:
    """Request rows of samples from the partition of an epoch on another worker, and return the fields of its reply."""
    ids = to_serialize(sample_ids)
    fields: object = await worker.rpc(address).dshuffle_rows(session_id=session_id, epoch=epoch, sample_ids=ids)
    return fields


async def request_block(worker: Worker, address: str, session_id: str, numbers: NDArray[Any], **query: Any) -> object:
    """Request rows of a block of the store from the worker that reads it, and return the fields of its reply."""
    sent_numbers = to_serialize(numbers)
    fields: object = await worker.rpc(address).dshuffle_block(session_id=session_id, numbers=sent_numbers, **query)
    return fields


async def request_mean(worker: Worker, address: str, **message: Any) -> object:
    """Send one rank's array to the worker that averages, and wait for the mean of all ranks' arrays."""
    values = to_serialize(message.pop("values"))
    fields: object = await worker.rpc(address).dshuffle_mean(values=values, **message)
    return fields


async def end_collective(worker: Worker, address: str, **message: Any) -> None:
    """Tell the worker that averages that one rank has failed."""
    await worker.rpc(address).dshuffle_end_collective(**message)


async def sent(worker: Worker, reply: Reply) -> dict[str, Any]:
    """The fields of a reply to another worker, once its rows have passed an emulated link."""
    if isinstance(reply, RowsReply) and (link := emulated("links", f"out of {worker.address}")) is not None:
        reply = msgspec.structs.replace(reply, link_seconds=await link.send(reply.nbytes))
    return to_fields(reply)


async def received(worker: Worker, reply: RowsReply) -> RowsReply:
    """Rows from another worker, once they have passed an emulated link."""
    if (link := emulated("links", f"into {worker.address}")) is not None:
        await link.receive(reply.nbytes, reply.link_seconds)
    return reply
