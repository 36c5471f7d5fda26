"""The sending end of an exchange: answers requests as its state machine, the outbox, allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from dshuffle.errors import DatasetError, ExchangeError
from dshuffle.exchange.buffers import Buffer, BufferPool
from dshuffle.exchange.endpoints import Meter, Network, RowSource, nothing_to_mend, timed
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.messages import Flow, MessageId
from dshuffle.exchange.outbox import Outbox, OutboxInstruction, Refuse, Send
from dshuffle.exchange.replies import Later, Refusal, Reply, RowsReply

ANSWER_AFTER = 10.0
"""Seconds after which a request that still has to wait is answered with :class:`Later`, so that it is made again. A
receiver that gets no answer at all then knows that the connection or the sender is broken."""

ACKNOWLEDGED_WITHIN = 60.0
"""Seconds after which a message that was not acknowledged gives up its window slot, if others wait for it."""


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
        self._mend: Callable[[], int] = nothing_to_mend
        self._reuses = True
        self._refused: tuple[int, str] | None = None
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
        mend: Callable[[], int] = nothing_to_mend,
        reuses: bool = True,
    ) -> None:
        """Start a run that sends these flows (by destination), with items from ``source`` once it is ready.

        Messages that are not ``acknowledged`` leave the window once they are packed. This saves the acknowledgement.
        Use it only where all messages fit in memory: nothing but the receivers' requests then limits what they take.
        ``mend`` is called before a message is sent again, because the rows held here may be corrupted. It returns the
        number of corrupted rows. A sender that ``reuses`` buffers packs other messages into them once a message has
        been acknowledged, so receivers must not keep what they are given.
        """
        self.meter = Meter()
        self._reuses, self._refused = reuses, None
        self._acknowledged, self._mend = acknowledged, mend
        self._sent.clear()
        self._packed.clear()
        self._flows, self._source = flows, source
        self._buffers.begin(max((flow.longest for flow in flows.values()), default=0))
        owed = {to: flow.n_messages for to, flow in flows.items()}
        gates = {to: flow.gates.tolist() for to, flow in flows.items() if flow.gates is not None}
        self._perform(self._outbox.begin(run_id, owed, gates=gates, window=window, to_one=to_one))

    def refuse(self, run_id: int, reason: str) -> None:
        """Start a run in which this sender cannot send anything. Receivers read the rows from the store instead."""
        self._refused = run_id, reason
        self._perform(self._outbox.begin(run_id, {}))

    def open_gate(self, run_id: int, gate: int) -> None:
        """Allow the messages that wait for a gate: their packets have arrived."""
        self._perform(self._outbox.open_gate(run_id, gate))

    def end(self) -> None:
        """End the run and refuse the requests that still wait for it."""
        self._packed.clear()
        self._perform(self._outbox.end())
        self._flows, self._source, self._mend = {}, None, nothing_to_mend

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
        """Reply to a request as soon as the state machine allows it.

        With ``shared``, the receiver can map memory of this process. The reply to a long message then has the place of
        its rows.
        """
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
        if self._refused is not None and self._refused[0] == message.run_id:
            return Refusal(self._refused[1], again=True)
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
            packed, n_mended = self._packed.get(message), await self._jobs.run(self._mend)
            if not self._outbox.is_open(message.run_id):
                raise ExchangeError(f"run {message.run_id} has ended")
            if packed is not None and not n_mended:
                return packed[1]
        self._sent.add(message)
        pool, n_rows = self._buffers, last - first
        pooled = self._acknowledged and self._reuses
        buffer = pool.take(message, n_rows, shared=shared) if pooled else pool.single_use(n_rows)
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
