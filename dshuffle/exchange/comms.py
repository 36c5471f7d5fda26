"""Transfer of sample bytes over Dask: ``worker.rpc`` on one side, a handler on the other.

No other module sends samples over the network.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import numpy as np
from distributed import Worker
from distributed.protocol.serialize import to_serialize
from numpy.typing import NDArray

from dshuffle.emulated_links import emulated
from dshuffle.errors import ExchangeError
from dshuffle.exchange.acknowledgements import Acknowledgements
from dshuffle.exchange.arrivals import seconds_since_data
from dshuffle.exchange.endpoints import Refusal, Reply
from dshuffle.exchange.messages import MessageId
from dshuffle.exchange.shared_memory import Place, host, mapped

logger = logging.getLogger(__name__)

WORD = 8
"""Bytes of a word."""

CHECKSUM_NBYTES = 4
"""Bytes of a row's checksum."""

_ARRAYS = ("rows", "checksums", "found")
"""What a reply holds beside a few words."""

SHORT_NBYTES = 2**18
"""Replies up to this length are sent as one string of bytes. Two arrays cost more to serialize, each as a frame."""

_PLACE = "place"
"""Where the rows and checksums are in shared memory."""

_LINK_SECONDS = "link_seconds"
"""How long the arrays took to leave an emulated link."""


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
        reply = await self._request(message, address, "" if address in self._unmappable else self._host)
        try:
            return await _received(self._worker, reply)
        except OSError as error:
            logger.warning("dshuffle: messages from %s use the network, not shared memory: %s", address, error)
            self._unmappable.add(address)
        return await _received(self._worker, await self._request(message, address, ""))

    async def acknowledge(self, message: MessageId) -> None:
        """Acknowledge a message with the next request to its sender, or with a one-way message if there is none."""
        if self.is_local(message.sender):
            self._acknowledge_here(message)
        else:
            self._acknowledgements.add(message.sender, [tuple(message)])

    async def _request(self, message: MessageId, address: str, host: str) -> Reply:
        acknowledged = self._acknowledgements.take(message.sender)
        try:
            reply: Reply = await self._worker.rpc(address).dshuffle_fetch(
                session_id=self._session_id, message=tuple(message), acknowledged=acknowledged, host=host
            )
        except BaseException:  # the acknowledgements may be lost; sending them twice is harmless
            self._acknowledgements.add(message.sender, acknowledged)
            raise
        return reply

    async def _send_acknowledged(self, sender: int, acknowledged: list[tuple[int, ...]]) -> None:
        rpc = self._worker.rpc(self._addresses[sender])
        await rpc.dshuffle_acknowledge(session_id=self._session_id, acknowledged=acknowledged, reply=False)


async def _closed(message: MessageId) -> Reply:
    return Refusal("the session was closed").reply


def _ignored(message: MessageId) -> None:
    """Nobody waits for the acknowledgement any more."""


async def probe(worker: Worker, address: str, nbytes: int, *, shares_memory: bool) -> NDArray[np.uint8]:
    """Request ``nbytes`` from another worker, sent as messages are, and return what was received."""
    asked = worker.rpc(address).dshuffle_probe(nbytes=nbytes, host=host() if shares_memory else "")
    reply = await _received(worker, await asked)
    return cast(NDArray[np.uint8], reply["rows"])


async def request_rows(
    worker: Worker, address: str, session_id: str, epoch: int, sample_ids: NDArray[np.int64]
) -> Reply:
    """Request rows of samples from the partition of an epoch on another worker."""
    ids = to_serialize(sample_ids)
    asked = worker.rpc(address).dshuffle_rows(session_id=session_id, epoch=epoch, sample_ids=ids)
    return await _received(worker, await asked)


async def request_mean(worker: Worker, address: str, **message: Any) -> Reply:
    """Send one rank's array to the worker that averages, and wait for the mean of all ranks' arrays."""
    values = to_serialize(message.pop("values"))
    reply: Reply = await worker.rpc(address).dshuffle_mean(values=values, **message)
    return reply


async def end_collective(worker: Worker, address: str, **message: Any) -> None:
    """Tell the worker that averages that one rank has failed."""
    await worker.rpc(address).dshuffle_end_collective(**message)


async def sent(worker: Worker, reply: Reply) -> Reply:
    """Return a reply to another worker as it is sent fastest.

    The other worker maps arrays that have a place in shared memory. Dask sends other long arrays as frames, without
    pickling.
    """
    nbytes = _nbytes(reply)
    if (link := emulated("links", f"out of {worker.address}")) is not None:
        reply = {**reply, _LINK_SECONDS: await link.send(nbytes)}
    if _PLACE in reply:
        return {key: value for key, value in reply.items() if key not in _ARRAYS}
    if 0 < nbytes <= SHORT_NBYTES and {"rows", "checksums"} == reply.keys() & set(_ARRAYS):
        return packed(reply)
    return {key: to_serialize(value) if key in _ARRAYS else value for key, value in reply.items()}


def packed(reply: Reply) -> Reply:
    """A reply with its rows and checksums as one string of bytes."""
    rows, checksums = reply["rows"], reply["checksums"]
    padding = bytes(-checksums.nbytes % WORD)  # rows are read by words
    fields = {key: value for key, value in reply.items() if key not in _ARRAYS}
    return {**fields, "packed": b"".join((checksums, padding, rows)), "shape": rows.shape}


def unpacked(reply: Reply) -> Reply:
    """The reply that was :func:`packed`; any other one is returned as it is.

    Raises
    ------
    ExchangeError
        If the bytes do not have the shape that the reply says.
    """
    if not isinstance(reply, dict) or "packed" not in reply:
        return reply
    fields = {key: value for key, value in reply.items() if key not in ("packed", "shape")}
    try:
        n_rows, row_nbytes = reply["shape"]
        buffer = bytearray(reply["packed"])  # kernels are compiled for arrays that can be written
        first = n_rows * CHECKSUM_NBYTES + -n_rows * CHECKSUM_NBYTES % WORD
        if len(buffer) != first + n_rows * row_nbytes:
            raise ValueError(f"{len(buffer)} bytes")
        checksums = np.frombuffer(buffer, np.uint32, n_rows)
        rows = np.frombuffer(buffer, np.uint8, n_rows * row_nbytes, first).reshape(n_rows, row_nbytes)
    except (TypeError, ValueError, KeyError) as error:
        raise ExchangeError(f"a message has rows of shape {reply.get('shape')}, but holds {error}") from error
    return {**fields, "rows": rows, "checksums": checksums}


async def _received(worker: Worker, reply: Reply) -> Reply:
    """Unpack or map the arrays of a reply. Raises OSError if this worker cannot map them."""
    reply = unpacked(reply)
    if isinstance(reply, dict) and _PLACE in reply:
        rows, checksums = mapped(Place(*reply.pop(_PLACE)))
        reply |= {"rows": rows, "checksums": checksums}
    if (link := emulated("links", f"into {worker.address}")) is not None:
        await link.receive(_nbytes(reply), reply.get(_LINK_SECONDS, 0.0))
    return reply


def _nbytes(reply: Reply) -> int:
    return sum(reply[key].nbytes for key in _ARRAYS if key in reply)
