"""Driving the two state machines with asyncio: a :class:`Sender` answers requests, a :class:`Receiver` makes them.

Both carry out the instructions of their state machine and report events back to it. Packing, hashing and unpacking
happen in an executor, so the event loop only moves control and frames. The network is a Protocol: Dask's comms in
`comms.py`, a dictionary in the tests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, ExchangeError
from dshuffle.exchange.buffers import BufferPool
from dshuffle.exchange.inbox import Fetch, Inbox, InboxInstruction, ReportFailed, ReportReady
from dshuffle.exchange.messages import Flow, MessageId
from dshuffle.exchange.outbox import Outbox, OutboxInstruction, Refuse, Send
from dshuffle.planning import name_of
from dshuffle.rows import ByteMatrix

logger = logging.getLogger(__name__)

Checksums = NDArray[np.uint32]
Reply = dict[str, Any]
T = TypeVar("T")


class RowSource(Protocol):
    """Whatever a sender takes the items of its flows from: rows of a cache partition, packets of the server."""

    def pack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Put items ``first`` to ``last - 1`` into buffers. Raises ExchangeError naming a sample that it lacks."""


class RowSink(Protocol):
    """Whatever a receiver puts the items of its flows into."""

    def unpack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Verify items ``first`` to ``last - 1`` and keep them. Raises ChecksumMismatch naming a sample."""

    def read_store(self, first: int, last: int) -> None:
        """Read these items from the store instead."""


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
    sent_checksum_bytes: int = 0
    received_bytes: int = 0
    gather_seconds: float = 0.0
    transfer_seconds: float = 0.0
    scatter_seconds: float = 0.0
    rows: int = 0


class Sender:
    """Answers the requests for what one participant sends.

    Parameters
    ----------
    outbox
        Decides which request to answer when.
    buffers
        What messages are packed into.
    """

    def __init__(self, outbox: Outbox, buffers: BufferPool, network: Network, executor: Executor) -> None:
        self.meter = Meter()
        self._outbox = outbox
        self._buffers = buffers
        self._network = network
        self._executor = executor
        self._flows: Mapping[int, Flow] = {}
        self._source: asyncio.Future[RowSource] | None = None
        self._answers: dict[MessageId, asyncio.Future[OutboxInstruction]] = {}

    def begin(
        self, run_id: int, flows: Mapping[int, Flow], source: asyncio.Future[RowSource], *, window: int | None = None
    ) -> None:
        """Start a run in which these flows (by destination) are owed, of what ``source`` will have."""
        self.meter = Meter()
        self._buffers.forget()
        self._flows, self._source = flows, source
        self._buffers.fit(max((flow.longest for flow in flows.values()), default=0))
        owed = {to: flow.n_messages for to, flow in flows.items()}
        gates = {to: flow.gates.tolist() for to, flow in flows.items() if flow.gates is not None}
        self._perform(self._outbox.begin(run_id, owed, gates=gates, window=window))

    def open_gate(self, run_id: int, gate: int) -> None:
        """What the messages of a gate are made of has come in."""
        self._perform(self._outbox.open_gate(run_id, gate))

    def end(self) -> None:
        """The run is over; what still waits for it is refused."""
        self._perform(self._outbox.end())
        self._flows, self._source = {}, None

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
        flow, future = self._flows.get(message.destination), self._source
        if flow is None or future is None:  # the run ended in this very moment
            return {"status": "refused", "reason": f"run {message.run_id} has ended", "again": False}
        first, last = flow.message(message.sequence)
        try:
            loop = asyncio.get_running_loop()
            source = await _given(future)
            rows, checksums = self._buffers.take(message, last - first)
            seconds = await loop.run_in_executor(self._executor, _timed, source.pack, first, last, rows, checksums)
        except (ExchangeError, DatasetError) as error:
            self.acknowledged(message)
            return {"status": "refused", "reason": f"{type(error).__name__}: {error}", "again": False}
        self.meter.gather_seconds += seconds
        if not self._network.is_local(message.destination):
            self.meter.sent_bytes += rows.nbytes + checksums.nbytes
            self.meter.sent_checksum_bytes += checksums.nbytes
        return {"status": "OK", "rows": rows, "checksums": checksums}

    def _perform(self, instructions: list[OutboxInstruction]) -> None:
        for instruction in instructions:
            answer = self._answers.get(instruction.message)
            if answer is None or answer.done():  # who asked has gone away: free its place in the window
                if isinstance(instruction, Send):
                    self.acknowledged(instruction.message)
                continue
            answer.set_result(instruction)


class Receiver:
    """Fetches what one rank is owed.

    Parameters
    ----------
    store
        The pseudo-sender whose rows are read from the store rather than asked for.
    report
        Called once a run, with ``None`` when everything has arrived and with the reason when it cannot.
    timeout
        Seconds without any message after which the open requests count as failed.
    open_gate
        Called with the run and a gate when everything that counts towards the gate has arrived.
    """

    def __init__(
        self,
        inbox: Inbox,
        network: Network,
        executor: Executor,
        *,
        store: int,
        report: Callable[[int, str | None], None],
        timeout: float,
        open_gate: Callable[[int, int], None],
    ) -> None:
        self.meter = Meter()
        self._inbox = inbox
        self._network = network
        self._executor = executor
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
        """Start a run in which these flows (by sender) are due, and go into what ``sink`` will be."""
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
        """The run is committed."""
        self._inbox.commit(run_id)
        self._flows, self._sink = {}, None

    async def abort(self) -> None:
        """Give the run up; returns when nothing of it can touch the cache partition any more."""
        self._inbox.abort()
        while self._touching:
            await asyncio.wait(self._touching)
        for task in self._tasks:  # what waits for the network may wait long: for a worker that has gone
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
            if message not in self._inbox.outstanding:  # the run was given up meanwhile
                return
            if reply is None:
                await self._touch_cache(sink.read_store, first, last)
            else:
                rows, checksums = reply["rows"], reply["checksums"]
                self.meter.scatter_seconds += await self._touch_cache(_timed, sink.unpack, first, last, rows, checksums)
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

    async def _touch_cache(self, fn: Callable[..., T], *args: Any) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._executor, fn, *args)
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
            raise ExchangeError(f"{name_of(message.sender)} does not know dshuffle (its reply was {reply!r})")
        if reply["status"] == "OK":
            # Others may be waiting for what this message is a part of: they are late only if nothing comes any more.
            deadline = asyncio.get_running_loop().time() + self._timeout
            for waiting in self._timers:
                waiting.reschedule(deadline)
        self.meter.transfer_seconds = time.perf_counter() - self._started
        if reply["status"] == "OK" and not self._network.is_local(message.sender):
            self.meter.received_bytes += reply["rows"].nbytes + reply["checksums"].nbytes
        return reply


async def _given(future: asyncio.Future[T]) -> T:
    """What a future of several tasks gives, one of which may be cancelled."""
    return future.result() if future.done() else await asyncio.shield(future)


def _timed(fn: Callable[..., None], *args: Any) -> float:
    """The seconds that a call takes, without those of waiting for a thread."""
    started = time.perf_counter()
    fn(*args)
    return time.perf_counter() - started
