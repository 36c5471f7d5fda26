"""The scheduler plugin: decides who takes part, which run is valid, and when all workers swap to the next epoch.

It never touches sample bytes, and its traffic per epoch is O(workers). Each participant computes the plan from the
seed, the epoch and the session's ranks, so a message only has to name the epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from dshuffle.errors import ClusterError, DShuffleError, WorkerLost
from dshuffle.planning import AutoDelivery
from dshuffle.runtime.cluster_view import choose_members
from dshuffle.runtime.replies import Reply, replying
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.session_spec import PLUGIN, PROTOCOL, TASK_PREFIX, SessionRequest
from dshuffle.runtime.worker.worker_plugin import DShuffleWorker

logger = logging.getLogger(__name__)


class DShuffleScheduler(SchedulerPlugin):
    """Scheduler plugin that manages all sessions. The first :class:`~dshuffle.Shuffler` of a cluster installs it."""

    name = PLUGIN
    idempotent = True

    def __init__(self) -> None:
        self.coordinators: dict[str, Coordinator] = {}
        self._scheduler: Scheduler | None = None
        self._hello: asyncio.Event | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Register the handlers, then install the worker plugin on all current and future workers."""
        self._scheduler = scheduler
        # If two clients connect at the same time, both start a plugin. They share the state of the first one.
        first = scheduler.extensions.setdefault(PLUGIN, self)
        self.coordinators = first.coordinators
        self._hello = first._hello = first._hello or asyncio.Event()

        async def hello() -> None:
            """Note that a worker is ready, so that waiting calls ask the workers again."""
            assert self._hello is not None
            self._hello.set()

        async def open_session(order: SessionRequest) -> Reply:
            return await self.open(order)

        async def advance(session_id: str, epoch: int) -> Reply:
            return {"epoch": await self.coordinator(session_id).advance(epoch)}

        async def prefetch(session_id: str) -> None:
            await self.coordinator(session_id).begin()

        async def training(session_id: str) -> Reply:
            return {"training_seconds": await self.coordinator(session_id).training_seconds()}

        async def report(session_id: str, **report: Any) -> None:
            coordinator = self.coordinators.get(session_id)
            if coordinator is not None:
                coordinator.report(**report)

        async def close_session(session_id: str) -> None:
            coordinator = self.coordinators.pop(session_id, None)
            if coordinator is not None:
                await coordinator.close()

        handlers: dict[str, Callable[..., Awaitable[Reply | None]]] = {
            "dshuffle_hello": hello,
            "dshuffle_open": open_session,
            "dshuffle_advance": advance,
            "dshuffle_prefetch": prefetch,
            "dshuffle_training": training,
            "dshuffle_report": report,
            "dshuffle_close": close_session,
        }
        scheduler.handlers |= {name: replying(handler) for name, handler in handlers.items()}
        await scheduler.register_worker_plugin(None, dumps(DShuffleWorker()), name=PLUGIN, idempotent=True)

    def coordinator(self, session_id: str) -> Coordinator:
        """An open session."""
        try:
            return self.coordinators[session_id]
        except KeyError:
            raise ClusterError(
                f"session {session_id} is not open on this scheduler: its client has left, or the cluster was "
                "restarted. Make a new Shuffler"
            ) from None

    async def open(self, order: SessionRequest) -> Reply:
        """Assign ranks and open the session on all participants, or on none if that fails."""
        assert self._scheduler is not None
        await self._wait_for_workers(order.settings.timeout)
        members = choose_members(self._scheduler, order)
        coordinator = Coordinator(self._scheduler, members, order.client_id, AutoDelivery(order.deliveries))
        self.coordinators[order.session_id] = coordinator  # from here on it is told about lost workers and clients
        try:
            await coordinator.open()
            if order.session_id not in self.coordinators:  # its client left while the workers were opening it
                raise ClusterError(f"session {order.session_id} was closed before all workers had opened it")
        except DShuffleError:
            self.coordinators.pop(order.session_id, None)
            await coordinator.close()
            raise
        return {"addresses": members.spec.addresses, "server": members.server_role}

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """End the sessions of a worker that has left."""
        for coordinator in self.coordinators.values():
            if worker in coordinator.members.spec.addresses.values():
                coordinator.lose(worker)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Check partition tasks that no worker can run."""
        if finish == "no-worker" and str(key).startswith(TASK_PREFIX):
            asyncio.get_running_loop().call_soon(self._fail_if_lost, key)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Close the sessions that a disconnected client left open."""
        for session_id, coordinator in list(self.coordinators.items()):
            if coordinator.client_id == client:
                del self.coordinators[session_id]
                scheduler._ongoing_background_tasks.call_soon(coordinator.close)

    def restart(self, scheduler: Scheduler) -> None:
        """End all sessions: a restart of the workers loses all partitions."""
        for coordinator in self.coordinators.values():
            coordinator.break_(WorkerLost("the cluster was restarted and all partitions are lost. Make a new Shuffler"))
        self.coordinators.clear()

    def _fail_if_lost(self, key: Any) -> None:
        """Fail a task whose worker has left. In Dask it would wait for that worker indefinitely."""
        assert self._scheduler is not None
        task = self._scheduler.tasks.get(key)
        pinned_to = set() if task is None else task.worker_restrictions or set()
        if task is None or task.state != "no-worker" or pinned_to & self._scheduler.workers.keys():
            return  # its worker still exists and is only paused
        error = WorkerLost(
            f"the worker that owned rank {key.rsplit('-', 1)[1]} ({', '.join(pinned_to)}) has left the cluster and "
            "its partition is lost. Make a new Shuffler"
        )
        stimulus_id = f"dshuffle-worker-lost-{key}"
        recommendations = self._scheduler.transition(
            key, "erred", exception=dumps(error), exception_text=str(error), cause=key, stimulus_id=stimulus_id
        )
        self._scheduler.transitions(recommendations, stimulus_id=stimulus_id)

    async def _wait_for_workers(self, timeout: float) -> None:
        """Wait until every worker of the cluster has set up the worker plugin.

        The scheduler asks the workers, so that it does not have to remember which worker sent a hello to which plugin.
        A hello only makes it ask immediately.
        """
        assert self._scheduler is not None
        assert self._hello is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(timeout, 60.0)
        while True:
            self._hello.clear()
            if not self._scheduler.workers:
                raise ClusterError(
                    "the cluster does not have any workers; start some and wait for them with client.wait_for_workers"
                )
            replies = await self._scheduler.broadcast(msg={"op": "dshuffle_protocol"}, on_error="return")
            missing = [address for address, reply in replies.items() if not isinstance(reply, dict)]
            if not missing:
                break
            if loop.time() > deadline:
                raise ClusterError(
                    f"dshuffle could not be set up on {len(missing)} of {len(replies)} workers, among them "
                    f"{sorted(missing)[0]}. Make sure that the same version of dshuffle is installed there; the "
                    "worker's log has the reason"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hello.wait(), 0.5)
        for address, reply in replies.items():
            if reply.get("protocol") != PROTOCOL:
                raise ClusterError(
                    f"worker {address} uses protocol {reply.get('protocol')} and the scheduler uses protocol "
                    f"{PROTOCOL}. Install the same version of dshuffle on both"
                )
