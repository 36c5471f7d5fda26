"""The sessions of a worker, and what other processes may ask of them."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from distributed import Worker
from distributed.protocol.serialize import ToPickle, to_serialize
from numpy.typing import NDArray

from dshuffle.emulated_links import check_emulated_rates
from dshuffle.errors import ClusterError, DShuffleError, ExchangeError, PeerFailed, WorkerLost
from dshuffle.exchange.comms import Refusal, RowsReply, may_share, sent, to_fields
from dshuffle.exchange.kept_partition import PREFIX, KeptFolder
from dshuffle.exchange.messages import MessageId
from dshuffle.planning.remainder import SampleDigest
from dshuffle.runtime.collective import Collective
from dshuffle.runtime.messages import Arrays, CommitReply, MemberState, Together, from_fields, message_in, within
from dshuffle.runtime.session_spec import SessionSpec
from dshuffle.runtime.worker.reports import SignsOfLife
from dshuffle.runtime.worker.session import SharedParts, WorkerSession, open_session, rank_on

logger = logging.getLogger(__name__)


class Collectives:
    """The last call of each session."""

    def __init__(self) -> None:
        self._calls: dict[str, Collective] = {}

    def call(self, session_id: str, number: int) -> Collective:
        """State of a call, by its number. Calls that have ended are refused."""
        collective = self._calls.get(session_id)
        if collective is None or collective.number < number:
            self.end(session_id)
            collective = self._calls[session_id] = Collective(number)
        elif collective.number > number:
            raise PeerFailed(f"call {number} of Epoch.together has ended: the ranks are at call {collective.number}")
        return collective

    def end(self, session_id: str) -> None:
        """Fail all ranks that still wait in a session's last call."""
        collective = self._calls.pop(session_id, None)
        if collective is not None:
            collective.fail("the session has moved on to another call of Epoch.together, or was closed")

    def close(self) -> None:
        """Fail all ranks that still wait."""
        for session_id in list(self._calls):
            self.end(session_id)


HAND_OVER_WITHIN = 20.0
"""Seconds for which a worker that closes sends its partitions. Batch systems kill it half a minute after SIGTERM."""

ASK_EVERY = 0.2
"""Seconds between its questions whether it is still needed."""

ANSWER_WITHIN = 3.0
"""Seconds in which the scheduler must answer them. It may be closing as well."""


async def hand_over(worker: Worker) -> None:
    """Wait until nobody reads the partitions of a worker that closes any more."""
    loop = asyncio.get_running_loop()
    end = loop.time() + HAND_OVER_WITHIN
    is_read = True
    while is_read and loop.time() < end:
        try:
            call = within(ANSWER_WITHIN, worker.scheduler.dshuffle_retiring(address=worker.address))
            is_read = message_in(await call, bool, "the scheduler")
        except (OSError, DShuffleError) as error:
            logger.debug("dshuffle: the scheduler does not take this worker's partitions: %s", error)
            return
        if is_read:
            if (heartbeat := worker.periodic_callbacks.get("heartbeat")) is not None:
                heartbeat.stop()  # the scheduler may have removed this worker, and would tell it to close
            await asyncio.sleep(ASK_EVERY)


ALONE = Together()

