"""The worker plugin: owns this worker's sessions and answers the scheduler and the other workers.

Two tables have what other processes may ask for, by name. The handlers look up the plugin: Dask caches handlers
permanently, so a handler must not keep a plugin and its rows alive. The last step of the set-up is a hello to the
scheduler, which uses this worker only then.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.serialize import ToPickle, to_serialize
from numpy.typing import NDArray

from dshuffle.emulated_links import check_emulated_rates
from dshuffle.errors import ClusterError, DShuffleError, ExchangeError, PeerFailed, WorkerLost
from dshuffle.exchange.comms import sent
from dshuffle.exchange.kept_partition import PREFIX, Listed
from dshuffle.exchange.messages import MessageId
from dshuffle.exchange.replies import Refusal, RowsReply, to_fields
from dshuffle.exchange.shared_memory import may_share
from dshuffle.exchange.warmup import load_exchange_kernels, load_session_kernels
from dshuffle.planning import SERVER
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.process_exit import end_without_last_collections
from dshuffle.runtime.collective import Collective
from dshuffle.runtime.dataset_inputs import with_data
from dshuffle.runtime.memory import WorkerMemory
from dshuffle.runtime.message_fields import from_fields
from dshuffle.runtime.messages import CommitReply, MemberState
from dshuffle.runtime.replies import Arrays, message_in, replying, within
from dshuffle.runtime.session_spec import PLUGIN, PROTOCOL, SessionSpec, adopted_id, is_adopted_by
from dshuffle.runtime.worker import metrics
from dshuffle.runtime.worker.disk import KeptPartitions, PartitionOnDisk, kept_here
from dshuffle.runtime.worker.made_in_thread import made_in_thread
from dshuffle.runtime.worker.session import WorkerSession
from dshuffle.runtime.worker.signs_of_life import SignsOfLife
from dshuffle.runtime.worker.task_log import leave_out_consequences
from dshuffle.store import Dataset

T = TypeVar("T")

logger = logging.getLogger(__name__)

HAND_OVER_WITHIN = 20.0
"""Seconds for which a worker that closes sends its partitions. Batch systems kill it half a minute after SIGTERM."""

ASK_EVERY = 0.2
"""Seconds between its questions whether it is still needed."""

ANSWER_WITHIN = 3.0
"""Seconds in which the scheduler must answer them. It may be closing as well."""

MOST_CLOSED = 1000
"""Closed sessions that a worker remembers. An order to open one may arrive late."""


class DShuffleWorker(WorkerPlugin):
    """Worker plugin. The scheduler plugin installs it on all current and future workers."""

    name = PLUGIN
    idempotent = True

    def __init__(self) -> None:
        self.sessions: dict[str, WorkerSession] = {}
        self.collectives: dict[str, Collective] = {}
        self.kept = KeptPartitions()
        self.torn_down = False
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._signs: dict[str, SignsOfLife] = {}
        self._reserved: dict[str, int] = {}  # session -> bytes of its partition
        self._closed: dict[str, int] = {}  # session -> number of the order to close it
        self._causes: dict[str, DShuffleError] = {}  # with which sessions have ended that their clients did not close
        self._executor: ThreadPoolExecutor | None = None
        self._worker: Worker | None = None

    async def setup(self, worker: Worker) -> None:
        """Register the handlers, load the kernels, then send a hello to the scheduler."""
        self._worker = worker
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="dshuffle-plugin")
        leave_out_consequences()
        if worker.nanny:  # it has a process of its own
            end_without_last_collections()
        is_set_up = False

        async def protocol() -> dict[str, Any] | None:
            found = isinstance(worker.plugins.get(PLUGIN), DShuffleWorker)
            return {"protocol": PROTOCOL, "is_set_up": is_set_up} if found else None

        # Registered first, because Dask logs a traceback when a worker is asked for something that it does not know.
        worker.handlers["dshuffle_protocol"] = protocol

        plugin = functools.partial(_plugin_of, worker, weakref.ref(self))
        for name in (*OPERATIONS, *OF_SESSION):
            worker.handlers[f"dshuffle_{name}"] = replying(name, functools.partial(_carry_out, plugin, name))
        worker.handlers |= _row_handlers(plugin)
        # Off the event loop, and before the first rows arrive.
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, load_exchange_kernels)
        except BaseException:
            if worker.handlers.get("dshuffle_protocol") is protocol:
                del worker.handlers["dshuffle_protocol"]
            raise
        # From here on the scheduler can use this worker. The hello makes it check at once instead of waiting.
        is_set_up = True
        try:
            message_in(await worker.scheduler.dshuffle_hello(), type(None), "the scheduler")
        except OSError as error:  # the scheduler asks again; a worker must not fail to start because of it
            logger.warning("dshuffle: the hello did not reach the scheduler: %s", error)

    async def teardown(self, worker: Worker) -> None:
        """Let other workers read the partitions here, then close all sessions."""
        worker.handlers.pop("dshuffle_protocol", None)
        for session_id in list(self.collectives):
            self.end_collective(session_id)
        await self._hand_over(worker)
        self.torn_down = True
        for session_id in [*self.sessions, *self._opening]:
            await self.close(session_id, sys.maxsize)
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def open(
        self,
        spec: SessionSpec,
        number: int,
        last_run: int = 0,
        *,
        restore: bool = False,
        epoch: int | None = None,
        drawn: object = None,
    ) -> None:
        """Allocate this worker's part of a session. Another call waits for the first one.

        Parameters
        ----------
        spec
            The session.
        number
            Number of the order. Orders that were given before the session was closed here are refused.
        last_run
            Number of the last run that has begun elsewhere. This worker takes part in later ones only.
        restore
            Whether this worker takes a lost rank.
        epoch
            With ``restore``, the epoch whose partition is read; ``None`` if the first epoch has not begun.
        drawn
            The digest of the samples of the rank in this epoch, as a message has it; ``None`` if it is not known.

        Raises
        ------
        ClusterError
            If the session was closed.
        InvalidParameter
            If a rate in the configuration of this process is wrong.
        CacheBudgetError
            If the partition does not fit.
        DatasetError, ExchangeError
            If the dataset differs from the client's, or cannot be read.
        """
        check_emulated_rates()
        session_id = spec.session_id
        if number <= self._closed.get(session_id, -1):
            raise ClusterError(f"session {session_id} was closed on this worker")
        there = self.sessions.get(session_id)
        if there is not None and (not restore or number <= there.number):  # an order that comes twice, or late
            return
        if there is not None:  # this worker was stopped for so long that it was given up, and gets a rank again
            if there.rank == self._rank(spec) and (there.is_loading if epoch is None else there.epoch == epoch):
                await there.go_on(spec.addresses, number, last_run)
                return
            await self.close(session_id, number - 1)
        opening = self._opening.get(session_id)
        if opening is None:
            # Memory is reserved before anything is awaited, so that two sessions do not count on the same bytes.
            spec = self._reserve(spec)
            digest = None if drawn is None else from_fields(SampleDigest, drawn, "the scheduler")
            opening = self._opening[session_id] = asyncio.create_task(self._open(spec, number, last_run, epoch, digest))
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            if not opening.cancelled():
                raise
            raise ClusterError(f"session {session_id} was closed while it was being opened") from None

    async def close(self, session_id: str, number: int, cause: Any = None) -> None:
        """Free this worker's part of a session, and refuse to open it with an order up to this number.

        Tasks that come later raise the ``cause``, if the session has ended with an error.
        """
        cause = cause.data if isinstance(cause, ToPickle) else cause  # it is not sent if this is one process
        if session_id in self.sessions and self.sessions[session_id].number > number:  # an order that comes late
            return
        while len(self._closed) >= MOST_CLOSED:
            oldest = next(iter(self._closed))
            del self._closed[oldest]
            self._causes.pop(oldest, None)
        self._closed[session_id] = number
        if cause is not None:
            self._causes[session_id] = cause
        self.end_collective(session_id)
        for one in [*self.sessions, *self._opening]:
            if is_adopted_by(session_id, one):
                await self.close(one, number, cause)
        opening = self._opening.pop(session_id, None)
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
        session = self.sessions.pop(session_id, None)
        if (signs := self._signs.pop(session_id, None)) is not None:
            signs.close()
        try:
            if session is not None:
                await session.close(cause)
        finally:
            self._release(session_id)
            self.kept.close(session_id)

    async def _hand_over(self, worker: Worker) -> None:
        """While this worker closes, wait until nobody reads its partitions any more."""
        loop = asyncio.get_running_loop()
        end = loop.time() + HAND_OVER_WITHIN
        holds = any(session.rank is not None and not session.is_loading for session in self.sessions.values())
        while holds and loop.time() < end:
            try:
                asked = within(ANSWER_WITHIN, worker.scheduler.dshuffle_retiring(address=worker.address))
                holds = message_in(await asked, bool, "the scheduler")
            except (OSError, DShuffleError) as error:
                logger.debug("dshuffle: the scheduler does not take this worker's partitions: %s", error)
                return
            if holds:
                if (heartbeat := worker.periodic_callbacks.get("heartbeat")) is not None:
                    heartbeat.stop()  # the scheduler may have removed this worker, and would tell it to close
                await asyncio.sleep(ASK_EVERY)

    def _reserve(self, spec: SessionSpec) -> SessionSpec:
        """Reserve the memory of this worker's partition.

        Raises
        ------
        CacheBudgetError
            If it does not fit beside the other sessions, or Dask would pause this worker.
        """
        assert self._worker is not None
        manager = self._worker.memory_manager
        loading = sum(
            nbytes
            for session_id, nbytes in self._reserved.items()
            if session_id not in self.sessions or self.sessions[session_id].is_loading
        )
        room = WorkerMemory(
            limit=manager.memory_limit,
            pause_fraction=manager.memory_pause_fraction or None,
            process_nbytes=self._worker.monitor.get_process_memory() + loading,
            reserved=dict(self._reserved),
        )
        spec, nbytes = room.reserve(spec, trains=self._rank(spec) is not None)
        self._release(spec.session_id)  # of an opening that was cancelled
        self._reserved[spec.session_id] = nbytes
        metrics.reserved(spec.session_id, nbytes)
        return spec

    def _release(self, session_id: str) -> None:
        if (nbytes := self._reserved.pop(session_id, None)) is not None:
            metrics.released(session_id, nbytes)

    def _rank(self, spec: SessionSpec) -> int | None:
        assert self._worker is not None
        address = self._worker.address
        return next((who for who, where in spec.addresses.items() if where == address and who != SERVER), None)

    async def _open(
        self, spec: SessionSpec, number: int, last_run: int, epoch: int | None, drawn: SampleDigest | None
    ) -> None:
        assert self._worker is not None
        assert self._executor is not None
        threads, rank, session_id = self._executor, self._rank(spec), spec.session_id
        disk: PartitionOnDisk | None = None
        try:
            async with contextlib.AsyncExitStack() as on_error:
                on_error.callback(self._release, session_id)
                on_error.callback(self.kept.close, session_id)
                participant = SERVER if rank is None else rank
                signs = SignsOfLife(self._worker, spec, participant, lambda: self._heard(session_id))
                on_error.callback(signs.close)
                dataset = await made_in_thread(threads, spec.dataset.open, close=Dataset.close)
                on_error.callback(dataset.close)
                spec = spec.with_shuffle(await self._in_thread(with_data, spec.shuffle, dataset))
                await self._in_thread(load_session_kernels, spec.shuffle, dataset.layout.nbytes)
                if rank is not None and epoch is not None:
                    spec = await self._in_thread(kept_here, self._worker, spec, rank, epoch)
                if rank is not None and spec.options.on_disk:
                    worker, close = self._worker, PartitionOnDisk.close
                    disk = await made_in_thread(threads, PartitionOnDisk, worker, spec, rank, close=close)
                    on_error.callback(disk.close)
                # Not earlier: what is open is not removed if there is no room on the disk for both.
                await self.kept.open(self._worker, spec, threads)
                session = WorkerSession(self._worker, spec, dataset, rank, disk, self.rows)
                on_error.push_async_callback(session.close)
                session.number = number
                if epoch is not None:
                    await session.restore(epoch, drawn)
                    self.kept.close(session_id)
                await session.abort(last_run)
                self.sessions[session_id], self._signs[session_id] = session, signs
                on_error.pop_all()
        finally:
            self._opening.pop(session_id, None)

    def _heard(self, session_id: str) -> dict[int, float] | None:
        """From whom bytes came in a session; None if the scheduler does not wait for this worker."""
        session = self.sessions.get(session_id)
        return {} if session is None else session.heard()

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

    def session(self, session_id: str) -> WorkerSession:
        """An open session."""
        try:
            return self.sessions[session_id]
        except KeyError:
            raise WorkerLost(f"session {session_id} is not open on this worker") from None

    def cause(self, session_id: str) -> DShuffleError | None:
        """The error with which a session has ended, unless its client has closed it."""
        return self._causes.get(session_id)

    def session_of_rank(self, session_id: str, rank: int) -> WorkerSession | None:
        """The session whose partition is that of a rank, if this worker has it or has adopted it."""
        for one in (session_id, adopted_id(session_id, rank)):
            if one in self.sessions and self.sessions[one].rank == rank:
                return self.sessions[one]
        return None

    async def rows(self, session_id: str, epoch: int, sample_ids: NDArray[np.int64]) -> RowsReply:
        """Rows of a partition on this worker; ``session_id`` may name a kept one."""
        if session_id in self.kept:
            return await self.kept.rows(session_id, sample_ids, self._executor)
        if session_id.startswith(PREFIX):
            raise ExchangeError(f"the kept partition {session_id} is gone or damaged")
        return await self.session(session_id).rows_of(epoch, sample_ids)

    def status(self, session_id: str) -> MemberState:
        """The state of a session here."""
        session = self.sessions.get(session_id)
        return MemberState(open=False) if session is None else session.status()

    async def commit(self, session_id: str, run_id: int) -> CommitReply:
        """Let a session swap to the next epoch."""
        reply = await self.session(session_id).commit(run_id)
        self.kept.close(session_id)  # all members have their first partitions
        return reply

    async def list_kept(self, directory: str, dataset: str) -> list[dict[str, Any]]:
        """The partitions of a dataset that earlier sessions have kept in a folder."""
        return [partition.to_dict() for partition in await self._in_thread(Listed.all_in, directory, dataset)]

    async def send_rows(self, session_id: str, epoch: int, sample_ids: NDArray[np.int64]) -> Arrays:
        """Rows of a partition, for another worker."""
        assert self._worker is not None
        return Arrays(await sent(self._worker, await self.rows(session_id, epoch, sample_ids)))

    async def mean(self, session_id: str, number: int, **message: Any) -> Arrays:
        """Wait for the mean of the values of all ranks."""
        return Arrays(mean=to_serialize(await self.collective(session_id, number).mean(**message)))

    def fail_collective(self, session_id: str, number: int, reason: str, transient: bool = True) -> None:
        """Fail the ranks that wait for a mean."""
        self.collective(session_id, number).fail(reason, transient=transient)

    def collective(self, session_id: str, number: int) -> Collective:
        """State of a call of :meth:`dshuffle.Epoch.together`, by its number. Calls that have ended are refused."""
        self.session(session_id)
        collective = self.collectives.get(session_id)
        if collective is None or collective.number < number:
            self.end_collective(session_id)
            collective = self.collectives[session_id] = Collective(number)
        elif collective.number > number:
            raise PeerFailed(f"call {number} of Epoch.together has ended: the ranks are at call {collective.number}")
        return collective

    def end_collective(self, session_id: str) -> None:
        """Fail all ranks that still wait in a session's last call of :meth:`dshuffle.Epoch.together`."""
        collective = self.collectives.pop(session_id, None)
        if collective is not None:
            collective.fail("the session has moved on to another call of Epoch.together, or was closed")


