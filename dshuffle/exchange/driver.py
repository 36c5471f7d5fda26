"""Driving the two state machines with asyncio: a :class:`Sender` answers requests, a :class:`Receiver` makes them.

Both carry out the instructions of their state machine and report events back to it. Packing, hashing and unpacking
happen in an executor, so the event loop only moves control and frames. The network is a Protocol: Dask's comms in
`comms.py`, a dictionary in the tests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, ExchangeError
from dshuffle.exchange.buffers import BufferPool
from dshuffle.exchange.cache import CachePartition
from dshuffle.exchange.inbox import Fetch, Inbox, InboxInstruction, ReportFailed, ReportReady
from dshuffle.exchange.messages import Cut, MessageId
from dshuffle.exchange.outbox import Outbox, OutboxInstruction, Refuse, Send
from dshuffle.rows import ByteMatrix

logger = logging.getLogger(__name__)

SampleIds = NDArray[np.int64]
Reply = dict[str, Any]


class RowSource(Protocol):
    """Whatever a sender takes its rows from: a cache partition, or the server's rows."""

    def pack(self, sample_ids: SampleIds, rows: ByteMatrix, checksums: NDArray[np.uint32]) -> None:
        """Put rows and checksums of samples into buffers. Raises ExchangeError naming a sample that it lacks."""


class Network(Protocol):
    """How a participant reaches the others."""

    async def fetch(self, message: MessageId) -> Reply:
        """Ask the message's sender for it."""

    async def acknowledge(self, message: MessageId) -> None:
        """Tell the message's sender that it has arrived; no reply is awaited."""

    def is_local(self, participant: int) -> bool:
        """Whether that participant lives in this process, so that no byte crosses a wire."""


@dataclass(slots=True)
class Meter:
    """Bytes and seconds of one run on one participant."""

    sent_bytes: int = 0
    received_bytes: int = 0
    gather_seconds: float = 0.0
    transfer_seconds: float = 0.0
    scatter_seconds: float = 0.0
    rows: int = 0


class Sender:
    """Answers the requests for one participant's rows.

    Parameters
    ----------
    outbox
        Decides which request to answer when.
    source
        Where the rows come from.
    buffers
        What messages are packed into.
    """

    def __init__(
        self,
        outbox: Outbox,
        source: RowSource,
        buffers: BufferPool,
        cut: Cut,
        network: Network,
        executor: Executor,
    ) -> None:
        self.meter = Meter()
        self._outbox = outbox
        self._source = source
        self._buffers = buffers
        self._cut = cut
        self._network = network
        self._executor = executor
        self._sends: Mapping[int, SampleIds] = {}
        self._answers: dict[MessageId, asyncio.Future[OutboxInstruction]] = {}

    def begin(self, run_id: int, sends: Mapping[int, SampleIds]) -> None:
        """Start a run in which these samples are owed to these destinations."""
        self.meter = Meter()
        self._buffers.forget()
        self._sends = sends
        self._perform(self._outbox.begin(run_id, {to: self._cut.count(len(ids)) for to, ids in sends.items()}))

    def end(self) -> None:
        """The run is over; what still waits for it is refused."""
        self._perform(self._outbox.end())

    def close(self) -> None:
        """No run will follow; whoever waits for one is refused."""
        self._perform(self._outbox.close())

    def acknowledged(self, message: MessageId) -> None:
        """A receiver has its message, so nothing reads its buffer any more."""
        self._buffers.give_back(message)
        self._perform(self._outbox.acknowledged(message))

    async def serve(self, message: MessageId) -> Reply:
        """Reply to a request as soon as the state machine lets it through."""
        earlier = self._answers.get(message)
        if earlier is not None and not earlier.done():  # its asker has timed out while it waited, and asks again
            earlier.set_result(Refuse(message, "asked for again"))
        answer: asyncio.Future[OutboxInstruction] = asyncio.get_running_loop().create_future()
        self._answers[message] = answer
        try:
            self._perform(self._outbox.request(message))
            instruction = await answer
        finally:
            if self._answers.get(message) is answer:
                del self._answers[message]
        if not isinstance(instruction, Send):
            return {"status": "refused", "reason": instruction.reason, "again": False}
        first, last = self._cut.bounds(message.sequence, len(self._sends[message.destination]))
        sample_ids = self._sends[message.destination][first:last]
        try:
            loop = asyncio.get_running_loop()
            rows, checksums = self._buffers.take(message, len(sample_ids))
            seconds = await loop.run_in_executor(self._executor, self._pack, sample_ids, rows, checksums)
        except (ExchangeError, DatasetError) as error:
            self.acknowledged(message)
            return {"status": "refused", "reason": f"{type(error).__name__}: {error}", "again": False}
        self.meter.gather_seconds += seconds
        if not self._network.is_local(message.destination):
            self.meter.sent_bytes += rows.nbytes + checksums.nbytes
        return {"status": "OK", "rows": rows, "checksums": checksums}

    def _pack(self, sample_ids: SampleIds, rows: ByteMatrix, checksums: NDArray[np.uint32]) -> float:
        """Pack a message; the seconds that it took, without those of waiting for a thread."""
        started = time.perf_counter()
        self._source.pack(sample_ids, rows, checksums)
        return time.perf_counter() - started

    def _perform(self, instructions: list[OutboxInstruction]) -> None:
        for instruction in instructions:
            answer = self._answers.get(instruction.message)
            if answer is None or answer.done():  # who asked has gone away: free its place in the window
                if isinstance(instruction, Send):
                    self.acknowledged(instruction.message)
                continue
            answer.set_result(instruction)