MOST_CLOSED = 1000
"""Closed sessions that a worker remembers. An order to open one may arrive late."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """A session that is being opened, and the number of the order."""

    number: int
    task: asyncio.Task[None]


class WorkerSessions(Mapping[str, WorkerSession]):
    """The open sessions of a worker, by id, and what other processes may ask of each."""

    def __init__(self, shared: SharedParts) -> None:
        self.shared = shared
        self.collectives = Collectives()
        self._open: dict[str, WorkerSession] = {}
        self._opening: dict[str, _Opening] = {}
        self._freeing: dict[str, asyncio.Task[None]] = {}
        self._ended = False
        self._signs: dict[str, SignsOfLife] = {}
        self._closed: dict[str, int] = {}  # session -> number of the order to close it
        self._causes: dict[str, DShuffleError] = {}  # with which sessions have ended that their clients did not close

    def __getitem__(self, session_id: str) -> WorkerSession:
        return self._open[session_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def ids(self) -> list[str]:
        """Ids of the sessions that are open, being opened or being closed."""
        return list({**self._open, **self._opening, **self._freeing})

    def session(self, session_id: str) -> WorkerSession:
        """An open session."""
        try:
            return self._open[session_id]
        except KeyError:
            raise WorkerLost(f"session {session_id} is not open on this worker") from None

    def cause(self, session_id: str) -> DShuffleError | None:
        """The error with which a session has ended, unless its client has closed it."""
        return self._causes.get(session_id)

    def of_rank(self, session_id: str, rank: int) -> WorkerSession | None:
        """The session whose partition is that of a rank, if this worker has it."""
        session = self._open.get(session_id)
        return session if session is not None and session.rank == rank else None

    async def open(
        self,
        spec: bytes,
        number: int,
        last_run: int = 0,
        *,
        restore: bool = False,
        epoch: int | None = None,
        digest: SampleDigest | None = None,
        together: Together = ALONE,
    ) -> None:
        """Allocate this worker's part of a session. Another call with the same order waits for the first one.

        An order to restore a rank waits for an opening of an earlier order, and every order for the end of a closing.
        """
        check_emulated_rates()
        session_spec = SessionSpec.unpacked(spec)
        session_id, rank = session_spec.session_id, rank_on(self.shared.worker.address, session_spec)
        while (before := self._earlier(session_id, number, restore)) is not None:
            await asyncio.wait([before])
        if self._ended:
            raise WorkerLost(f"worker {self.shared.worker.address} closes")
        if number <= self._closed.get(session_id, -1):
            raise ClusterError(f"session {session_id} was closed on this worker")
        session = self._open.get(session_id)
        if session is not None and (not restore or number <= session.number):  # an order that comes twice, or late
            return
        if session is not None:  # this worker was stopped for so long that it was given up, and gets a rank again
            if session.rank == rank and (session.is_loading if epoch is None else session.epoch == epoch):
                await session.go_on(session_spec.addresses, number, last_run, together)
                return
            await self.close(session_id, number - 1)
            # Other orders may have come meanwhile.
            await self.open(spec, number, last_run, restore=restore, epoch=epoch, digest=digest, together=together)
            return
        opening = self._opening.get(session_id)
        if opening is None:
            # Memory is reserved before anything is awaited, so that two sessions do not count on the same bytes.
            loaded = {name for name, session in self._open.items() if not session.is_loading}
            limit, nbytes = self.shared.reserved.memory(loaded).check(session_spec, rank)
            self.shared.reserved.reserve(session_id, nbytes)
            session_spec = session_spec if limit is None else session_spec.with_memory_limit(limit)
            task = asyncio.create_task(self._open_now(session_spec, number, last_run, epoch, digest, together))
            self._opening[session_id] = opening = _Opening(number, task)
            del task
        try:
            await asyncio.shield(opening.task)
        except asyncio.CancelledError:
            if not opening.task.cancelled():
                raise
            raise ClusterError(f"session {session_id} was closed while it was being opened") from None
        finally:
            del opening  # its error has this frame in its traceback: a cycle that keeps the rows until a collection

    def _earlier(self, session_id: str, number: int, restore: bool) -> asyncio.Future[None] | None:
        """What an order to open has to wait for; None if there is nothing.

        Without ``restore``, all orders come from the same opening of the session on all workers, and have one number.
        """
        opening = self._opening.get(session_id)
        if opening is not None and restore and opening.number < number:
            return opening.task
        return self._freeing.get(session_id)

    async def _open_now(
        self,
        spec: SessionSpec,
        number: int,
        last_run: int,
        epoch: int | None,
        digest: SampleDigest | None,
        together: Together,
    ) -> None:
        session_id = spec.session_id

        def look() -> dict[int, float] | None:
            session = self._open.get(session_id)
            return {} if session is None else session.heard()

        try:
            session, signs = await open_session(self.shared, spec, self.rows, look, epoch, digest, number, together)
            session.number = number
            await session.abort(last_run)
            self._open[session_id], self._signs[session_id] = session, signs
        finally:
            del self._opening[session_id]

    async def close(self, session_id: str, number: int, *, keeps: bool = False, cause: Any = None) -> None:
        """Free this worker's part of a session, and refuse to open it with an order up to this number.

        Tasks that come later raise the ``cause``, if the session has ended with an error. With ``keeps``, the partition
        stays as a source until another order comes.
        """
        cause = cause.data if isinstance(cause, ToPickle) else cause  # it is not sent if this is one process
        if self._has_later(session_id, number):
            return
        while len(self._closed) >= MOST_CLOSED:
            oldest = next(iter(self._closed))
            del self._closed[oldest]
            self._causes.pop(oldest, None)
        self._closed[session_id] = max(number, self._closed.get(session_id, number))
        if cause is not None:
            self._causes[session_id] = cause
        session = self._open.get(session_id)
        if keeps and session is not None and not session.is_loading and cause is not None:
            self.collectives.end(session_id)
            await session.end(cause)
            return
        while (freeing := self._freeing.get(session_id)) is not None:
            await asyncio.wait([freeing])
        if session_id in self.ids and not self._has_later(session_id, number):
            # It goes on if the process that gave the order goes away.
            self._freeing[session_id] = asyncio.create_task(self._free(session_id, cause))
            await asyncio.shield(self._freeing[session_id])

    async def _free(self, session_id: str, cause: DShuffleError | None) -> None:
        try:
            if (opening := self._opening.get(session_id)) is not None:
                opening.task.cancel()
                await asyncio.wait([opening.task])
                self._opening.pop(session_id, None)  # if it had not begun
            session = self._open.pop(session_id, None)
            self.collectives.end(session_id)  # not earlier: ranks may ask for a mean until the session is not open
            if (signs := self._signs.pop(session_id, None)) is not None:
                signs.close()
            if session is not None:
                await session.close(cause)
        finally:
            del self._freeing[session_id]
            self.shared.reserved.release(session_id)
            self.shared.kept.close(session_id)

    async def end(self) -> None:
        """Close all sessions, because the worker closes, and open no other one."""
        self._ended = True
        for session_id in self.ids:
            await self.close(session_id, sys.maxsize)

    def _has_later(self, session_id: str, number: int) -> bool:
        """Whether a later order than this one has opened the session, or is opening it."""
        opened = self._open.get(session_id) or self._opening.get(session_id)
        return opened is not None and opened.number > number

    def status(self, session_id: str) -> MemberState:
        """The state of a session here."""
        session = self._open.get(session_id)
        return MemberState(open=False) if session is None else session.status()

    async def commit(self, session_id: str, run_id: int) -> CommitReply:
        """Let a session swap to the next epoch."""
        reply = await self.session(session_id).commit(run_id)
        self.shared.kept.close(session_id)  # all members have their first partitions
        return reply

    async def list_kept(self, directory: str, dataset: str) -> list[KeptFolder]:
        """The partitions of a dataset that earlier sessions have kept in a folder."""
        return await self.shared.in_thread(KeptFolder.all_in, directory, dataset)

    async def rows(self, session_id: str, epoch: int, sample_ids: NDArray[np.int64]) -> RowsReply:
        """Rows of a partition on this worker; ``session_id`` may name a kept one."""
        if session_id in self.shared.kept:
            return await self.shared.kept.rows(session_id, sample_ids, self.shared.executor)
        if session_id.startswith(PREFIX):
            raise ExchangeError(f"the kept partition {session_id} is gone or damaged")
        return await self.session(session_id).rows_of(epoch, sample_ids)

    async def send_rows(self, session_id: str, epoch: int, sample_ids: NDArray[np.int64]) -> Arrays:
        """Rows of a partition, for another worker."""
        return Arrays(await sent(self.shared.worker, await self.rows(session_id, epoch, sample_ids)))

    async def send_block(
        self, session_id: str, load: str, owner: int, n_owners: int, block: int, numbers: NDArray[Any]
    ) -> Arrays:
        """Rows of a block of the store, for another worker; or note which blocks it will ask for."""
        reader = self.session(session_id).reader
        if block < 0:
            reader.announce(load, owner, n_owners, numbers.tolist())
            return Arrays()
        reply = await reader.rows(load, owner, block, numbers)
        reader.sent_bytes += reply.nbytes if isinstance(reply, RowsReply) else 0
        return Arrays(await sent(self.shared.worker, reply))

    async def mean(self, session_id: str, number: int, *, values: NDArray[Any], **part: Any) -> Arrays:
        """Wait for the mean of the values of all ranks in a call of :meth:`dshuffle.Epoch.together`."""
        self.session(session_id)
        if (cause := self.cause(session_id)) is not None:  # the other ranks do not come any more
            raise cause.raised_by("there is no mean")
        mean = await self.collectives.call(session_id, number).mean(values=values, **part)
        return Arrays(mean=to_serialize(mean))

    def fail_collective(self, session_id: str, number: int, reason: str, transient: bool = True) -> None:
        """Fail the ranks that wait for a mean."""
        self.session(session_id)
        self.collectives.call(session_id, number).fail(reason, transient=transient)


class Acknowledged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that have arrived."""

    session_id: str
    acknowledged: list[MessageId]