OPERATIONS: dict[str, Callable[..., Any]] = {
    "open": DShuffleWorker.open,
    "status": DShuffleWorker.status,
    "commit": DShuffleWorker.commit,
    "close": DShuffleWorker.close,
    "mean": DShuffleWorker.mean,
    "end_collective": DShuffleWorker.fail_collective,
    "kept": DShuffleWorker.list_kept,
    "rows": DShuffleWorker.send_rows,
}
"""What the scheduler and other workers may ask of the plugin, by name."""

OF_SESSION: dict[str, Callable[..., Any]] = {
    "members": WorkerSession.change_members,
    "begin": WorkerSession.begin,
    "plan_ahead": WorkerSession.plan_ahead,
    "abort": WorkerSession.abort,
    "training": WorkerSession.take_training_seconds,
    "trained": WorkerSession.trained,
}
"""What the scheduler may ask of an open session, by name."""


def _plugin_of(worker: Worker, installed: weakref.ref[DShuffleWorker]) -> DShuffleWorker:
    """The plugin of a worker. Dask has removed it while a worker that closes sends rows."""
    plugin = worker.plugins.get(PLUGIN, installed())
    if not isinstance(plugin, DShuffleWorker) or plugin.torn_down:
        raise WorkerLost(f"worker {worker.address} closes, or no longer has the dshuffle plugin")
    return plugin


