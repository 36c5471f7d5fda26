"""The worker plugin: owns this worker's sessions and answers the scheduler and the other workers.

The handlers are thin closures that look up the plugin. Dask caches handlers permanently, so a handler must not keep a
plugin and its rows alive. The last step of the set-up is a hello to the scheduler, which uses this worker only then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.serialize import to_serialize

from dshuffle.errors import ClusterError, PeerFailed, WorkerLost
from dshuffle.exchange.comms import as_frames
from dshuffle.exchange.messages import MessageId
from dshuffle.exchange.warmup import load_exchange_kernels, load_session_kernels
from dshuffle.planning import SERVER
from dshuffle.runtime.collective import Collective
from dshuffle.runtime.dataset_inputs import with_data
from dshuffle.runtime.memory import check_budget
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.replies import Reply, replying, unwrap
from dshuffle.runtime.session_spec import PLUGIN, PROTOCOL, SessionSpec
from dshuffle.runtime.worker.session import WorkerSession


class DShuffleWorker(WorkerPlugin):
    """Worker plugin. The scheduler plugin installs it on all current and future workers."""

    name = PLUGIN
    idempotent = True

    def __init__(self) -> None:
        self.sessions: dict[str, WorkerSession] = {}
        self.collectives: dict[str, Collective] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._worker: Worker | None = None

    async def setup(self, worker: Worker) -> None:
        """Register the handlers, then send a hello to the scheduler."""
        self._worker = worker
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="dshuffle")

        def plugin() -> DShuffleWorker:
            found = worker.plugins.get(PLUGIN)
            if not isinstance(found, DShuffleWorker):
                raise ClusterError(f"worker {worker.address} no longer has the dshuffle plugin")
            return found

        async def open_session(spec: SessionSpec) -> None:
            await plugin().open(spec)

        async def begin(session_id: str, run_id: int, epoch: int, delivery: str, rate: float | None) -> None:
            await plugin().session(session_id).begin(run_id, epoch, delivery, rate)

        async def commit(session_id: str, run_id: int) -> Reply:
            return {"report": await plugin().session(session_id).commit(run_id)}

        async def plan_ahead(session_id: str, run_id: int, delivery: str) -> None:
            await plugin().session(session_id).plan_ahead(run_id, delivery)

        async def abort(session_id: str) -> None:
            await plugin().session(session_id).abort()

        async def training(session_id: str) -> Reply:
            return {"training_seconds": plugin().session(session_id).take_training_seconds()}

        async def close_session(session_id: str) -> None:
            plugin().end_collective(session_id)
            session = plugin().sessions.pop(session_id, None)
            if session is not None:
                await session.close()

        async def fetch(
            session_id: str, message: tuple[int, int, int, int], acknowledged: Sequence[tuple[int, int, int, int]]
        ) -> Reply:
            session = plugin().sessions.get(session_id)
            if session is None:
                return {"status": "refused", "reason": "the session is not open on this worker", "again": False}
            for arrived in acknowledged:
                session.acknowledge(MessageId(*arrived))
            return as_frames(await session.serve(MessageId(*message)))

        async def acknowledge(session_id: str, acknowledged: Sequence[tuple[int, int, int, int]]) -> None:
            session = plugin().sessions.get(session_id)
            if session is not None:
                for arrived in acknowledged:
                    session.acknowledge(MessageId(*arrived))

        async def meet(session_id: str, number: int, **message: Any) -> Reply:
            return {"mean": to_serialize(await plugin().collective(session_id, number).mean(**message))}

        async def end_collective(session_id: str, number: int, reason: str) -> None:
            plugin().collective(session_id, number).fail(reason)

        worker.handlers |= {
            "dshuffle_open": replying(open_session),
            "dshuffle_begin": replying(begin),
            "dshuffle_commit": replying(commit),
            "dshuffle_plan_ahead": replying(plan_ahead),
            "dshuffle_abort": replying(abort),
            "dshuffle_training": replying(training),
            "dshuffle_close": replying(close_session),
            "dshuffle_mean": replying(meet),
            "dshuffle_end_collective": replying(end_collective),
            "dshuffle_fetch": fetch,
            "dshuffle_acknowledge": acknowledge,
        }
        # Off the event loop, and before the first rows arrive.
        await asyncio.get_running_loop().run_in_executor(self._executor, load_exchange_kernels)

        async def protocol() -> Reply | None:
            return {"protocol": PROTOCOL} if isinstance(worker.plugins.get(PLUGIN), DShuffleWorker) else None

        # From here on the scheduler can use this worker. The hello makes it check at once instead of waiting.
        worker.handlers["dshuffle_protocol"] = protocol
        unwrap(await worker.scheduler.dshuffle_hello(), "the scheduler")

    async def teardown(self, worker: Worker) -> None:
        """Close all sessions."""
        worker.handlers.pop("dshuffle_protocol", None)
        for session_id in list(self.collectives):
            self.end_collective(session_id)
        sessions, self.sessions = list(self.sessions.values()), {}
        for session in sessions:
            await session.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def open(self, spec: SessionSpec) -> None:
        """Allocate this worker's part of a session."""
        assert self._worker is not None
        assert self._executor is not None
        address = self._worker.address
        ranks = [who for who, where in spec.addresses.items() if where == address and who != SERVER]
        limit = self._worker.memory_manager.memory_limit
        if spec.memory_limit is None and limit:
            taken = sum(session.nbytes for session in self.sessions.values())
            spec = spec.with_memory_limit(max(0, int(spec.settings.memory_fraction * limit) - taken))
        if ranks:
            check_budget(spec.shuffle, spec.dataset.layout, spec.memory_limit)
        loop = asyncio.get_running_loop()
        dataset = await loop.run_in_executor(self._executor, spec.dataset.open)
        spec = spec.with_shuffle(await loop.run_in_executor(self._executor, with_data, spec.shuffle, dataset))
        await loop.run_in_executor(self._executor, load_session_kernels, spec.shuffle)
        self.sessions[spec.session_id] = WorkerSession(self._worker, spec, dataset, ranks[0] if ranks else None)

    def session(self, session_id: str) -> WorkerSession:
        """An open session."""
        try:
            return self.sessions[session_id]
        except KeyError:
            raise ClusterError(f"session {session_id} is not open on this worker") from None

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


def run_on_partition(
    session_id: str,
    rank: int,
    epoch: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``fn`` on the partition of this worker; the Dask task behind :meth:`dshuffle.Epoch.map`."""
    plugin = get_worker().plugins.get(PLUGIN)
    session = plugin.sessions.get(session_id) if isinstance(plugin, DShuffleWorker) else None
    if session is None or session.rank != rank:
        raise WorkerLost(f"the worker that owned rank {rank} has left the cluster. Make a new Shuffler")
    with session.partition(epoch) as partition:
        result = fn(partition, *args, **kwargs)
    if isinstance(result, Partition):
        raise TypeError("a Partition cannot be sent to another process; return arrays instead")
    return result
