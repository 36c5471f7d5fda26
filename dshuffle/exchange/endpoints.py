"""Asyncio drivers of the two state machines: a :class:`Sender` answers requests, a :class:`Receiver` makes them.

Each carries out the instructions of its state machine and reports events back to it. Packing, hashing and unpacking
run in threads, so they do not block the event loop. The network is a Protocol: Dask comms in `comms.py`, a
dictionary in the tests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, ExchangeError
from dshuffle.exchange.buffers import BufferPool
from dshuffle.exchange.inbox import Fetch, Inbox, InboxInstruction, ReportFailed, ReportReady
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.messages import Flow, MessageId
from dshuffle.exchange.outbox import Outbox, OutboxInstruction, Refuse, Send
from dshuffle.planning import name_of
from dshuffle.rows import ByteMatrix

logger = logging.getLogger(__name__)

Checksums = NDArray[np.uint32]
Reply = dict[str, Any]
T = TypeVar("T")


class RowSource(Protocol):
    """The source of a sender's items: rows of a cache partition, or packets of the server."""

    def pack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy items ``first`` to ``last - 1`` into buffers. Raises ExchangeError if a sample is missing."""


class RowSink(Protocol):
    """The destination of a receiver's items."""

    def unpack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Verify and keep items ``first`` to ``last - 1``. Raises ChecksumMismatch if one is corrupted."""

    def read_store(self, first: int, last: int) -> None:
        """Read items ``first`` to ``last - 1`` from the store."""


class Network(Protocol):
    """Communication with the other participants."""

    async def fetch(self, message: MessageId) -> Reply:
        """Request a message from its sender."""

    async def acknowledge(self, message: MessageId) -> None:
        """Tell the sender that a message has arrived. No reply is awaited."""

    def is_local(self, participant: int) -> bool:
        """Whether a participant runs in this process and needs no network."""


@dataclass(slots=True)
class Meter:
    """Bytes and seconds of one run on one participant."""

    sent_bytes: int = 0
    sent_checksum_bytes: int = 0
    received_bytes: int = 0
    gather_seconds: float = 0.0
    transfer_seconds: float = 0.0
    scatter_seconds: float = 0.0
    rows: int = 0


class Sender:
    """Answers requests for the messages of one participant.

    Parameters
    ----------
    outbox
        State machine that decides when to answer which request.
    buffers
        Buffers that messages are packed into.
    network
        Network of the session.
    jobs
        Threads that pack messages.
    """

    def __init__(self, outbox: Outbox, buffers: BufferPool, network: Network, jobs: JobQueue) -> None:
        self.meter = Meter()
        self._outbox = outbox
        self._buffers = buffers
        self._network = network
        self._jobs = jobs
        self._acknowledged = True
        self._flows: Mapping[int, Flow] = {}
        self._source: asyncio.Future[RowSource] | None = None
        self._answers: dict[MessageId, asyncio.Future[OutboxInstruction]] = {}

    def begin(
        self,
        run_id: int,
        flows: Mapping[int, Flow],
        source: asyncio.Future[RowSource],
        *,
        window: int | None = None,
        acknowledged: bool = True,
    ) -> None:
        """Start a run that sends these flows (by destination), with items from ``source`` once it is ready.

        Messages that are not ``acknowledged`` leave the window once they are packed. This saves the acknowledgement.
        Use it only where all messages fit in memory: nothing but the receivers' requests then limits what they take.
        """
        self.meter = Meter()
        self._acknowledged = acknowledged
        self._buffers.forget()
        self._flows, self._source = flows, source
        self._buffers.fit(max((flow.longest for flow in flows.values()), default=0))
        owed = {to: flow.n_messages for to, flow in flows.items()}
        gates = {to: flow.gates.tolist() for to, flow in flows.items() if flow.gates is not None}
        self._perform(self._outbox.begin(run_id, owed, gates=gates, window=window))

    def open_gate(self, run_id: int, gate: int) -> None:
        """Allow the messages that wait for a gate: their packets have arrived."""
        self._perform(self._outbox.open_gate(run_id, gate))

    def end(self) -> None:
        """End the run and refuse the requests that still wait for it."""
        self._perform(self._outbox.end())
        self._flows, self._source = {}, None

    def close(self) -> None:
        """Refuse all waiting requests; no run will follow."""
        self._perform(self._outbox.close())

    def acknowledged(self, message: MessageId) -> None:
        """Free the buffer and the window slot of a message that its receiver has unpacked."""
        self._buffers.give_back(message)
        self._perform(self._outbox.acknowledged(message))

    async def serve(self, message: MessageId) -> Reply:
        """Reply to a request as soon as the state machine allows it."""
        earlier = self._answers.get(message)
        if earlier is not None and not earlier.done():  # the receiver timed out and asks again
            earlier.set_result(Refuse(message, "superseded by a newer request"))
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
        flow, future = self._flows.get(message.destination), self._source
        if flow is None or future is None:  # the run has just ended
            return {"status": "refused", "reason": f"run {message.run_id} has ended", "again": False}
        first, last = flow.message(message.sequence)
        try:
            source = await _given(future)
            n_rows, pool = last - first, self._buffers
            rows, checksums = pool.take(message, n_rows) if self._acknowledged else pool.single_use(n_rows)
            seconds = await self._jobs.run(_timed, source.pack, first, last, rows, checksums, nbytes=rows.nbytes)
        except (ExchangeError, DatasetError) as error:
            self.acknowledged(message)
            return {"status": "refused", "reason": f"{type(error).__name__}: {error}", "again": False}
        self.meter.gather_seconds += seconds
        if not self._network.is_local(message.destination):
            self.meter.sent_bytes += rows.nbytes + checksums.nbytes
            self.meter.sent_checksum_bytes += checksums.nbytes
        if not self._acknowledged:
            self.acknowledged(message)
        return {"status": "OK", "rows": rows, "checksums": checksums, "acknowledge": self._acknowledged}

    def _perform(self, instructions: list[OutboxInstruction]) -> None:
        for instruction in instructions:
            answer = self._answers.get(instruction.message)
            if answer is None or answer.done():  # nobody waits for the answer: free the window
                if isinstance(instruction, Send):
                    self.acknowledged(instruction.message)
                continue
            answer.set_result(instruction)


class Receiver:
    """Fetches the messages that one rank needs.

    Parameters
    ----------
    inbox
        State machine that decides which messages to request.
    network
        Network of the session.
    jobs
        Threads that unpack messages.
    reading
        Threads that read the store.
    store
        Sender id that stands for the store; its rows are read instead of requested.
    report
        Called once per run with the run id, and ``None`` when everything has arrived or the reason for a failure.
    timeout
        Time in seconds without any message after which the open requests fail.
    open_gate
        Called with the run id and a gate when all messages that the gate waits for have arrived.
    """

    def __init__(
        self,
        inbox: Inbox,
        network: Network,
        jobs: JobQueue,
        reading: JobQueue,
        *,
        store: int,
        report: Callable[[int, str | None], None],
        timeout: float,
        open_gate: Callable[[int, int], None],
    ) -> None:
        self.meter = Meter()
        self._inbox = inbox
        self._network = network
        self._jobs = jobs
        self._reading = reading
        self._store = store
        self._report = report
        self._timeout = timeout
        self._open_gate = open_gate
        self._flows: Mapping[int, Flow] = {}
        self._sink: asyncio.Future[RowSink] | None = None
        self._towards: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._touching: set[asyncio.Future[Any]] = set()
        self._timers: set[asyncio.Timeout] = set()
        self._started = 0.0

    def begin(
        self, run_id: int, flows: Mapping[int, Flow], sink: asyncio.Future[RowSink], *, window: int | None = None
    ) -> None:
        """Start a run that receives these flows (by sender) into ``sink`` once it is ready."""
        self.meter = Meter()
        self._started = time.perf_counter()
        self._flows, self._sink = flows, sink
        self._towards = Counter()
        for flow in flows.values():
            if flow.gates is not None:
                self._towards.update(flow.gates.tolist())
        owed = {sender: flow.n_messages for sender, flow in flows.items()}
        self._perform(self._inbox.begin(run_id, owed, window=window))

    def commit(self, run_id: int) -> None:
        """Mark the run as committed."""
        self._inbox.commit(run_id)
        self._flows, self._sink = {}, None

    async def abort(self) -> None:
        """Abort the run; returns when none of its tasks can access the cache partition any more."""
        self._inbox.abort()
        while self._touching:
            await asyncio.wait(self._touching)
        for task in self._tasks:  # a task may wait long for the network, for instance for a worker that has left
            task.cancel()
        self._flows, self._sink = {}, None

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
        future = self._sink
        assert future is not None
        first, last = self._flows[message.sender].message(message.sequence)
        try:
            reply = None if message.sender == self._store else await self._ask(message)
            if reply is not None and reply["status"] != "OK":
                self._perform(self._inbox.failed(message, reply["reason"], again=reply["again"]))
                return
            sink = await _given(future)
            if message not in self._inbox.outstanding:  # the run was aborted meanwhile
                return
            if reply is None:
                await self._touch_cache(self._reading.run(sink.read_store, first, last))
            else:
                rows, checksums = reply["rows"], reply["checksums"]
                job = self._jobs.run(_timed, sink.unpack, first, last, rows, checksums, nbytes=rows.nbytes)
                self.meter.scatter_seconds += await self._touch_cache(job)
                # A corrupted message is not acknowledged: the next request may overtake the acknowledgement, which
                # would then free the buffer that the message is being packed into again.
                if reply["acknowledge"]:
                    await self._network.acknowledge(message)
        except (TimeoutError, ExchangeError, OSError) as error:
            # Retry after a broken connection or a corrupted message, but not after a corrupt chunk.
            again = not isinstance(error, DatasetError)
            self._perform(self._inbox.failed(message, f"{type(error).__name__}: {error}", again=again))
        except Exception as error:  # the scheduler must be told of any error, or the epoch would hang
            logger.exception("dshuffle: %s failed", message)
            self._perform(self._inbox.failed(message, f"{type(error).__name__}: {error}", again=False))
        else:
            if message in self._inbox.outstanding:
                self.meter.rows += last - first
                self._count_towards_gate(message)
                self._perform(self._inbox.arrived(message))

    def _count_towards_gate(self, message: MessageId) -> None:
        gates = self._flows[message.sender].gates
        gate = -1 if gates is None else int(gates[message.sequence])
        if gate >= 0:
            self._towards[gate] -= 1
            if not self._towards[gate]:
                self._open_gate(message.run_id, gate)

    async def _touch_cache(self, future: asyncio.Future[T]) -> T:
        self._touching.add(future)
        future.add_done_callback(self._touching.discard)
        return await future

    async def _ask(self, message: MessageId) -> Reply:
        try:
            async with asyncio.timeout(self._timeout) as timer:
                self._timers.add(timer)
                try:
                    reply = await self._network.fetch(message)
                finally:
                    self._timers.discard(timer)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no reply within {self._timeout:g} s") from error
        if not isinstance(reply, dict) or "status" not in reply:
            raise ExchangeError(f"{name_of(message.sender)} does not run dshuffle (its reply was {reply!r})")
        if reply["status"] == "OK":
            # Other requests may wait for packets in this message, so each arrival restarts all timers.
            deadline = asyncio.get_running_loop().time() + self._timeout
            for waiting in self._timers:
                waiting.reschedule(deadline)
        self.meter.transfer_seconds = time.perf_counter() - self._started
        if reply["status"] == "OK" and not self._network.is_local(message.sender):
            self.meter.received_bytes += reply["rows"].nbytes + reply["checksums"].nbytes
        return reply


async def _given(future: asyncio.Future[T]) -> T:
    """Await a future that several tasks share, without cancelling it when one of them is cancelled."""
    return future.result() if future.done() else await asyncio.shield(future)


def _timed(fn: Callable[..., None], *args: Any) -> float:
    """Return the duration of a call in seconds, without the time spent waiting for a thread."""
    started = time.perf_counter()
    fn(*args)
    return time.perf_counter() - started