class Request(Acknowledged, frozen=True, forbid_unknown_fields=True):
    """A request for a message, with acknowledgements of earlier ones.

    Parameters
    ----------
    host
        Name of the receiver's host, if it can map memory of this one. Otherwise empty.
    """

    message: MessageId
    host: str


def row_handlers(sessions: Callable[[], WorkerSessions]) -> dict[str, Callable[..., Any]]:
    """The handlers by name; ``sessions`` returns the sessions of this worker."""

    def acknowledge_all(of: WorkerSessions, fields: Acknowledged) -> None:
        session = of.get(fields.session_id)
        if session is not None:
            for message in fields.acknowledged:
                session.acknowledge(message)

    async def fetch(**message: Any) -> dict[str, Any]:
        request, opened = from_fields(Request, message, "another worker"), sessions()
        acknowledge_all(opened, request)
        session = opened.get(request.session_id)
        if session is None:
            return to_fields(Refusal("the session is not open on this worker"))
        return await sent(opened.shared.worker, await session.serve(request.message, shared=may_share(request.host)))

    async def acknowledge(**message: Any) -> None:
        acknowledge_all(sessions(), from_fields(Acknowledged, message, "another worker"))

    return {"dshuffle_fetch": fetch, "dshuffle_acknowledge": acknowledge}
