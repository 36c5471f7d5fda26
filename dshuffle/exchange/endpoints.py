"""The asyncio code around inbox and outbox: receivers, senders, and the threads that work for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from dshuffle.errors import DatasetError, DShuffleError, ExchangeError
from dshuffle.exchange.comms import Buffer, BufferPool, DaskNetwork, Later, Refusal, Reply, RowsReply
from dshuffle.exchange.mailboxes import Answer, Arrived, Fetch, Flow, Inbox, MessageId, Outbox
from dshuffle.exchange.transports import RowSink, RowSource
from dshuffle.planning import STORE, name_of

logger = logging.getLogger(__name__)


T = TypeVar("T")

TOGETHER_NBYTES = 2**20
"""Bytes of the jobs that are handed over to a thread together."""

_Job = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...], int]
"""A future, the call that gives its result, and the bytes that it works on."""


class JobQueue:
    """Jobs of one event loop, in order of arrival, on a few threads.

    Short ones run together: a hand-over to a thread and back takes about 0.1 ms of processor time, as long as packing
    100 KiB.
    """

    # n_threads: number of jobs, or groups of short jobs, that run at a time.
    # name: prefix of the names of the threads.

    def __init__(self, n_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
        self._n_threads = self._idle = n_threads
        self._ended = asyncio.Event()
        self._waiting: deque[_Job] = deque()
        self._closed = False

    def run(self, call: Callable[..., Any], *args: Any, nbytes: int = TOGETHER_NBYTES) -> asyncio.Future[Any]:
        """Call a function in a thread."""
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((future, call, args, nbytes))
        if self._closed:
            self._fail_all()
        elif self._idle:
            self._loop.call_soon(self._start)  # so that jobs that arrive in the same turn of the loop are together
        return future

    async def close(self) -> None:
        """Fail the jobs that have not started, and later ones. Return when the running jobs have ended."""
        self._closed = True
        self._fail_all()
        while self._idle < self._n_threads:
            self._ended.clear()
            await self._ended.wait()
        self._executor.shutdown(wait=False)

    def _fail_all(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()[0]
            if not future.done():
                future.set_exception(ExchangeError("the session was closed"))
                future.exception()  # nobody may be waiting for it

    def _start(self) -> None:
        while self._waiting and self._idle:
            group = [self._waiting.popleft()]
            nbytes = group[0][-1]
            while self._waiting and nbytes + self._waiting[0][-1] <= TOGETHER_NBYTES:
                group.append(self._waiting.popleft())
                nbytes += group[-1][-1]
            self._idle -= 1
            self._executor.submit(self._work, group)

    def _work(self, group: list[_Job]) -> None:
        results: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        for future, call, args, _ in group:
            try:
                results.append((future, None if future.cancelled() else call(*args), None))
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # their locals hold rows
                results.append((future, None, error))
        with contextlib.suppress(RuntimeError):  # the loop has been closed, so nobody waits
            self._loop.call_soon_threadsafe(self._finish, results)
        # An error holds this frame and the executor's. They must not hold the jobs, whose futures hold the error.
        group.clear()
        del results, future, call, args

    def _finish(self, results: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
        self._idle += 1
        self._ended.set()
        for future, result, error in results:
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._start()


@dataclass(slots=True)
class Meter:
    """Bytes and seconds of one run on one participant."""

    sent_bytes: int = 0
    sent_checksum_bytes: int = 0
    shared_bytes: int = 0  # part of sent_bytes that receivers mapped
    received_bytes: int = 0
    gather_seconds: float = 0.0
    transfer_seconds: float = 0.0
    scatter_seconds: float = 0.0
    rows: int = 0
    recovered_rows: int = 0


def has_result(future: asyncio.Future[Any] | None) -> bool:
    """Whether a future has ended without an error."""
    return future is not None and future.done() and not future.cancelled() and future.exception() is None


def timed(fn: Callable[..., None], *args: Any) -> float:
    """Return the duration of a call in seconds, without the time spent waiting for a thread."""
    started = time.perf_counter()
    fn(*args)
    return time.perf_counter() - started


class Receiver:
    """Fetches the messages that one rank needs."""

    # inbox: state machine that decides which messages to request.
    # jobs: threads that unpack messages.
    # timeout: seconds in which a request must be answered.
    # open_gate: called with the run id and a gate when all messages that the gate waits for have arrived.

    def __init__(
        self,
        inbox: Inbox,
        network: DaskNetwork,
        jobs: JobQueue,
        *,
        timeout: float,
        open_gate: Callable[[int, int], None],
    ) -> None:
        self.meter = Meter()
        self._inbox, self._network, self._jobs = inbox, network, jobs
        self._timeout, self._open_gate = timeout, open_gate
        self._report: Callable[[str | None, bool], None] = lambda *_: None
        self._flows: Mapping[int, Flow] = {}
        self._sink: asyncio.Future[RowSink] | None = None
        self._due_at_gates: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cache_jobs: set[asyncio.Future[Any]] = set()
        self._arrived: set[tuple[int, int]] = set()  # senders and sequence numbers
        self._stop: Callable[[], bool] = lambda: False
        self._cause = ""  # why rows of others are loaded in this run
        self._started = 0.0

    def begin(
        self,
        run_id: int,
        flows: Mapping[int, Flow],
        sink: asyncio.Future[RowSink],
        report: Callable[[str | None, bool], None],
        *,
        window: int | None = None,
        resumed: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start a run, of which ``report`` is told ``None`` when everything has arrived, or why it fails.

        It is also told whether another run may succeed.
        """
        self.meter, self._cause, self._report = Meter(), "", report
        self._started = time.perf_counter()
        self._flows, self._sink, self._stop = flows, sink, stop
        if not resumed:
            self._arrived.clear()
        self._due_at_gates = Counter()
        for flow in flows.values():
            if flow.gates is not None:
                self._due_at_gates.update(flow.gates.tolist())
        for sender, sequence in self._arrived:
            self._count(MessageId(run_id, sender, self._inbox.rank, sequence))
        owed = {sender: flow.n_messages for sender, flow in flows.items()}
        self._perform(self._inbox.begin(run_id, owed, window=window, done=self._arrived))

    @property
    def arrived(self) -> float:
        """Fraction of the run's items that have arrived."""
        expected = sum(flow.n_items for sender, flow in self._flows.items() if sender != self._inbox.rank)
        loading = self._sink.result().n_loading if self._sink is not None and has_result(self._sink) else 0
        return min(1.0, (self.meter.rows + loading) / expected) if expected else 1.0

    def has_arrived(self, sender: int) -> bool:
        """Whether messages of a sender have arrived in this run, or in the one that it resumes."""
        return any(arrived == sender for arrived, _ in self._arrived)

    def commit(self) -> None:
        """End the run, of which everything has arrived, and let go of it: training may take long."""
        self._flows, self._sink = {}, None
        self._report, self._stop = lambda *_: None, lambda: False
        self._arrived.clear()

    async def abort(self) -> None:
        """Abort the run; returns when none of its tasks can access the cache partition any more."""
        self._inbox.abort()
        while touching := [future for future in self._cache_jobs if not future.done()]:
            await asyncio.wait(touching)
        for task in self._tasks:  # a task may wait long for the network, for instance for a worker that has left
            task.cancel()
        self._flows, self._sink = {}, None

    async def close(self) -> None:
        """Abort the run, and forget who is told of it; no run will follow."""
        await self.abort()
        self._report, self._open_gate = lambda *_: None, lambda *_: None

    def _perform(self, instructions: list[Fetch | Arrived]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Fetch):
                message = instruction.message
                read = instruction.instead or message.sender == STORE
                task = asyncio.get_running_loop().create_task(self._fetch(message, read=read))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                continue
            if instruction.reason is None and self.meter.recovered_rows:
                words = "dshuffle: %d rows that others were to send came from the store: %s"
                logger.warning(words, self.meter.recovered_rows, self._cause)
            self._report(instruction.reason, instruction.again)

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
            sink = await asyncio.shield(future)  # other messages need it, too
            if message not in self._inbox.outstanding:  # the run was aborted meanwhile
                return
            if reply is None:
                recovers = message.sender != STORE
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
        except Exception as error:  # the scheduler must be told of any error, or the epoch would hang
            # Retry after a broken connection or a corrupted message, but not after a corrupt chunk.
            again = error.transient if isinstance(error, DatasetError) else isinstance(error, (OSError, DShuffleError))
            if not isinstance(error, (OSError, DShuffleError)) and not self._stop():  # else the run has ended
                logger.exception("dshuffle: %s failed", message)
            error.__traceback__ = None  # its frames hold the cache, also once the session is closed
            self._failed(message, f"{type(error).__name__}: {error}", again=again)
        else:
            if message in self._inbox.outstanding:
                self._arrived.add((message.sender, message.sequence))
                self._count(message)
                self._perform(self._inbox.arrived(message))
        finally:
            # This frame may outlive the session: tracebacks keep it, and so does a connection that Dask has abandoned.
            future = sink = None

    def _failed(self, message: MessageId, reason: str, *, again: bool) -> None:
        instructions = self._inbox.failed(message, reason, again=again)
        if Fetch(message, instead=True) in instructions:
            self._cause = self._cause or f"{name_of(message.sender)} cannot deliver ({reason})"
        self._perform(instructions)

    def _count(self, message: MessageId) -> None:
        """Count a message that has arrived, also towards its gate."""
        flow = self._flows[message.sender]
        first, last = flow.message(message.sequence)
        if message.sender != self._inbox.rank:  # rows that only move to other slots do not count
            self.meter.rows += last - first
        gate = -1 if flow.gates is None else int(flow.gates[message.sequence])
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
        reply: Reply = Later()
        while isinstance(reply, Later):
            try:
                async with asyncio.timeout(self._timeout):
                    reply = await self._network.fetch(message)
            except TimeoutError as error:
                raise TimeoutError(str(error) or f"no reply within {self._timeout:g} s") from error
        answered = time.perf_counter()
        if message.sender != self._inbox.rank:
            self.meter.transfer_seconds = answered - self._started
        if isinstance(reply, RowsReply) and not self._network.is_local(message.sender):
            self.meter.received_bytes += reply.nbytes
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

    def __init__(self, outbox: Outbox, buffers: BufferPool, network: DaskNetwork, jobs: JobQueue) -> None:
        self.meter = Meter()
        self._outbox, self._buffers, self._network, self._jobs = outbox, buffers, network, jobs
        self._acknowledged = True
        self._flows: Mapping[int, Flow] = {}
        self._source: asyncio.Future[RowSource] | None = None
        self._answers: dict[MessageId, asyncio.Future[Answer]] = {}
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
        self._packed.clear()
        self._flows, self._source = flows, source
        self._buffers.begin(max((flow.longest for flow in flows.values()), default=0))
        owed = {to: flow.n_messages for to, flow in flows.items()}
        gates = {to: flow.gates.tolist() for to, flow in flows.items() if flow.gates is not None}
        self._perform(self._outbox.begin(run_id, owed, gates=gates, window=window, to_one=to_one))

    def open_gate(self, run_id: int, gate: int) -> None:
        """Allow the messages that wait for a gate: their packets have arrived."""
        self._perform(self._outbox.open_gate(run_id, gate))

    def end(self, *, closes: bool = False) -> None:
        """End the run and refuse the requests that still wait for it; if no run follows, free the buffers as well."""
        self._packed.clear()
        self._perform(self._outbox.end(closes=closes))
        self._flows, self._source = {}, None
        if closes:
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
            earlier.set_result(Answer(message, "superseded by a newer request"))
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[message] = answer
        try:
            self._perform(self._outbox.request(message))
            if not await _done_in_time(answer):
                self._give_up_acknowledgements()
            if not answer.done():
                self._outbox.withdraw(message)
                return Later()
            refusal = answer.result().refusal
        finally:
            if self._answers.get(message) is answer:
                del self._answers[message]
        if refusal is not None:
            return Refusal(refusal)
        flow, future = self._flows.get(message.destination), self._source
        if flow is None or future is None:  # the run has just ended
            return Refusal(f"run {message.run_id} has ended")
        try:
            if not await _done_in_time(future):
                self.acknowledged(message)
                return Later()
            buffer = await self._pack(message, future.result(), *flow.message(message.sequence), shared=shared)
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
        if (packed := self._packed.get(message)) is not None:
            self._buffers.drop(message)  # the first reply may still be on its way when this one is acknowledged
            return packed[1]
        pool, n_rows = self._buffers, last - first
        buffer = pool.take(message, n_rows, shared=shared) if self._acknowledged else pool.single_use(n_rows)
        self.meter.gather_seconds += await self._jobs.run(
            timed, source, first, last, buffer.rows, buffer.checksums, nbytes=buffer.rows.nbytes
        )
        if message in self._outbox.in_flight:
            self._packed[message] = asyncio.get_running_loop().time(), buffer
        return buffer

    def _give_up_acknowledgements(self) -> None:
        """Free the window slots of messages whose acknowledgement seems to be lost, so that others do not wait."""
        late = asyncio.get_running_loop().time() - ACKNOWLEDGED_WITHIN
        for message in [message for message, packed in self._packed.items() if packed[0] < late]:
            self._buffers.drop(message)
            self.acknowledged(message)

    def _perform(self, answers: list[Answer]) -> None:
        for answer in answers:
            waiting = self._answers.get(answer.message)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
            elif answer.refusal is None:  # nobody waits for the answer: free the window
                self.acknowledged(answer.message)


async def _done_in_time(future: asyncio.Future[Any]) -> bool:
    """Wait until a future has ended, as long as an answer may take."""
    if not future.done():
        await asyncio.wait([future], timeout=ANSWER_AFTER)
    return future.done()
