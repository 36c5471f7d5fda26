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
import itertools
import logging
from collections.abc import Callable, Collection
from typing import Any

from distributed import Scheduler, Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import monotonic
from distributed.protocol.pickle import dumps, loads
from distributed.scheduler import TaskState, WorkerState

from dshuffle.errors import CacheBudgetError, ClusterError, DShuffleError, WorkerLost
from dshuffle.exchange.kept_partition import KeptFolder
from dshuffle.planning import AutoDelivery
from dshuffle.runtime.messages import (
    OpenedSession,
    TaskPlace,
    UnfinishedTask,
    message_in,
    place_of_key,
    replying,
    within,
)
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.scheduler.members import (
    SETUP_TIMEOUT,
    KeptPartitions,
    ask_all,
    choose_members,
    workers_set_up,
)
from dshuffle.runtime.scheduler.snapshot import SessionSnapshot, add_page
from dshuffle.runtime.session_spec import PLUGIN, PROTOCOL, SessionRequest, resources_in_words
from dshuffle.runtime.worker.worker_plugin import DShuffleWorker

logger = logging.getLogger(__name__)

FINISHED, FAILED, CANCELLED, LOST = "finished", "failed", "cancelled", "lost"
"""What became of a task. If the worker that holds the result of a finished one is lost, the task has still trained."""

OUTCOME_OF_STATE = {"memory": FINISHED, "erred": FAILED, "forgotten": CANCELLED}
"""Outcome of a task that enters a state of Dask. Dask forgets a task that has no outcome if nobody wants it."""

NOBODY = "nobody"
"""In place of a worker's address in the restrictions of a task that no worker can run yet."""


def record_outcome(outcomes: dict[TaskPlace, str], place: TaskPlace, outcome: str) -> None:
    """Record the outcome of a task, which replaces an earlier one unless the task has finished."""
    before = outcomes.get(place)
    # A result, or an error, that is not needed any longer is forgotten.
    if before != FINISHED and (before is None or outcome != CANCELLED):
        outcomes[place] = outcome


def unfinished_tasks(session: Coordinator, epoch: int, calls: list[int]) -> list[UnfinishedTask]:
    """The tasks of some calls in an epoch that did not finish, each with its outcome."""
    unfinished = []
    for call, rank in itertools.product(calls, session.ranks):
        outcome = session.outcomes.get(TaskPlace(session.spec.session_id, epoch, call, rank), CANCELLED)
        if outcome != FINISHED:
            unfinished.append(UnfinishedTask(call, rank, outcome))
    return unfinished


def _why(task: TaskState, worker: WorkerState) -> str:
    """Why Dask does not run a task on the worker of its rank."""
    place = place_of_key(task.key)
    words = f"rank {place.rank if place else '?'} ({worker.address}) is {worker.status.name} in Dask"
    if needs := task.resource_restrictions:
        has = resources_in_words(worker.resources) or "none"
        words += f" and has the resources {has}, where it needs {resources_in_words(needs)}"
    return words


RETIREMENTS = ("retire-workers", "worker-close-gracefully")
"""How Dask names the reasons for which it removes workers that can still send rows."""


