"""What runs on a Dask worker: its sessions, what other processes may ask of them, the plugin, and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import heapq
import importlib
import logging
import operator
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from distributed import Worker, get_worker
from distributed.core import Server
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.serialize import ToPickle
from numpy.typing import NDArray

from dshuffle.emulated_links import check_emulated_rates
from dshuffle.errors import ClusterError, DShuffleError, ExchangeError, InvalidParameter, PeerFailed, WorkerLost
from dshuffle.exchange.comms import Refusal, Reply, RowsReply, may_share, sent
from dshuffle.exchange.kept_partition import PREFIX, KeptFolder, KeptLabel, KeptPartition, PartitionOnDisk
from dshuffle.exchange.mailboxes import MessageId
from dshuffle.exchange.transports import Transport, transport_of
from dshuffle.kernels import load_kernels
from dshuffle.planning import SERVER
from dshuffle.process_exit import end_without_last_collections
from dshuffle.rows import RowLayout
from dshuffle.runtime.dataset_inputs import with_data
from dshuffle.runtime.messages import (
    Arrays,
    CommitReply,
    MemberState,
    OpenOrder,
    from_fields,
    message_in,
    place_of_key,
    replying,
    within,
)
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.process import check_memory, raise_limit
from dshuffle.runtime.session_spec import LOCAL, PLUGIN, PROTOCOL, PartitionSources, SessionSpec
from dshuffle.runtime.worker.session import WorkerSession, as_participant
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_HEARD = 64
"""Number of others that a sign of life names. If all named all, the scheduler would read n squared names."""


class _Work(NamedTuple):
    """A session that is being opened, and the number of the order; or one that is being freed (:data:`FREES`)."""

    number: int
    task: asyncio.Task[None]


MOST_CLOSED = 1000
"""Closed sessions that a worker remembers. An order to open one may arrive late."""

FREES = -1


class WorkerSessions(dict[str, WorkerSession]):
    """The open sessions of a worker, by id, and what other processes may ask of each."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="dshuffle-plugin")
        self._kept: dict[str, dict[str, KeptPartition]] = {}  # that a session reads, by their names
        self._reserved: dict[str, int] = {}  # session -> bytes of its partition
        self._work: dict[str, _Work] = {}
        self._ended = False
        self._signs: dict[str, asyncio.Task[None]] = {}
        self._closed: dict[str, int] = {}  # session -> number of the order to close it
        self.causes: dict[str, DShuffleError] = {}  # with which sessions have ended that their clients did not close

    @property
    def ids(self) -> list[str]:
        """Ids of the sessions that are open, being opened or being closed."""
        return list({**self, **self._work})

    def session(self, session_id: str) -> WorkerSession:
        """An open session."""
        if session_id not in self:
            raise WorkerLost(f"session {session_id} is not open on this worker")
        return self[session_id]

    async def open(self, order: OpenOrder, spec: bytes) -> None:
        """Allocate this worker's part of a session. Another call with the same order waits for the first one.

        An order to restore a rank waits for an opening of an earlier order, and every order for the end of a closing.
        """
        check_emulated_rates()
        session_spec = SessionSpec.unpacked(spec)
        session_id, address, number = session_spec.session_id, self.worker.address, order.number
        places = session_spec.addresses.items()
        rank = next((rank for rank, place in places if place == address and rank != SERVER), None)
        # Without ``restore``, all orders come from the same opening of the session on all workers, with one number.
        earlier = number if order.restore else FREES + 1
        while (opening := self._work.get(session_id)) is not None and opening.number < earlier:
            await asyncio.wait([opening.task])
        if self._ended:
            raise WorkerLost(f"worker {address} closes")
        if number <= self._closed.get(session_id, -1):
            raise ClusterError(f"session {session_id} was closed on this worker")
        if (session := self.get(session_id)) is not None:
            if not order.restore or number <= session.number:  # an order that comes twice, or late
                return
            # This worker was stopped for so long that it was given up, and gets a rank again.
            if session.rank == rank and (session.is_loading if order.epoch is None else session.epoch == order.epoch):
                await session.go_on(session_spec.addresses, order)
                return
            await self.close(session_id, number - 1)
            await self.open(order, spec)  # other orders may have come meanwhile
            return
        if opening is None:
            # Memory is reserved before anything is awaited, so that two sessions do not count on the same bytes.
            session_spec = self._reserve(session_spec, rank)
            task = asyncio.create_task(self._open_now(session_spec, rank, order))
            self._work[session_id] = opening = _Work(number, task)
            del task
        try:
            await asyncio.shield(opening.task)
        except asyncio.CancelledError:
            if not opening.task.cancelled():
                raise
            raise ClusterError(f"session {session_id} was closed while it was being opened") from None
        finally:
            del opening  # its error has this frame in its traceback: a cycle that keeps the rows until a collection

    def _reserve(self, spec: SessionSpec, rank: int | None) -> SessionSpec:
        """Check that a session fits beside the others, and reserve its memory."""
        manager, session_id = self.worker.memory_manager, spec.session_id
        # Memory of partitions that are still being filled does not belong to the process yet.
        filled = {name for name, session in self.items() if not session.is_loading}
        loading = sum(nbytes for name, nbytes in self._reserved.items() if name not in filled)
        limit, nbytes = check_memory(
            spec,
            rank,
            limit=manager.memory_limit,
            pause_fraction=manager.memory_pause_fraction or None,
            process_nbytes=self.worker.monitor.get_process_memory() + loading,
            reserved=self._reserved,
        )
        self._reserved[session_id] = nbytes
        return spec if limit is None else dataclasses.replace(spec, memory_limit=limit)

    def _release(self, session_id: str) -> None:
        """Free what a session has beside itself: reserved memory, kept partitions, and signs of life."""
        if (signs := self._signs.pop(session_id, None)) is not None:
            signs.cancel()
        self._reserved.pop(session_id, None)
        self._close_kept(session_id)

    async def _open_now(self, spec: SessionSpec, rank: int | None, order: OpenOrder) -> None:
        session_id = spec.session_id
        try:
            async with contextlib.AsyncExitStack() as on_error:
                on_error.callback(self._release, session_id)
                self._signs[session_id] = asyncio.create_task(self._give_signs(spec, rank))
                session = await self._made(spec, rank, order, on_error)
                session.number = order.number
                await session.abort(order.last_run)
                self[session_id] = session
                on_error.pop_all()
        finally:
            if self._work[session_id].number != FREES:
                del self._work[session_id]

    async def _made(
        self, spec: SessionSpec, rank: int | None, order: OpenOrder, on_error: contextlib.AsyncExitStack
    ) -> WorkerSession:
        """Make a session whose memory has been reserved."""
        session_id, layout, directory = spec.session_id, spec.dataset.layout, spec.options.cache_directory
        memory_limit, address = self.worker.memory_manager.memory_limit, self.worker.address
        dataset = await self._made_in_thread(spec.dataset.open, close=Dataset.close)
        on_error.callback(dataset.close)
        shuffle = await self.in_thread(with_data, spec.shuffle, dataset)
        spec = dataclasses.replace(spec, shuffle=shuffle)
        await self.in_thread(load_kernels, *transport_of(shuffle.choices.delivery).kernels)
        disk: PartitionOnDisk | None = None
        if directory is not None:
            label: KeptLabel | None = None
            n_slots = sum(shuffle.room(rank))
            if rank is not None and spec.kept_as is not None:
                identity, history = spec.dataset.identity, shuffle.history
                label = KeptLabel(identity, spec.kept_as, session_id, layout.nbytes, n_slots, history, rank)
            if label is not None and order.epoch is not None and spec.former is None:
                label_then = dataclasses.replace(label, epoch=order.epoch)
                spec = dataclasses.replace(spec, former=await self.in_thread(kept_here, directory, label_then, address))
            if rank is not None:
                folder = str(self.worker.local_directory) if directory == LOCAL else directory
                make = functools.partial(PartitionOnDisk, folder, layout, n_slots, memory_limit, label)
                disk = await self._made_in_thread(make, close=PartitionOnDisk.close)
                on_error.callback(disk.close)
            # Not earlier: what is open is not removed if there is no room on the disk for both.
            if spec.former is not None and spec.former.kept:
                names = [name for place, name in spec.former.holders.values() if place == address]
                opening = functools.partial(_opened, directory, names, layout, memory_limit)
                self._kept[session_id] = await self._made_in_thread(opening, close=_close_all)
        session = WorkerSession(self.worker, spec, dataset, rank, disk, self.rows)
        on_error.push_async_callback(session.close)
        if order.epoch is not None:
            await session.restore(order)
            self._close_kept(session_id)
        return session

    async def in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """Call a function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, call, *args)

    async def _made_in_thread(self, make: Callable[[], T], *, close: Callable[[T], None]) -> T:
        """Call a function in a thread, and close what it returns if the caller is cancelled meanwhile."""
        # A thread cannot be cancelled. Without this, only the garbage collector would free the files in its result. The
        # caller does not wait, because a store may take long to answer.
        making = self.executor.submit(make)

        def close_result(made: Future[T]) -> None:
            if not made.cancelled() and made.exception() is None:
                close(made.result())

        try:
            return await asyncio.wrap_future(making)
        except asyncio.CancelledError:
            making.add_done_callback(close_result)
            raise

    def _close_kept(self, session_id: str) -> None:
        """Let go of the kept partitions of a session, which has read them."""
        _close_all(self._kept.pop(session_id, {}))

    async def _give_signs(self, spec: SessionSpec, rank: int | None) -> None:
        """Tell the scheduler every third of a heartbeat that this worker is alive, while the scheduler waits for it.

        It also says from whom bytes came in the last heartbeat.
        """
        heartbeat = spec.settings.heartbeat
        while True:
            await asyncio.sleep(heartbeat / 3)
            session = self.get(spec.session_id)
            if (ages := {} if session is None else session.heard()) is not None:
                recent = [item for item in ages.items() if item[1] < heartbeat]
                heard = dict(heapq.nsmallest(MOST_HEARD, recent, key=operator.itemgetter(1)))
                sign = self.worker.scheduler.dshuffle_alive(**as_participant(spec, rank), heard=heard, reply=False)
                with contextlib.suppress(OSError, RuntimeError):  # the scheduler still asks, or this worker is closing
                    await within(heartbeat, sign)

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
            self.causes.pop(oldest, None)
        self._closed[session_id] = max(number, self._closed.get(session_id, number))
        if cause is not None:
            self.causes[session_id] = cause
        session = self.get(session_id)
        if keeps and session is not None and not session.is_loading and cause is not None:
            await session.end(cause)
            return
        while (opening := self._work.get(session_id)) is not None and opening.number == FREES:
            await asyncio.wait([opening.task])
        if session_id in self.ids and not self._has_later(session_id, number):
            # It goes on if the process that gave the order goes away.
            task = asyncio.create_task(self._free(session_id, opening, cause))
            self._work[session_id] = _Work(FREES, task)
            await asyncio.shield(task)

    async def _free(self, session_id: str, opening: _Work | None, cause: DShuffleError | None) -> None:
        try:
            if opening is not None:
                opening.task.cancel()
                await asyncio.wait([opening.task])
            if (session := self.pop(session_id, None)) is not None:
                await session.close(cause)
        finally:
            del self._work[session_id]
            self._release(session_id)

    async def end(self) -> None:
        """Close all sessions, because the worker closes, and open no other one."""
        self._ended = True
        for session_id in self.ids:
            await self.close(session_id, sys.maxsize)

    def _has_later(self, session_id: str, number: int) -> bool:
        """Whether a later order than this one has opened the session, or is opening it."""
        opened = self.get(session_id) or self._work.get(session_id)
        return opened is not None and opened.number > number

    def status(self, session_id: str) -> MemberState:
        """The state of a session here."""
        session = self.get(session_id)
        return MemberState(open=False) if session is None else session.status()

    async def commit(self, session_id: str, run_id: int) -> CommitReply:
        """Let a session swap to the next epoch."""
        reply = await self.session(session_id).commit(run_id)
        self._close_kept(session_id)  # all members have their first partitions
        return reply

    async def list_kept(self, directory: str, dataset: str) -> list[KeptFolder]:
        """The partitions of a dataset that earlier sessions have kept in a folder."""
        return await self.in_thread(KeptFolder.all_in, directory, dataset)

    async def rows(self, session_id: str, epoch: int, sample_ids: NDArray[np.int64]) -> RowsReply:
        """Rows of a partition on this worker; ``session_id`` may name a kept one."""
        if session_id.startswith(PREFIX):
            kept = next((named[session_id] for named in self._kept.values() if session_id in named), None)
            if kept is None:
                raise ExchangeError(f"the kept partition {session_id} is gone or damaged")
            return RowsReply(*await self.in_thread(kept.read, sample_ids))
        return await self.session(session_id).rows_of(epoch, sample_ids)

    async def send_rows(self, session_id: str, epoch: int, sample_ids: NDArray[np.int64]) -> Arrays:
        """Rows of a partition, for another worker."""
        return Arrays(await sent(self.worker, await self.rows(session_id, epoch, sample_ids)))

    async def fetch(self, **fields: Any) -> Arrays:
        """A message of an exchange, for another worker."""
        request = from_fields(Request, fields, "another worker")
        self._note(request)
        reply: Reply = Refusal("the session is not open on this worker")
        if (session := self.get(request.session_id)) is not None:
            reply = await session.serve(request.message, shared=may_share(request.host))
        return Arrays(await sent(self.worker, reply))

    def acknowledge(self, **fields: Any) -> None:
        """Note that messages have arrived at another worker."""
        self._note(from_fields(Acknowledged, fields, "another worker"))

    def _note(self, arrived: Acknowledged) -> None:
        if (session := self.get(arrived.session_id)) is not None:
            for message in arrived.acknowledged:
                session.acknowledge(message)


def _opened(directory: str, names: list[str], layout: RowLayout, memory_limit: int | None) -> dict[str, KeptPartition]:
    """The kept partitions that a session counts on. If one cannot be used any more, its rows come from the dataset."""
    opened = {}
    for name in names:
        try:
            opened[name] = KeptPartition(os.path.join(directory, name), layout, memory_limit)
        except DShuffleError as error:
            logger.warning("dshuffle: %s", error)
    return opened


def _close_all(partitions: dict[str, KeptPartition]) -> None:
    for partition in partitions.values():
        partition.close()


def kept_here(directory: str, label: KeptLabel, address: str) -> PartitionSources | None:
    """The partition of a rank and an epoch that a lost worker has left in a folder on this worker's disk."""
    for folder in KeptFolder.all_in(directory, label.dataset):
        if dataclasses.replace(folder.label, session=label.session) == label:
            return PartitionSources(label.epoch, {label.rank: (address, folder.name)}, kept=True)
    return None


