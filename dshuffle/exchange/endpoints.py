"""What the two ends of an exchange share: the network, the sources and destinations of items, and their measurements.

:class:`~dshuffle.exchange.sender.Sender` and :class:`~dshuffle.exchange.receiver.Receiver` are asyncio drivers of two
state machines. Each carries out the instructions of its state machine and reports events back to it. Packing, hashing
and unpacking run in threads, so they do not block the event loop. The network is a Protocol: Dask comms in `comms.py`,
a dictionary in the tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dshuffle.exchange.messages import MessageId
from dshuffle.exchange.replies import Reply
from dshuffle.rows import ByteMatrix, Checksums

T = TypeVar("T")


def nothing_to_mend() -> int:
    """The default of ``mend``, a call that reads corrupted rows again and returns their number."""
    return 0


class RowSource(Protocol):
    """The source of a sender's items: rows of a cache partition, or packets of the server."""

    def pack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy items ``first`` to ``last - 1`` into buffers. Raises ExchangeError if a sample is missing."""


class RowSink(Protocol):
    """The destination of a receiver's items."""

    @property
    def intact(self) -> bool:
        """Whether items that have not arrived can still be unpacked."""

    def unpack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Verify and keep items ``first`` to ``last - 1``. Raises ChecksumMismatch if one is corrupted."""

    @property
    def n_loading(self) -> int:
        """Items that have come so far of those that are being loaded."""

    async def load(self, first: int, last: int, stop: Callable[[], bool], *, recovers: bool) -> None:
        """Load items ``first`` to ``last - 1``, unless ``stop`` returns true.

        ``recovers`` if a sender was to deliver them, and cannot.
        """


class Network(Protocol):
    """Communication with the other participants."""

    async def fetch(self, message: MessageId) -> Reply:
        """Request a message from its sender."""

    async def acknowledge(self, message: MessageId) -> None:
        """Tell the sender that a message has arrived. No reply is awaited."""

    def is_local(self, participant: int) -> bool:
        """Whether a participant runs in this process and needs no network."""


@dataclass(slots=True)
class LinkMeter:
    """What came from one sender, between the first request (``begun``) and the last answer (``ended``)."""

    begun: float
    ended: float = 0.0
    nbytes: int = 0


@dataclass(slots=True)
class Meter:
    """Bytes and seconds of one run on one participant.

    ``shared_bytes`` is the part of ``sent_bytes`` that receivers mapped. ``links`` has one entry for each sender in
    another process.
    """

    sent_bytes: int = 0
    sent_checksum_bytes: int = 0
    shared_bytes: int = 0
    received_bytes: int = 0
    gather_seconds: float = 0.0
    transfer_seconds: float = 0.0
    scatter_seconds: float = 0.0
    rows: int = 0
    recovered_rows: int = 0
    links: dict[int, LinkMeter] = field(default_factory=dict)


async def shared_result(future: asyncio.Future[T]) -> T:
    """Await a future that several tasks share, without cancelling it when one of them is cancelled."""
    return future.result() if future.done() else await asyncio.shield(future)


def has_result(future: asyncio.Future[Any] | None) -> bool:
    """Whether a future has ended without an error."""
    return future is not None and future.done() and not future.cancelled() and future.exception() is None


def timed(fn: Callable[..., None], *args: Any) -> float:
    """Return the duration of a call in seconds, without the time spent waiting for a thread."""
    started = time.perf_counter()
    fn(*args)
    return time.perf_counter() - started
