"""The worker plugin: it sets dshuffle up on a Dask worker, and runs tasks there."""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from distributed import Worker, get_worker
from distributed.core import Server
from distributed.diagnostics.plugin import WorkerPlugin

from dshuffle.errors import InvalidParameter, PeerFailed, WorkerLost
from dshuffle.exchange.transports import Transport
from dshuffle.kernels import load_kernels
from dshuffle.process_exit import end_without_last_collections
from dshuffle.runtime.messages import (
    AbortOrder,
    BeginOrder,
    BlockQuery,
    CloseOrder,
    CommitOrder,
    EndCollectiveOrder,
    KeptQuery,
    MeanQuery,
    MembersOrder,
    OpenOrder,
    Order,
    PlanOrder,
    RowsQuery,
    SessionOrder,
    TrainedQuery,
    from_fields,
    message_in,
    replying,
)
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.process import raise_limit
from dshuffle.runtime.session_spec import PLUGIN, PROTOCOL
from dshuffle.runtime.task_keys import place_of_key
from dshuffle.runtime.worker.session import WorkerSession
from dshuffle.runtime.worker.sessions import Acknowledged, Request, WorkerSessions, hand_over

logger = logging.getLogger(__name__)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a record of Dask's worker is anything but a partition task that failed because another rank did."""
    match record.args:
        case (key, _, _, str(error), _) if record.msg.startswith("Compute Failed"):
            return place_of_key(key) is None or not error.startswith(f"{PeerFailed.__name__}(")
    return True


ATTACHED = ("spec", "cause", "values", "sample_ids", "numbers")
"""What a message may have beside its fields: objects that Dask sends by itself."""

OPERATIONS: dict[str, tuple[type[msgspec.Struct], Callable[..., Any]]] = {
    "open": (OpenOrder, WorkerSessions.open),
    "status": (SessionOrder, WorkerSessions.status),
    "commit": (CommitOrder, WorkerSessions.commit),
    "close": (CloseOrder, WorkerSessions.close),
    "kept": (KeptQuery, WorkerSessions.list_kept),
    "rows": (RowsQuery, WorkerSessions.send_rows),
    "fetch": (Request, WorkerSessions.fetch),
    "acknowledge": (Acknowledged, WorkerSessions.acknowledge),
}
"""What the scheduler and other workers may ask of a worker, by name: the fields of the message, and who answers it."""

OF_SESSION: dict[str, tuple[type[msgspec.Struct], Callable[..., Any]]] = {
    "block": (BlockQuery, WorkerSession.send_block),
    "mean": (MeanQuery, WorkerSession.mean),
    "end_collective": (EndCollectiveOrder, WorkerSession.fail_collective),
    "members": (MembersOrder, WorkerSession.change_members),
    "begin": (BeginOrder, WorkerSession.begin),
    "plan_ahead": (PlanOrder, WorkerSession.plan_ahead),
    "abort": (AbortOrder, WorkerSession.abort),
    "training": (Order, WorkerSession.take_training_time),
    "trained": (TrainedQuery, WorkerSession.trained),
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
        """Register the handlers, load the kernels, then send a hello to the scheduler."""
        self.sessions = opened = WorkerSessions(worker)
        logging.getLogger("distributed.worker").addFilter(is_worth_a_line)
        if worker.nanny:  # it has a process of its own
            end_without_last_collections()
        is_set_up, open_files = False, raise_limit()

        async def protocol() -> dict[str, Any] | None:
            is_installed = isinstance(worker.plugins.get(PLUGIN), DShuffleWorker)
            state = {"protocol": PROTOCOL, "is_set_up": is_set_up, "open_files": open_files}
            return state if is_installed else None

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
        # From here on the scheduler can use this worker. The hello makes it check at once instead of waiting.
        is_set_up = True
        try:
            message_in(await worker.scheduler.dshuffle_hello(), type(None), "the scheduler")
        except OSError as error:  # the scheduler asks again; a worker must not fail to start because of it
            logger.warning("dshuffle: the hello did not reach the scheduler: %s", error)

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
    owner: WorkerSessions | WorkerSession = sessions()
    kind, method = OF_SESSION.get(operation) or OPERATIONS[operation]
    attached = {name: message.pop(name) for name in ATTACHED if name in message}
    if operation in OF_SESSION:
        owner = sessions().session(message["session_id"])
        if not issubclass(kind, SessionOrder):
            del message["session_id"]
    fields = from_fields(kind, message, f"the process that asked for {operation!r}")
    if isinstance(fields, OpenOrder):
        return method(owner, fields, **attached)
    named = msgspec.structs.asdict(fields)
    if operation in OF_SESSION:
        named.pop("session_id", None)
    return method(owner, **named, **attached)


def partition_on(worker: Worker, session_id: str, rank: int, epoch: int) -> AbstractContextManager[Partition]:
    """The partition of a rank in an epoch, which a worker holds. For tasks, and the loops of ranks in its process."""
    plugin = worker.plugins.get(PLUGIN)
    sessions = plugin.sessions if isinstance(plugin, DShuffleWorker) else None
    session = None if sessions is None else sessions.of_rank(session_id, rank)
    if session is None:
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
