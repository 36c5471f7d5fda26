"""The scheduler plugin: handlers and hooks of the Dask scheduler, which open and close sessions.

The state machine of each session decides which run is valid and when all workers swap. The scheduler never touches
sample bytes, and its traffic per epoch is O(workers). Each participant computes the plan from the seed, the epoch and
the session's ranks, so a message only has to name the epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

from distributed import Scheduler, Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps, loads
from distributed.scheduler import WorkerState

from dshuffle.errors import CacheBudgetError, ClusterError, DShuffleError, WorkerLost
from dshuffle.exchange.kept_partition import KeptFolder
from dshuffle.planning import AutoDelivery, get_delivery
from dshuffle.runtime.messages import OpenedSession, message_in, replying, within
from dshuffle.runtime.process import too_few_files
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.scheduler.members import (
    SETUP_TIMEOUT,
    KeptPartitions,
    ask_all,
    choose_members,
    server_role,
    workers_set_up,
)
from dshuffle.runtime.scheduler.snapshot import SessionSnapshot, add_page
from dshuffle.runtime.scheduler.tasks import PartitionTasks, unfinished_tasks
from dshuffle.runtime.session_spec import PLUGIN, PROTOCOL, SessionRequest
from dshuffle.runtime.worker.worker_plugin import DShuffleWorker

logger = logging.getLogger(__name__)

RETIREMENTS = ("retire-workers", "worker-close-gracefully")
"""How Dask names the reasons for which it removes workers that can still send rows."""


class DShuffleScheduler(SchedulerPlugin):
    """Scheduler plugin that manages all sessions. The first :class:`~dshuffle.Shuffler` of a cluster installs it."""

    name = PLUGIN
    idempotent = True
    _scheduler: Scheduler
    _hello: asyncio.Event
    _tasks: PartitionTasks

    def __init__(self) -> None:
        self.coordinators: dict[str, Coordinator] = {}
        self._opening: set[str] = set()
        self._freeing: set[Coordinator] = set()

    async def start(self, scheduler: Scheduler) -> None:
        """Register the handlers, then install the worker plugin on all current and future workers."""
        # If two clients connect at the same time, both start a plugin. They share the state of the first one.
        first = scheduler.extensions.setdefault(PLUGIN, self)
        self.__dict__ = first.__dict__
        if first is self:
            self._scheduler, self._hello = scheduler, asyncio.Event()
            self._tasks = PartitionTasks(scheduler, self.coordinators)
            for name in (*OPERATIONS, *OF_SESSION):
                scheduler.handlers[f"dshuffle_{name}"] = replying(name, functools.partial(_carry_out, scheduler, name))
            add_page(scheduler, self.snapshots)
        await self._install()

    def hello(self) -> None:
        """Note that a worker is ready, so that waiting calls ask the workers again."""
        self._hello.set()

    def report(self, session_id: str, **vote: Any) -> None:
        """Pass on a vote, unless the session was closed."""
        if (coordinator := self.coordinators.get(session_id)) is not None:
            coordinator.vote(**vote)

    def alive(self, session_id: str, **sign: Any) -> None:
        """Pass on a sign of life, unless the session was closed."""
        if (coordinator := self.coordinators.get(session_id)) is not None:
            coordinator.alive(**sign)

    def retiring(self, address: str) -> bool:
        """Let other workers take the ranks of a worker that is closing; whether they still need its partitions."""
        self._lose(address, retires=True)
        needed = any(coordinator.needs(address) for coordinator in self.coordinators.values())
        if not needed:  # the worker does not wait any longer
            for coordinator in self.coordinators.values():
                coordinator.forget(address)
        return needed

    def waiting(self, session_id: str, tasks: bool = False) -> str:
        """What a session waits for, in words, or what its tasks wait for alone; empty if it does not wait."""
        coordinator, reasons = self.coordinators.get(session_id), self._tasks.waiting_for()
        if coordinator is not None:
            exchange = "" if tasks and not coordinator.machine.missing else coordinator.waiting_for()
            reasons += [exchange, *(coordinator.silent_tasks() if tasks else ())]
        return "; ".join(filter(None, reasons))

    async def close_session(self, session_id: str) -> None:
        """Close a session."""
        self._opening.discard(session_id)  # if it is not open yet, it will not be
        await self._close(session_id)

    def snapshots(self) -> list[SessionSnapshot]:
        """What all open sessions do at this moment."""
        return [coordinator.snapshot() for coordinator in self.coordinators.values()]

    def coordinator(self, session_id: str) -> Coordinator:
        """An open session."""
        try:
            return self.coordinators[session_id]
        except KeyError:
            raise ClusterError(
                f"session {session_id} is not open on this scheduler: its client has left, or the cluster was "
                "restarted. Make a new Shuffler"
            ) from None

    async def open(self, session_id: str, order: bytes, protocol: int | None = None) -> OpenedSession:
        """Assign ranks and open the session on all participants, or on none if that fails.

        The order is a pickled :class:`SessionRequest`, which is read only if it has this protocol.
        """
        if protocol != PROTOCOL:  # releases before protocol 27 did not say
            raise ClusterError(
                f"the client uses protocol {protocol or 'below 27'} and the scheduler uses protocol {PROTOCOL}. "
                "Install the same version of dshuffle on both",
                transient=False,
            )
        self._opening.add(session_id)
        try:
            return await self._open(loads(order))
        finally:
            self._opening.discard(session_id)

    async def _open(self, order: SessionRequest) -> OpenedSession:
        fewest = order.options.min_workers if order.options.elastic else None
        ready = await workers_set_up(self._scheduler, self._hello, order.settings, order.choice, fewest)
        # Sessions that have ended may still take memory.
        ended = [*self.coordinators.values(), *self._freeing]
        await asyncio.gather(*(coordinator.freed() for coordinator in ended if not coordinator.is_source))
        self._check_client_waits(order)
        source = self._source(order)
        former = None if source is None else source.partitions()
        kept = {} if former is not None else await self._kept_partitions(order, ready)
        spec = choose_members(self._scheduler, self._with_present_ranks(order), ready, former, kept)
        coordinator = Coordinator(
            self._scheduler, spec, order.client_id, AutoDelivery(order.deliveries), self._tasks.move
        )
        self.coordinators[order.session_id] = coordinator  # from here on it hears of lost workers and clients
        if source is not None:
            source.follower, coordinator.source = coordinator, source
        try:
            await coordinator.open()
            self._check_client_waits(order)
        except BaseException as error:
            await self._close(order.session_id)
            sources = [coordinator for coordinator in self.coordinators.values() if coordinator.is_source]
            if isinstance(error, CacheBudgetError) and sources:  # there is not enough memory for both
                await asyncio.gather(*(source.close() for source in sources))
                error.transient = True
            raise
        workers = [each for each in self._scheduler.workers.values() if order.choice.allows(each)]
        paused = {each.address for each in workers if each.status == Status.paused}
        shuffle, files = spec.shuffle, ""
        if shuffle.choices.assignment.moves:
            connections = (
                0 if all(get_delivery(name).reads_store for name in spec.deliveries) else shuffle.n_workers - 1
            )
            files = too_few_files({address: ready.get(address) for address in spec.addresses.values()}, connections)
        return OpenedSession(
            addresses=spec.addresses,
            server=server_role(spec.addresses),
            left_out=tuple(sorted(paused - ready.keys())),
            history=shuffle.history,
            too_few_files=files,
        )

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Replace a worker that has left the cluster in all its sessions, or end the sessions."""
        self._lose(worker, retires=stimulus_id.startswith(RETIREMENTS))

    def _lose(self, address: str, *, retires: bool) -> None:
        for coordinator in self.coordinators.values():
            if address in coordinator.addresses.values():
                coordinator.lose(address, retires=retires)

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[WorkerState]) -> list[WorkerState]:
        """Workers that an adaptive cluster may remove: not members of open sessions, which hold partitions.

        Members of elastic sessions may be removed while no rows are exchanged and they do not train, but for the
        fewest that the session needs.
        """
        sessions = [session for session in self.coordinators.values() if not session.ended]
        members = {address for session in sessions for address in session.kept_workers()}
        return [worker for worker in workers if worker.address not in members]

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Record what becomes of partition tasks, and take care of those that cannot run where Dask sends them."""
        self._tasks.enter_state(key, finish)

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Note that the client of a session has connected again."""
        for coordinator in self.coordinators.values():
            coordinator.client_reconnected |= coordinator.client_id == client

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Close the sessions of a client that has left, or that does not come back after its connection was lost.

        A client that leaves says so first, while its connection is open. But Dask also removes a client that has
        connected again when its earlier connection ends later, and closes the new one. The client then comes back.
        """
        comm = getattr(scheduler.client_comms.get(client), "comm", None)
        lost = comm is not None and comm.closed()
        for session_id, coordinator in self.coordinators.items():
            if coordinator.client_id == client:
                may_come_back = lost or coordinator.client_reconnected
                seconds = coordinator.spec.settings.heartbeat if may_come_back else 0.0
                scheduler._ongoing_background_tasks.call_soon(self._close_unless_back, session_id, seconds)

    def restart(self, scheduler: Scheduler) -> None:
        """End all sessions: a restart of the workers loses all partitions."""
        for coordinator in self.coordinators.values():
            coordinator.end(WorkerLost("the cluster was restarted and all partitions are lost. Make a new Shuffler"))
            coordinator.release()
        self.coordinators.clear()
        self._freeing.clear()

    async def _install(self) -> None:
        """Install the worker plugin. Workers that miss it are asked again, and named, when a session opens."""
        install = self._scheduler.register_worker_plugin(None, dumps(DShuffleWorker()), name=PLUGIN, idempotent=True)
        try:
            await within(SETUP_TIMEOUT, install)
        except OSError as error:  # a worker has left or hangs
            words = "dshuffle: some workers are not set up yet (%s: %s); they are tried again when a session opens"
            logger.warning(words, type(error).__name__, error)

    async def _close(self, session_id: str) -> None:
        coordinator = self.coordinators.get(session_id)
        if coordinator is None:
            return
        if coordinator.is_source:
            coordinator.client_left = True
            self._scheduler._ongoing_background_tasks.call_soon(self._close_source, session_id, coordinator)
            return
        del self.coordinators[session_id]
        self._freeing.add(coordinator)
        try:
            await coordinator.close()
        finally:
            self._freeing.discard(coordinator)

    async def _close_source(self, session_id: str, coordinator: Coordinator) -> None:
        """Close an ended session once another one has read its partitions, or after some time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(coordinator.freed(), coordinator.spec.settings.replacement_timeout)
        coordinator.release()
        await self._close(session_id)

    async def _close_unless_back(self, session_id: str, seconds: float) -> None:
        """Close a session after some seconds, unless its client has connected again."""
        await asyncio.sleep(seconds)
        coordinator = self.coordinators.get(session_id)
        if coordinator is not None and coordinator.client_id not in self._scheduler.clients:
            await self._close(session_id)

    def _source(self, request: SessionRequest) -> Coordinator | None:
        """The session whose partitions the requested one reads.

        It is the one that it takes over from, or else one on the same dataset that has lost workers.
        """
        if request.former is not None:
            return self.coordinators.get(request.former)
        ended = [coordinator for coordinator in self.coordinators.values() if coordinator.can_be_read_by(request)]
        return ended[-1] if ended else None

    def _with_present_ranks(self, request: SessionRequest) -> SessionRequest:
        """The request, with the ranks that workers have now in the session that it takes over from."""
        coordinator, carried = self.coordinators.get(request.former or ""), request.carried
        if coordinator is None or carried is None or carried.places is None:
            return request
        if carried.history != coordinator.spec.shuffle.history:  # nobody has trained in that session
            return request
        return dataclasses.replace(request, carried=dataclasses.replace(carried, places=coordinator.places))

    async def _kept_partitions(self, request: SessionRequest, ready: Collection[str]) -> KeptPartitions:
        """The partitions that earlier sessions have kept on the disks of the workers."""
        directory = request.options.cache_directory
        if directory is None or request.kept_as is None or not request.reads_kept:
            return {}
        message = {"op": "dshuffle_kept", "directory": directory, "dataset": request.dataset.identity}
        replies = await ask_all(self._scheduler, message, sorted(ready), request.settings.heartbeat)
        folders = {}
        for address, reply in replies.items():
            try:
                folders[address] = message_in(reply, list[KeptFolder], address)
            except DShuffleError as error:  # its rows come from the dataset
                logger.warning("dshuffle: kept partitions on %s are not used: %s", address, error)
        return folders

    def _check_client_waits(self, request: SessionRequest) -> None:
        """Refuse to open a session whose client has left, or has closed it in the meantime."""
        if request.session_id not in self._opening or request.client_id not in self._scheduler.clients:
            raise ClusterError(f"session {request.session_id} was closed before all workers had opened it")


