"""The asyncio code around inbox and outbox: receivers and senders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dshuffle.errors import DatasetError, DShuffleError, ExchangeError
from dshuffle.exchange.comms import Buffer, BufferPool, Later, Refusal, Reply, RowsReply
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.mailboxes import (
    Fetch,
    Inbox,
    InboxInstruction,
    InboxState,
    Outbox,
    OutboxInstruction,
    ReadInstead,
    Refuse,
    ReportFailed,
    ReportReady,
    Send,
    slow_senders,
)
from dshuffle.exchange.messages import Flow, MessageId
from dshuffle.planning import name_of
from dshuffle.rows import ByteMatrix, Checksums

logger = logging.getLogger(__name__)


T = TypeVar("T")


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
        """Load items ``first`` to ``last - 1``, unless ``stop`` returns true."""
        # ``recovers`` if a sender was to deliver them, and cannot.


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
    """Bytes and seconds of one run on one participant."""

    # ``shared_bytes`` is the part of ``sent_bytes`` that receivers mapped. ``links`` has one entry for each sender in
    # another process.

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


LOOK_EVERY = 1.0
"""Seconds between looks for slow senders."""


class Receiver:
    """Fetches the messages that one rank needs."""

    # inbox: state machine that decides which messages to request.
    # jobs: threads that unpack messages.
    # store: sender id of the store. Its rows are read instead of requested.
    # report: called once per run with the run id, ``None`` when everything has arrived or the reason for a failure, and
    # whether another run may succeed.
    # timeout: seconds in which a request must be answered, since bytes last came from its sender (:meth:`hear`).
    # open_gate: called with the run id and a gate when all messages that the gate waits for have arrived.

    def __init__(
        self,
        inbox: Inbox,
        network: Network,
        jobs: JobQueue,
        *,
        store: int,
        report: Callable[[int, str | None, bool], None],
        timeout: float,
        open_gate: Callable[[int, int], None],
    ) -> None:
        self.meter = Meter()
        self._inbox = inbox
        self._network = network
        self._jobs = jobs
        self._store = store
        self._report = report
        self._timeout = timeout
        self._open_gate = open_gate
        self._flows: Mapping[int, Flow] = {}
        self._sink: asyncio.Future[RowSink] | None = None
        self._due_at_gates: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: dict[MessageId, asyncio.Task[None]] = {}
        self._deadlines: dict[MessageId, asyncio.Timeout] = {}
        self._cache_jobs: set[asyncio.Future[Any]] = set()
        self._arrived: set[tuple[int, int]] = set()  # senders and sequence numbers
        self._stop: Callable[[], bool] = lambda: False
        self._owed: Counter[int] = Counter()  # rows by sender, in this run
        self._rows_from: Counter[int] = Counter()
        self._recovered: Counter[str] = Counter()  # why rows of others are loaded, in this run
        self._timer: asyncio.TimerHandle | None = None
        self._started = 0.0

    def begin(
        self,
        run_id: int,
        flows: Mapping[int, Flow],
        sink: asyncio.Future[RowSink],
        *,
        window: int | None = None,
        resumed: bool = False,
        stop: Callable[[], bool] = lambda: False,
        seconds_to_read: Callable[[int], float] | None = None,
    ) -> None:
        """Start a run."""
        self.meter = Meter()
        self._started = time.perf_counter()
        self._flows, self._sink, self._stop = flows, sink, stop
        if not resumed:
            self._arrived.clear()
        self._rows_from = Counter()
        self._recovered = Counter()
        if seconds_to_read is not None:
            loop = asyncio.get_running_loop()
            now = loop.time()
            self._timer = loop.call_later(LOOK_EVERY, self._look_for_slow_senders, run_id, now, seconds_to_read)
        self._due_at_gates = Counter()
        for flow in flows.values():
            if flow.gates is not None:
                self._due_at_gates.update(flow.gates.tolist())
        from_others = {sender: flow for sender, flow in flows.items() if sender not in (self._store, self._inbox.rank)}
        self._owed = Counter({sender: flow.n_items for sender, flow in from_others.items()})
        for sender, sequence in self._arrived:
            first, last = flows[sender].message(sequence)
            self._meter_rows(sender, last - first)
            if sender in from_others:
                self._owed[sender] -= last - first
            self._count_towards_gate(MessageId(run_id, sender, self._inbox.rank, sequence))
        owed = {sender: flow.n_messages for sender, flow in flows.items()}
        self._perform(self._inbox.begin(run_id, owed, window=window, done=self._arrived))

    @property
    def arrived(self) -> float:
        """Fraction of the run's items that have arrived."""
        expected = sum(flow.n_items for sender, flow in self._flows.items() if sender != self._inbox.rank)
        loading = self._sink.result().n_loading if has_result(self._sink) and self._sink is not None else 0
        return min(1.0, (self.meter.rows + loading) / expected) if expected else 1.0

    def has_arrived(self, sender: int) -> bool:
        """Whether messages of a sender have arrived in this run, or in the one that it resumes."""
        return any(arrived == sender for arrived, _ in self._arrived)

    def hear(self, ages: Mapping[int, float]) -> None:
        """Give senders more time from which bytes came some seconds ago: long messages take long on a slow link."""
        now = asyncio.get_running_loop().time()
        for message, limit in self._deadlines.items():
            deadline, until = limit.when(), now + self._timeout - ages.get(message.sender, math.inf)
            if deadline is not None and until > deadline and not limit.expired():  # the last bytes may be older
                limit.reschedule(until)

    def commit(self, run_id: int) -> None:
        """Mark the run as committed."""
        self._inbox.commit(run_id)
        self._stop_looking()
        self._flows, self._sink = {}, None
        self._arrived.clear()

    async def abort(self) -> None:
        """Abort the run; returns when none of its tasks can access the cache partition any more."""
        self._inbox.abort()
        self._stop_looking()
        while touching := [future for future in self._cache_jobs if not future.done()]:
            await asyncio.wait(touching)
        for task in self._tasks:  # a task may wait long for the network, for instance for a worker that has left
            task.cancel()
        self._flows, self._sink = {}, None

    async def close(self) -> None:
        """Abort the run, and forget who is told of it; no run will follow."""
        await self.abort()
        self._report, self._open_gate = lambda *_: None, lambda *_: None

    def _perform(self, instructions: list[InboxInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Fetch(message):
                    self._spawn(message, read=message.sender == self._store)
                case ReadInstead(message):
                    self._spawn(message, read=True)
                case ReportReady(run_id):
                    self._log_recovered()
                    self._report(run_id, None, False)
                case ReportFailed(run_id, reason, again):
                    self._report(run_id, reason, again)

    def _spawn(self, message: MessageId, *, read: bool) -> None:
        if (asking := self._requests.pop(message, None)) is not None:  # what its sender sends must not arrive as well
            asking.cancel()
        task = asyncio.get_running_loop().create_task(self._fetch(message, read=read))
        if not read:
            self._requests[message] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, message: MessageId, *, read: bool) -> None:
        """Fetch a message from its sender, or read its rows from the store."""
        future = self._sink
        assert future is not None
        sink: RowSink | None = None
        first, last = self._flows[message.sender].message(message.sequence)
        try:
            reply = None if read else await self._ask(message)
            if isinstance(reply, Refusal):
                self._failed(message, reply.reason, again=reply.again)
                return
            sink = await shared_result(future)
            if message not in self._inbox.outstanding:  # the run was aborted meanwhile
                return
            if reply is None:
                recovers = message.sender != self._store
                loading = sink.load(first, last, self._stop, recovers=recovers)
                await self._touch_cache(asyncio.ensure_future(loading))
                if recovers:
                    self.meter.recovered_rows += last - first
                    with contextlib.suppress(OSError):
                        await self._network.acknowledge(message)  # its sender may still hold it ready
            else:
                rows = reply.rows
                job = self._jobs.run(timed, sink.unpack, first, last, rows, reply.checksums, nbytes=rows.nbytes)
                self.meter.scatter_seconds += await self._touch_cache(job)
                # A corrupted message is not acknowledged: the next request may overtake the acknowledgement, which
                # would then free the buffer that the message is being packed into again.
                if reply.acknowledge:
                    await self._network.acknowledge(message)
        except (OSError, DShuffleError) as error:
            error.__traceback__ = None  # its frames hold the cache, also once the session is closed
            # Retry after a broken connection or a corrupted message, but not after a corrupt chunk.
            again = error.transient if isinstance(error, DatasetError) else True
            self._failed(message, f"{type(error).__name__}: {error}", again=again)
        except Exception as error:  # the scheduler must be told of any error, or the epoch would hang
            if not self._stop():  # else it failed because the run has ended
                logger.exception("dshuffle: %s failed", message)
            error.__traceback__ = None
            self._failed(message, f"{type(error).__name__}: {error}", again=False)
        else:
            if message in self._inbox.outstanding:
                self._meter_rows(message.sender, last - first)
                self._rows_from[message.sender] += last - first
                self._arrived.add((message.sender, message.sequence))
                self._count_towards_gate(message)
                self._perform(self._inbox.arrived(message))
        finally:
            # This frame may outlive the session: tracebacks keep it, and so does a connection that Dask has abandoned.
            future = sink = None

    def _failed(self, message: MessageId, reason: str, *, again: bool) -> None:
        instructions = self._inbox.failed(message, reason, again=again)
        if ReadInstead(message) in instructions:
            logger.debug("dshuffle: %s cannot be delivered (%s); trying to load its rows", message, reason)
            self._recovered[f"{name_of(message.sender)} cannot deliver ({reason})"] += 1
        self._perform(instructions)

    def _log_recovered(self) -> None:
        """Say once what was not delivered, and why."""
        if self._recovered and self.meter.recovered_rows:
            [(reason, _)] = self._recovered.most_common(1)
            others = f", and {len(self._recovered) - 1} more reasons" if len(self._recovered) > 1 else ""
            words = "dshuffle: %d rows that others were to send came from the store: %s%s"
            logger.warning(words, self.meter.recovered_rows, reason, others)

    def _meter_rows(self, sender: int, n_rows: int) -> None:
        if sender != self._inbox.rank:  # rows that only move to other slots do not count
            self.meter.rows += n_rows

    def _stop_looking(self) -> None:
        """Cancel the timer, which would keep the receiver alive."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_for_slow_senders(self, run_id: int, started: float, seconds_to_read: Callable[[int], float]) -> None:
        """Give up senders whose rows are read faster from the store."""
        if self._inbox.run_id != run_id or self._inbox.state is not InboxState.RECEIVING:
            return
        loop = asyncio.get_running_loop()
        seconds = loop.time() - started
        owed, rows_from = self._owed, self._rows_from
        for sender in slow_senders(owed, rows_from, seconds=seconds, seconds_to_read=seconds_to_read):
            self._recovered[f"{name_of(sender)} is slow"] += 1
            self._perform(self._inbox.give_up(sender, list(self._requests)))
        self._timer = loop.call_later(LOOK_EVERY, self._look_for_slow_senders, run_id, started, seconds_to_read)

    def _count_towards_gate(self, message: MessageId) -> None:
        gates = self._flows[message.sender].gates
        gate = -1 if gates is None else int(gates[message.sequence])
        if gate >= 0:
            self._due_at_gates[gate] -= 1
            if not self._due_at_gates[gate]:
                self._open_gate(message.run_id, gate)

    async def _touch_cache(self, future: asyncio.Future[T]) -> T:
        self._cache_jobs.add(future)
        future.add_done_callback(self._cache_jobs.discard)
        return await future

    async def _ask(self, message: MessageId) -> RowsReply | Refusal:
        """Request a message until its sender has it: a sender that still waits for its rows says so."""
        asked = time.perf_counter()
        try:
            reply = await self._answered(message)
        finally:
            self._requests.pop(message, None)
        answered = time.perf_counter()
        if message.sender != self._inbox.rank:
            self.meter.transfer_seconds = answered - self._started
        if isinstance(reply, RowsReply) and not self._network.is_local(message.sender):
            self.meter.received_bytes += reply.nbytes
            link = self.meter.links.setdefault(message.sender, LinkMeter(asked))
            link.ended, link.nbytes = answered, link.nbytes + reply.nbytes
        return reply

    async def _answered(self, message: MessageId) -> RowsReply | Refusal:
        while True:
            try:
                async with asyncio.timeout(self._timeout) as self._deadlines[message]:
                    reply = await self._network.fetch(message)
            except TimeoutError as error:
                raise TimeoutError(str(error) or f"no reply within {self._timeout:g} s") from error
            finally:
                self._deadlines.pop(message, None)
            if not isinstance(reply, Later):
                return reply


ANSWER_AFTER = 10.0
"""Seconds after which a request that still has to wait is answered with :class:`Later`, so that it is made again. A
receiver that gets no answer at all then knows that the connection or the sender is broken."""

ACKNOWLEDGED_WITHIN = 60.0
"""Seconds after which a message that was not acknowledged gives up its window slot, if others wait for it."""


class Sender:
    """Answers requests for the messages of one participant."""

    # outbox: state machine that decides when to answer which request.
    # buffers: buffers that messages are packed into.

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
        self._sent: set[MessageId] = set()
        self._packed: dict[MessageId, tuple[float, Buffer]] = {}  # until it is acknowledged

    def begin(
        self,
        run_id: int,
        flows: Mapping[int, Flow],
        source: asyncio.Future[RowSource],
        *,
        window: int | None = None,
        to_one: int | None = None,
        acknowledged: bool = True,
    ) -> None:
        """Start a run that sends these flows (by destination), with items from ``source`` once it is ready."""
        # Messages that are not ``acknowledged`` leave the window once they are packed. This saves the acknowledgement.
        # Use it only where all messages fit in memory: nothing but the receivers' requests then limits what they take.
        self.meter = Meter()
        self._acknowledged = acknowledged
        self._sent.clear()
        self._packed.clear()
        self._flows, self._source = flows, source
        self._buffers.begin(max((flow.longest for flow in flows.values()), default=0))
        owed = {to: flow.n_messages for to, flow in flows.items()}
        gates = {to: flow.gates.tolist() for to, flow in flows.items() if flow.gates is not None}
        self._perform(self._outbox.begin(run_id, owed, gates=gates, window=window, to_one=to_one))

    def open_gate(self, run_id: int, gate: int) -> None:
        """Allow the messages that wait for a gate: their packets have arrived."""
        self._perform(self._outbox.open_gate(run_id, gate))

    def end(self) -> None:
        """End the run and refuse the requests that still wait for it."""
        self._packed.clear()
        self._perform(self._outbox.end())
        self._flows, self._source = {}, None

    def close(self) -> None:
        """Refuse all waiting requests, and free the buffers; no run will follow."""
        self.end()
        self._perform(self._outbox.close())
        self._buffers.close()

    def acknowledged(self, message: MessageId) -> None:
        """Free the buffer and the window slot of a message that its receiver has unpacked."""
        self._packed.pop(message, None)
        self._buffers.give_back(message)
        self._perform(self._outbox.acknowledged(message))

    async def serve(self, message: MessageId, *, shared: bool = False) -> Reply:
        """Reply to a request as soon as the state machine allows it."""
        # With ``shared``, the receiver can map memory of this process. The reply to a long message then has the place
        # of its rows.
        earlier = self._answers.get(message)
        if earlier is not None and not earlier.done():  # the receiver timed out and asks again
            earlier.set_result(Refuse(message, "superseded by a newer request"))
        answer: asyncio.Future[OutboxInstruction] = asyncio.get_running_loop().create_future()
        self._answers[message] = answer
        try:
            self._perform(self._outbox.request(message))
            if not answer.done():
                await asyncio.wait([answer], timeout=ANSWER_AFTER)
            if not answer.done():
                self._give_up_acknowledgements()
            if not answer.done():
                self._outbox.withdraw(message)
                return Later()
            instruction = answer.result()
        finally:
            if self._answers.get(message) is answer:
                del self._answers[message]
        if not isinstance(instruction, Send):
            return Refusal(instruction.reason)
        flow, future = self._flows.get(message.destination), self._source
        if flow is None or future is None:  # the run has just ended
            return Refusal(f"run {message.run_id} has ended")
        first, last = flow.message(message.sequence)
        try:
            if not future.done():
                await asyncio.wait([future], timeout=ANSWER_AFTER)
            if not future.done():
                self.acknowledged(message)
                return Later()
            buffer = await self._pack(message, future.result(), first, last, shared=shared)
        except (ExchangeError, DatasetError, OSError) as error:
            error.__traceback__ = None  # its frames hold the cache, also once the session is closed
            self.acknowledged(message)
            # Rows on a disk that fails can still be read from the store.
            again = isinstance(error, OSError) and not isinstance(error, DatasetError)
            return Refusal(f"{type(error).__name__}: {error}", again)
        place = buffer.place if shared else None
        if not self._network.is_local(message.destination):
            nbytes = buffer.rows.nbytes + buffer.checksums.nbytes
            self.meter.sent_bytes += nbytes
            self.meter.sent_checksum_bytes += buffer.checksums.nbytes
            self.meter.shared_bytes += 0 if place is None else nbytes
        if not self._acknowledged:
            self.acknowledged(message)
        return RowsReply(buffer.rows, buffer.checksums, acknowledge=self._acknowledged, place=place)

    async def _pack(self, message: MessageId, source: RowSource, first: int, last: int, *, shared: bool) -> Buffer:
        """Pack a message, unless it was packed for an earlier request."""
        if message in self._sent:
            self._buffers.drop(message)  # the first reply may still be on its way when this one is acknowledged
            if (packed := self._packed.get(message)) is not None:
                return packed[1]
        self._sent.add(message)
        pool, n_rows = self._buffers, last - first
        buffer = pool.take(message, n_rows, shared=shared) if self._acknowledged else pool.single_use(n_rows)
        self.meter.gather_seconds += await self._jobs.run(
            timed, source.pack, first, last, buffer.rows, buffer.checksums, nbytes=buffer.rows.nbytes
        )
        if message in self._outbox.in_flight:
            self._packed[message] = asyncio.get_running_loop().time(), buffer
        return buffer

    def _give_up_acknowledgements(self) -> None:
        """Free the window slots of messages whose acknowledgement seems to be lost, so that others do not wait."""
        late = asyncio.get_running_loop().time() - ACKNOWLEDGED_WITHIN
        for message in [message for message, packed in self._packed.items() if packed[0] < late]:
            del self._packed[message]
            self._buffers.drop(message)
            self._perform(self._outbox.acknowledged(message))

    def _perform(self, instructions: list[OutboxInstruction]) -> None:
        for instruction in instructions:
            answer = self._answers.get(instruction.message)
            if answer is None or answer.done():  # nobody waits for the answer: free the window
                if isinstance(instruction, Send):
                    self.acknowledged(instruction.message)
                continue
            answer.set_result(instruction)