class Acknowledged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that have arrived."""

    session_id: str
    acknowledged: list[MessageId]


class Request(Acknowledged, frozen=True, forbid_unknown_fields=True):
    """A request for a message, with acknowledgements of earlier ones.

    ``host`` is the name of the receiver's host, if it can map memory of this one. Otherwise it is empty.
    """

    message: MessageId
    host: str


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
    while loop.time() < end:
        try:
            call = within(ANSWER_WITHIN, worker.scheduler.dshuffle_retiring(address=worker.address))
            if not message_in(await call, bool, "the scheduler"):
                return
        except (OSError, DShuffleError) as error:
            logger.debug("dshuffle: the scheduler does not take this worker's partitions: %s", error)
            return
        if (heartbeat := worker.periodic_callbacks.get("heartbeat")) is not None:
            heartbeat.stop()  # the scheduler may have removed this worker, and would tell it to close
        await asyncio.sleep(ASK_EVERY)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a record of Dask's worker is anything but a partition task that failed because another rank did."""
    match record.args:
        case (key, _, _, str(error), _) if record.msg.startswith("Compute Failed"):
            return place_of_key(key) is None or not error.startswith(f"{PeerFailed.__name__}(")
    return True


async def open_session(sessions: WorkerSessions, spec: bytes, **order: Any) -> None:
    """Open a session here."""
    await sessions.open(from_fields(OpenOrder, order, "the scheduler"), spec)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "open": open_session,
    "status": WorkerSessions.status,
    "commit": WorkerSessions.commit,
    "close": WorkerSessions.close,
    "kept": WorkerSessions.list_kept,
    "rows": WorkerSessions.send_rows,
    "fetch": WorkerSessions.fetch,
    "acknowledge": WorkerSessions.acknowledge,
}
"""What the scheduler and other workers may ask of a worker, by name. The fields of a message are the arguments."""