class Receiver:
    """Fetches what one rank is owed into the free slots of its cache partition.

    Parameters
    ----------
    read_store
        Reads samples from the store into slots (called in the executor).
    store
        The pseudo-sender whose rows are read from the store rather than asked for.
    report
        Called once a run, with ``None`` when everything has arrived and with the reason when it cannot.
    timeout
        Seconds after which a request counts as failed.
    """

    def __init__(
        self,
        inbox: Inbox,
        cache: CachePartition,
        cut: Cut,
        network: Network,
        executor: Executor,
        *,
        read_store: Callable[[SampleIds, NDArray[np.int64]], None],
        store: int,
        report: Callable[[int, str | None], None],
        timeout: float,
    ) -> None:
        self.meter = Meter()
        self._inbox = inbox
        self._cache = cache
        self._cut = cut
        self._network = network
        self._executor = executor
        self._read_store = read_store
        self._store = store
        self._report = report
        self._timeout = timeout
        self._flows: dict[int, tuple[SampleIds, NDArray[np.int64]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._touching: set[asyncio.Future[None]] = set()
        self._started = 0.0

    def begin(self, run_id: int, receives: Mapping[int, SampleIds], slots: NDArray[np.int64]) -> None:
        """Start a run; ``slots`` are the reserved ones, flow after flow in the order of ``receives``."""
        self.meter = Meter()
        self._started = time.perf_counter()
        self._flows = {}
        first = 0
        for sender, sample_ids in receives.items():
            self._flows[sender] = (sample_ids, slots[first : first + len(sample_ids)])
            first += len(sample_ids)
        owed = {
            sender: min(len(ids), 1) if sender == self._store else self._cut.count(len(ids))
            for sender, (ids, _) in self._flows.items()
        }
        self._perform(self._inbox.begin(run_id, owed))

    def commit(self, run_id: int) -> None:
        """The run is committed."""
        self._inbox.commit(run_id)

    async def abort(self) -> None:
        """Give the run up; returns when nothing of it can touch the cache partition any more."""
        self._inbox.abort()
        while self._touching:
            await asyncio.wait(self._touching)
        for task in self._tasks:  # what waits for the network may wait long: for a worker that has gone
            task.cancel()

    def _perform(self, instructions: list[InboxInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Fetch(message):
                    task = asyncio.get_running_loop().create_task(self._fetch(message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case ReportReady(run_id):
                    self._report(run_id, None)
                case ReportFailed(run_id, reason):
                    self._report(run_id, reason)

    async def _fetch(self, message: MessageId) -> None:
        sample_ids, slots = self._flows[message.sender]
        try:
            if message.sender == self._store:
                await self._touch_cache(self._read_store, sample_ids, slots)
                n_rows = len(sample_ids)
            else:
                first, last = self._cut.bounds(message.sequence, len(sample_ids))
                n_rows = last - first
                reply = await self._ask(message)
                if reply["status"] != "OK":
                    self._perform(self._inbox.failed(message, reply["reason"], again=reply["again"]))
                    return
                if message not in self._inbox.outstanding:  # the run was given up meanwhile
                    return
                await self._touch_cache(self._unpack, sample_ids[first:last], slots[first:last], reply)
                # Not if it was corrupted: the request that follows may overtake the acknowledgement, which would
                # then free the buffer that the message is being packed into anew.
                await self._network.acknowledge(message)
        except (TimeoutError, ExchangeError, OSError) as error:
            # A broken connection or a corrupted message is worth asking again; a corrupt chunk is not.
            again = not isinstance(error, DatasetError)
            self._perform(self._inbox.failed(message, f"{type(error).__name__}: {error}", again=again))
        except Exception as error:  # whatever it is, the scheduler must hear of it, or the epoch would never end
            logger.exception("dshuffle: %s failed", message)
            self._perform(self._inbox.failed(message, f"{type(error).__name__}: {error}", again=False))
        else:
            self.meter.rows += n_rows
            self._perform(self._inbox.arrived(message))

    async def _touch_cache(self, fn: Callable[..., None], *args: Any) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._executor, fn, *args)
        self._touching.add(future)
        future.add_done_callback(self._touching.discard)
        await future

    async def _ask(self, message: MessageId) -> Reply:
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._network.fetch(message)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no reply within {self._timeout:g} s") from error
        if not isinstance(reply, dict) or "status" not in reply:
            raise ExchangeError(f"participant {message.sender} does not know dshuffle (its reply was {reply!r})")
        self.meter.transfer_seconds = time.perf_counter() - self._started
        if reply["status"] == "OK" and not self._network.is_local(message.sender):
            self.meter.received_bytes += reply["rows"].nbytes + reply["checksums"].nbytes
        return reply

    def _unpack(self, sample_ids: SampleIds, slots: NDArray[np.int64], reply: Reply) -> None:
        started = time.perf_counter()
        self._cache.unpack(sample_ids, slots, reply["rows"], reply["checksums"])
        self.meter.scatter_seconds += time.perf_counter() - started