def _carry_out(plugin: Callable[[], DShuffleWorker], operation: str, **message: Any) -> Any:
    """Carry out what another process asks for."""
    if operation in OPERATIONS:
        return OPERATIONS[operation](plugin(), **message)
    return OF_SESSION[operation](plugin().session(message.pop("session_id")), **message)


def _row_handlers(plugin: Callable[[], DShuffleWorker]) -> dict[str, Callable[..., Any]]:
    """Handlers of messages of rows. They are called so often that their replies have a form of their own."""

    async def fetch(
        session_id: str,
        message: tuple[int, int, int, int],
        acknowledged: Sequence[tuple[int, int, int, int]],
        host: str,
    ) -> dict[str, Any]:
        installed = plugin()
        session = installed.sessions.get(session_id)
        if session is None:
            return to_fields(Refusal("the session is not open on this worker"))
        for arrived in acknowledged:
            session.acknowledge(MessageId(*arrived))
        assert installed._worker is not None
        return await sent(installed._worker, await session.serve(MessageId(*message), shared=may_share(host)))

    async def acknowledge(session_id: str, acknowledged: Sequence[tuple[int, int, int, int]]) -> None:
        session = plugin().sessions.get(session_id)
        if session is not None:
            for arrived in acknowledged:
                session.acknowledge(MessageId(*arrived))

    return {"dshuffle_fetch": fetch, "dshuffle_acknowledge": acknowledge}