OPERATIONS: dict[str, Callable[..., Any]] = {
    "hello": DShuffleScheduler.hello,
    "open": DShuffleScheduler.open,
    "report": DShuffleScheduler.report,
    "alive": DShuffleScheduler.alive,
    "retiring": DShuffleScheduler.retiring,
    "waiting": DShuffleScheduler.waiting,
    "close": DShuffleScheduler.close_session,
}
"""What clients and workers may ask of the plugin, by name."""

OF_SESSION: dict[str, Callable[..., Any]] = {
    "advance": Coordinator.advance,
    "prefetch": Coordinator.begin,
    "snapshot": Coordinator.snapshot,
    "training": Coordinator.training_times,
    "trained": Coordinator.trained_samples,
    "unfinished": unfinished_tasks,
    "members": Coordinator.members,
    "membership": Coordinator.membership,
    "end_collective": Coordinator.end_collective,
    "reader": Coordinator.substitute_reader,
}
"""What clients and workers may ask of an open session, by name."""


def _carry_out(scheduler: Scheduler, operation: str, **message: Any) -> Any:
    """Carry out what another process asks for. Dask keeps handlers for ever, and so this looks the plugin up."""
    plugin: DShuffleScheduler = scheduler.extensions[PLUGIN]
    if operation in OPERATIONS:
        return OPERATIONS[operation](plugin, **message)
    return OF_SESSION[operation](plugin.coordinator(message.pop("session_id")), **message)