OF_SESSION: dict[str, Callable[..., Any]] = {
    "block": WorkerSession.send_block,
    "mean": WorkerSession.mean,
    "end_collective": WorkerSession.fail_collective,
    "members": WorkerSession.change_members,
    "begin": WorkerSession.begin,
    "plan_ahead": WorkerSession.plan_ahead,
    "abort": WorkerSession.abort,
    "training": WorkerSession.take_training_time,
    "trained": WorkerSession.trained,
}
"""What they may ask of an open session, in the same way."""

OF_WORKER, OF_SCHEDULER = (
    ("dshuffle.runtime.gather", "dshuffle.store.dataset"),
    ("dshuffle.runtime.scheduler.scheduler_plugin",),
)
KERNELS = (
    "rows",
    "exchange.cache_partition",
    "store.reader",
    "planning.types",
    "planning.randomness",
    "planning.remainder",
)
"""Those of sessions with the default choices."""


def load_ahead(is_worker: bool) -> None:
    """Load the modules of a worker or a scheduler, and the kernels of a worker.

    Sessions whose choices need more kernels load these when they open.
    """
    for name in OF_WORKER if is_worker else OF_SCHEDULER:
        importlib.import_module(name)
    if is_worker:
        load_kernels(*KERNELS)


async def preload(server: Server) -> None:
    """Load what a worker or a scheduler needs before it is part of the cluster."""
    await asyncio.to_thread(load_ahead, isinstance(server, Worker))