class DShuffleScheduler(SchedulerPlugin):
    """Scheduler plugin that manages all sessions. The first :class:`~dshuffle.Shuffler` of a cluster installs it."""

    name = PLUGIN
    idempotent = True
    _scheduler: Scheduler

    def __init__(self) -> None:
        self.coordinators: dict[str, Coordinator] = {}
        self._opening: set[str] = set()
        self._freeing: set[Coordinator] = set()
        self._watching = False  # whether tasks that wait are looked at again

    async def start(self, scheduler: Scheduler) -> None:
        """Register the handlers, then install the worker plugin on all current and future workers."""
        # If two clients connect at the same time, both start a plugin. They share the state of the first one.
        first = scheduler.extensions.setdefault(PLUGIN, self)
        self.__dict__ = first.__dict__
        if first is self:
            self._scheduler = scheduler
            for name in (*OPERATIONS, *OF_SESSION):
                scheduler.handlers[f"dshuffle_{name}"] = replying(name, functools.partial(_carry_out, scheduler, name))
            add_page(scheduler, self.snapshots)
        await self._install()

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
        session, reasons = self.coordinators.get(session_id), self._waiting_tasks()
        if session is not None:
            exchange = "" if tasks and not session.machine.missing else session.machine.waiting_for()
            reasons += [exchange, *(session.silent_tasks() if tasks else ())]
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

    async def open(self, session_id: str, order: bytes, protocol: int = 0) -> OpenedSession:
        """Assign ranks and open the session on all participants, or on none if that fails.

        The order is a pickled :class:`SessionRequest`, which is read only if it has this protocol.
        """
        if protocol != PROTOCOL:
            raise ClusterError(
                f"the client uses protocol {protocol} and the scheduler uses protocol {PROTOCOL}. "
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
        ready = await workers_set_up(self._scheduler, order.settings, order.choice, fewest)
        # Sessions that have ended may still take memory.
        ended = [*self.coordinators.values(), *self._freeing]
        await asyncio.gather(*(coordinator.freed() for coordinator in ended if not coordinator.is_source))
        self._check_client_waits(order)
        source = self._source(order)
        former = None if source is None else source.partitions()
        kept = {} if former is not None else await self._kept_partitions(order, ready)
        spec = choose_members(self._scheduler, self._with_present_ranks(order), ready, former, kept)
        coordinator = Coordinator(
            self._scheduler, spec, order.client_id, AutoDelivery(order.deliveries), self._move_tasks
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
        return OpenedSession(
            addresses=spec.addresses,
            left_out=tuple(sorted(paused - ready)),
            history=spec.shuffle.history,
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
        if (place := place_of_key(key)) is None:
            return
        session = self.coordinators.get(place.session_id)
        if session is not None and finish in OUTCOME_OF_STATE:
            record_outcome(session.outcomes, place, OUTCOME_OF_STATE[finish])
        if finish in ("no-worker", "processing"):
            asyncio.get_running_loop().call_soon(self._look, key)  # not now: the transition is still being made

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
        # With another history, nobody has trained in that session.
        if coordinator and carried and carried.places and carried.history == coordinator.spec.shuffle.history:
            return dataclasses.replace(request, carried=dataclasses.replace(carried, places=coordinator.places))
        return request

    async def _kept_partitions(self, request: SessionRequest, ready: Collection[str]) -> KeptPartitions:
        """The partitions that earlier sessions have kept on the disks of the workers."""
        directory = request.options.cache_directory
        if directory is None or request.kept_as is None or not request.reads_kept:
            return {}
        query = {"directory": directory, "dataset": request.dataset.identity}
        replies = await ask_all(self._scheduler, ready, request.settings.heartbeat, "kept", **query)
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

    # -- partition tasks: each is restricted to the worker of its rank, and moves with it ------------------------------

    def _move_tasks(self, session: Coordinator) -> None:
        """Look at all tasks of a session, because some of its ranks have moved, or it has ended."""
        for key in list(self._scheduler.tasks):
            if (place := place_of_key(key)) is not None and place.session_id == session.spec.session_id:
                self._look(key)

    def _waiting_tasks(self) -> list[str]:
        """Which workers tasks are waiting for, and why, in words."""
        workers = self._scheduler.workers
        return [
            _why(task, workers[address])
            for task in self._scheduler.unrunnable
            if place_of_key(task.key)
            for address in task.worker_restrictions or ()
            if address in workers
        ]

    def _look(self, key: Any) -> None:
        """Move a task to the worker of its rank, or let it fail if it cannot run any more."""
        task, place = self._scheduler.tasks.get(key), place_of_key(key)
        if task is None or place is None or task.state not in ("no-worker", "processing"):
            return
        session, unrunnable, rank = self.coordinators.get(place.session_id), task.state == "no-worker", place.rank
        if task.nbytes >= 0 and (session is None or place.epoch < session.epoch):  # it had a result
            lost = f"the worker with the result of rank {rank} in epoch {place.epoch} was lost"
            hint = "Gather the results of an epoch before the next one"
            self._fail(task, WorkerLost(f"{lost} after that epoch had ended, so the task cannot run again. {hint}"))
            return
        if session is None or session.ended:  # a worker that runs says so itself
            if unrunnable or (session is not None and rank in session.machine.losses):
                self._lose_task(task, place, session)
            return
        worker = self._scheduler.workers.get(session.addresses[rank])
        if rank in session.machine.newcomers:
            self._restrict(task, NOBODY)
        elif rank in session.machine.losses:
            return
        elif worker is not None and task.worker_restrictions not in (None, {worker.address}):
            self._restrict(task, worker.address)
        elif unrunnable and worker is None:
            self._lose_task(task, place, session)
        elif unrunnable and worker is not None:
            limit = session.spec.settings.paused_timeout
            if monotonic() - self._scheduler.unrunnable[task] >= limit:
                waited = f"a task waited {limit:g} s (dshuffle.paused-timeout) because {_why(task, worker)}"
                hint = "Use workers with more memory or these resources, or lower memory_limit or cache_fraction"
                self._fail(task, ClusterError(f"{waited}. {hint}"))
        if unrunnable and not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_later(1.0, self._watch)

    def _watch(self) -> None:
        self._watching = False
        for task in list(self._scheduler.unrunnable):
            self._look(task.key)

    def _restrict(self, task: TaskState, address: str) -> None:
        if task.worker_restrictions == {address}:
            return
        self._scheduler.set_restrictions({task.key: {address}})
        # A task that runs on the worker before is given back, and then sent to the new one.
        finish: Any = "processing" if task.state == "no-worker" else "released"
        self._scheduler.transitions({task.key: finish}, stimulus_id=f"dshuffle-replaced-{task.key}")
        if task in self._scheduler.unrunnable:  # its new worker may be paused: from now on it waits for that
            self._scheduler.unrunnable[task] = monotonic()

    def _lose_task(self, task: TaskState, place: TaskPlace, session: Coordinator | None) -> None:
        where = ", ".join(task.worker_restrictions or ()) if session is None else session.addresses[place.rank]
        words = f"the worker that owned rank {place.rank} ({where}) has left the cluster and its partition is lost"
        cause = None if session is None else session.cause
        self._fail(task, cause or WorkerLost(f"{words}. Make a new Shuffler"))
        if session is not None:
            record_outcome(session.outcomes, place, LOST)

    def _fail(self, task: TaskState, error: DShuffleError) -> None:
        """Let a task that waits or runs fail with an error."""
        stimulus_id, text = f"dshuffle-unrunnable-{task.key}", str(error)
        recommendations = self._scheduler.transition(
            task.key, "erred", exception=dumps(error), exception_text=text, cause=task.key, stimulus_id=stimulus_id
        )
        self._scheduler.transitions(recommendations, stimulus_id=stimulus_id)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "open": DShuffleScheduler.open,
    "retiring": DShuffleScheduler.retiring,
    "waiting": DShuffleScheduler.waiting,
    "close": DShuffleScheduler.close_session,
}
"""What clients and workers may ask of the plugin, by name."""

OF_SESSION: dict[str, Callable[..., Any]] = {
    "report": Coordinator.vote,
    "alive": Coordinator.alive,
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
    session_id = message.pop("session_id")
    if operation in ("report", "alive") and session_id not in plugin.coordinators:  # it was closed meanwhile
        return None
    return OF_SESSION[operation](plugin.coordinator(session_id), **message)