class DShuffleWorker(WorkerPlugin):
    """Worker plugin. The scheduler plugin installs it on all current and future workers."""

    name = PLUGIN
    idempotent = True

    def __init__(self) -> None:
        self.sessions: WorkerSessions | None = None  # until it is set up
        self.torn_down = False

    async def setup(self, worker: Worker) -> None:
        """Register the handlers, then load the kernels."""
        self.sessions = opened = WorkerSessions(worker)
        logging.getLogger("distributed.worker").addFilter(is_worth_a_line)
        if worker.nanny:  # it has a process of its own
            end_without_last_collections()
        is_set_up = False
        raise_limit()

        async def protocol() -> dict[str, Any] | None:
            is_installed = isinstance(worker.plugins.get(PLUGIN), DShuffleWorker)
            return {"protocol": PROTOCOL, "is_set_up": is_set_up} if is_installed else None

        # Registered first, because Dask logs a traceback when a worker is asked for something that it does not know.
        worker.handlers["dshuffle_protocol"] = protocol

        sessions = functools.partial(_sessions_of, worker, weakref.ref(self))
        for name in (*OPERATIONS, *OF_SESSION):
            worker.handlers[f"dshuffle_{name}"] = replying(name, functools.partial(_carry_out, sessions, name))
        # Off the event loop, and before the first rows arrive.
        try:
            await opened.in_thread(load_kernels, *Transport.kernels)
        except BaseException:
            worker.handlers.pop("dshuffle_protocol", None)
            raise
        is_set_up = True  # from here on the scheduler can use this worker

    async def teardown(self, worker: Worker) -> None:
        """Let other workers read the partitions here, then close all sessions."""
        worker.handlers.pop("dshuffle_protocol", None)
        sessions = self.sessions
        if sessions is None:
            return
        for session in sessions.values():
            session.end_collective()
        if any(session.rank is not None and not session.is_loading for session in sessions.values()):
            await hand_over(worker)
        self.torn_down = True
        await sessions.end()
        sessions.executor.shutdown(wait=False, cancel_futures=True)


def _sessions_of(worker: Worker, installed: weakref.ref[DShuffleWorker]) -> WorkerSessions:
    """The sessions of a worker. Dask has removed the plugin while a worker that closes sends rows."""
    plugin = worker.plugins.get(PLUGIN, installed())
    if not isinstance(plugin, DShuffleWorker) or plugin.sessions is None or plugin.torn_down:
        raise WorkerLost(f"worker {worker.address} closes, or no longer has the dshuffle plugin")
    return plugin.sessions


def _carry_out(sessions: Callable[[], WorkerSessions], operation: str, **message: Any) -> Any:
    """Carry out what another process asks for."""
    if operation in OPERATIONS:
        return OPERATIONS[operation](sessions(), **message)
    return OF_SESSION[operation](sessions().session(message.pop("session_id")), **message)


def partition_on(worker: Worker, session_id: str, rank: int, epoch: int) -> AbstractContextManager[Partition]:
    """The partition of a rank in an epoch, which a worker holds. For tasks, and the loops of ranks in its process."""
    plugin = worker.plugins.get(PLUGIN)
    sessions = plugin.sessions if isinstance(plugin, DShuffleWorker) else None
    session = None if sessions is None else sessions.get(session_id)
    if session is None or session.rank != rank:
        cause = None if sessions is None else sessions.causes.get(session_id)
        if cause is not None:
            raise cause.raised_by(f"the task of rank {rank} cannot run")
        raise WorkerLost(
            f"worker {worker.address} does not hold rank {rank} of session {session_id}: the session was closed, "
            "or another worker has taken the rank. If the session has ended, make a new Shuffler"
        )
    return session.partition(epoch)


def run_on_partition(
    session_id: str,
    rank: int,
    epoch: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``fn`` on the partition of this worker; the Dask task behind :meth:`dshuffle.Epoch.map`."""
    access = partition_on(get_worker(), session_id, rank, epoch)
    with access as partition:
        try:
            result = fn(partition, *args, **kwargs)
        except AssertionError as error:
            if "daemonic processes" not in str(error):
                raise
            raise InvalidParameter.because(
                getattr(fn, "__name__", "fn"),
                "a Dask worker cannot start processes of its own, such as those of a DataLoader",
                "Use num_workers=0: the rows are in this process's memory already.",
            ) from error
    if isinstance(result, Partition):
        raise TypeError("a Partition cannot be sent to another process; return arrays instead")
    return result
