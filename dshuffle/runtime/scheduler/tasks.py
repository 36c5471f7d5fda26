"""The tasks of sessions in Dask's scheduler: those whose worker is gone, what became of each, and late reruns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from distributed import Scheduler
from distributed.core import Status
from distributed.protocol.pickle import dumps
from distributed.scheduler import TaskState, WorkerState

from dshuffle.errors import ClusterError, DShuffleError, WorkerLost
from dshuffle.runtime.messages import UnfinishedTask
from dshuffle.runtime.session_spec import resources_in_words
from dshuffle.runtime.task_keys import TaskPlace, place_of_key, rank_of_key, session_of_key

logger = logging.getLogger(__name__)


class Outcome(StrEnum):
    """What became of a task.

    ``FINISHED`` is final: if the worker that holds the result is lost later, the task has still trained.
    """

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


OUTCOME_OF_STATE = {"memory": Outcome.FINISHED, "erred": Outcome.FAILED, "forgotten": Outcome.CANCELLED}
"""Outcome of a task that enters a state of Dask. Dask forgets a task that has no outcome if nobody wants it."""


class TaskOutcomes:
    """The outcomes of the tasks of one session, from its current epoch on."""

    def __init__(self) -> None:
        self._outcomes: dict[TaskPlace, Outcome] = {}

    def enter_state(self, key: Any, state: str) -> None:
        """Record that a task has entered a state of Dask."""
        outcome = OUTCOME_OF_STATE.get(state)
        if outcome is Outcome.CANCELLED and place_of_key(key) in self._outcomes:
            return  # its result, or its error, is not needed any longer
        if outcome is not None:
            self.record(key, outcome)

    def record(self, key: Any, outcome: Outcome) -> None:
        """Record the outcome of a task, which replaces an earlier one unless the task has finished."""
        place = place_of_key(key)
        if place is not None and self._outcomes.get(place) is not Outcome.FINISHED:
            self._outcomes[place] = outcome

    def unfinished(self, epoch: int, calls: Collection[int], n_ranks: int) -> list[UnfinishedTask]:
        """The tasks of an epoch that have ended without finishing."""
        places = [TaskPlace(epoch, call, rank) for call in calls for rank in range(n_ranks)]
        outcomes = {place: self._outcomes.get(place, Outcome.CANCELLED) for place in places}
        return [
            UnfinishedTask(place.call, place.rank, str(outcome))
            for place, outcome in outcomes.items()
            if outcome is not Outcome.FINISHED
        ]

    def begin(self, epoch: int) -> None:
        """Forget the outcomes of the epochs before."""
        self._outcomes = {place: outcome for place, outcome in self._outcomes.items() if place.epoch >= epoch}


WARN_AFTER = 10.0
"""Seconds after which the clients are told that a task waits for a paused worker."""

NOBODY = "nobody"
"""In place of a worker's address in the restrictions of a task that no worker can run yet."""


class Session(Protocol):
    """The session of a task."""

    @property
    def addresses(self) -> Mapping[int, str]:
        """Address of every rank."""

    @property
    def ended(self) -> bool:
        """Whether the session has ended."""

    @property
    def cause(self) -> DShuffleError | None:
        """Why the session has ended, unless its client has closed it."""

    @property
    def replacing(self) -> bool:
        """Whether lost workers are being replaced."""

    @property
    def new_ranks(self) -> Collection[int]:
        """Ranks whose new workers do not hold their partitions yet."""

    @property
    def paused_timeout(self) -> float:
        """Seconds that a task may wait for a paused worker."""

    @property
    def outcomes(self) -> TaskOutcomes:
        """What became of its tasks."""


@dataclass(slots=True)
class WaitingTask:
    """Since when a task waits, and for which session."""

    since: float
    session: Session | None
    warned: bool = False


class UnrunnableTasks:
    """The partition tasks in the state ``no-worker``. They are looked at every second until none is left."""

    def __init__(self) -> None:
        self._waiting: dict[Any, WaitingTask] = {}
        self._watching = False

    def add(self, key: Any, scheduler: Scheduler, session: Session | None) -> None:
        """Watch a task of a session."""
        loop = asyncio.get_running_loop()
        self._waiting.setdefault(key, WaitingTask(loop.time(), session))
        loop.call_soon(self.check, scheduler)  # not now: the transition to no-worker is still being made
        if not self._watching:
            self._watching = True
            loop.call_later(1.0, self._watch, scheduler)

    def check(self, scheduler: Scheduler) -> None:
        """Move tasks to the new workers of their ranks; fail those whose worker has left or is paused for too long."""
        now = asyncio.get_running_loop().time()
        for key, waiting in list(self._waiting.items()):
            task = scheduler.tasks.get(key)
            if task is None or task.state != "no-worker":
                del self._waiting[key]
                continue
            session = waiting.session
            if session is not None and session.replacing and not session.ended:
                waiting.since = now
                continue
            pinned_to = task.worker_restrictions or set()
            address = ", ".join(pinned_to) if session is None else session.addresses[rank_of_key(key)]
            worker = scheduler.workers.get(address)
            if session is None or session.ended or worker is None:
                lost = f"the worker that owned rank {rank_of_key(key)} ({address}) has left the cluster"
                error = WorkerLost(f"{lost} and its partition is lost. Make a new Shuffler")
                fail_task(task, scheduler, error if session is None else session.cause or error)
                if session is not None:
                    session.outcomes.record(key, Outcome.LOST)
            elif pinned_to != {address}:
                move_to_rank(key, scheduler, session)
            elif now - waiting.since >= session.paused_timeout:
                reason, hint = _why(task, worker)
                waited = f"a task waited {session.paused_timeout:g} s (dshuffle.paused-timeout) because {reason}"
                fail_task(task, scheduler, ClusterError(f"{waited}. {hint}"))
            elif now - waiting.since >= WARN_AFTER and not waiting.warned:
                waiting.warned = True
                message = f"dshuffle: a task is waiting because {_why(task, worker)[0]}"
                logger.warning(message)
                scheduler.log_event("warn", {"message": dumps(message), "category": dumps(RuntimeWarning)})

    def waiting_for(self, scheduler: Scheduler) -> list[str]:
        """Which workers tasks are waiting for, and why, in words."""
        reasons = []
        for key in self._waiting:
            task = scheduler.tasks.get(key)
            if task is not None:
                workers = map(scheduler.workers.get, task.worker_restrictions or ())
                reasons += [_why(task, worker)[0] for worker in workers if worker is not None]
        return reasons

    def _watch(self, scheduler: Scheduler) -> None:
        self.check(scheduler)
        self._watching = bool(self._waiting)
        if self._watching:
            asyncio.get_running_loop().call_later(1.0, self._watch, scheduler)


def move_to_rank(key: Any, scheduler: Scheduler, session: Session) -> None:
    """Move a task that has not ended to the present worker of its rank, if it is pinned to another one.

    While that worker does not hold the partition, the task is not given to any worker.
    """
    task, rank = scheduler.tasks.get(key), rank_of_key(key)
    is_new = rank in session.new_ranks
    address = NOBODY if is_new else session.addresses.get(rank, "")
    if task is None or not (is_new or address in scheduler.workers) or task.worker_restrictions in (None, {address}):
        return
    scheduler.set_restrictions({key: {address}})
    if task.state in ("no-worker", "processing"):
        # A task that runs on the worker before is given back, and then sent to the new one.
        finish: Any = "processing" if task.state == "no-worker" else "released"
        scheduler.transitions({key: finish}, stimulus_id=f"dshuffle-replaced-{key}")


def have_unfinished_tasks(ranks: Collection[int], session_id: str, scheduler: Scheduler) -> bool:
    """Whether a task of some ranks of a session waits or runs."""
    return any(
        session_of_key(key) == session_id and rank_of_key(str(key)) in ranks
        for key, task in scheduler.tasks.items()
        if task.state in ("waiting", "queued", "no-worker", "processing")
    )


def _why(task: TaskState, worker: WorkerState) -> tuple[str, str]:
    """Why Dask does not run a task on the worker of its rank, and what to do."""
    name = f"rank {rank_of_key(str(task.key))} ({worker.address})"
    needs = task.resource_restrictions or {}
    lacking = [key for key, amount in needs.items() if worker.resources.get(key, 0) < amount]
    if worker.status is Status.running and lacking:
        words = resources_in_words(needs)
        hint = f'Start workers with --resources "{words}" and choose them (Shuffler(resources=...)), or ask for less'
        return f"it needs the resources {words}, and {name} has {resources_in_words(worker.resources) or 'none'}", hint
    memory = ""
    if worker.status is Status.paused and worker.memory_limit:
        memory = f" at {100 * worker.memory.process / worker.memory_limit:.0f} % of its memory limit"
    hint = "Give the worker more memory, lower memory_limit or cache_fraction, or use more workers"
    return f"{name} is {worker.status.name} in Dask{memory}", hint


def fail_task(task: TaskState, scheduler: Scheduler, error: DShuffleError) -> None:
    """Let a task that waits or runs fail with an error."""
    stimulus_id = f"dshuffle-unrunnable-{task.key}"
    recommendations = scheduler.transition(
        task.key, "erred", exception=dumps(error), exception_text=str(error), cause=task.key, stimulus_id=stimulus_id
    )
    scheduler.transitions(recommendations, stimulus_id=stimulus_id)


class LateReruns:
    """Keys of partition tasks whose results Dask no longer has, and which it may run again."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def note(self, key: str, start: str, finish: str) -> None:
        """Note a transition of a task on the scheduler."""
        if start == "memory" and finish == "released":
            self._keys.add(key)
        elif finish in ("memory", "erred", "forgotten"):
            self._keys.discard(key)

    def fail_if_late(self, key: str, scheduler: Scheduler, epoch: int | None) -> None:
        """Let a task fail that Dask runs again, if its session has closed or is on a later epoch."""
        place = place_of_key(key)
        if place is None or key not in self._keys or (epoch is not None and place.epoch >= epoch):
            return
        asyncio.get_running_loop().call_soon(
            _fail, key, place, scheduler
        )  # not now: the transition is still being made


def _fail(key: str, place: TaskPlace, scheduler: Scheduler) -> None:
    task = scheduler.tasks.get(key)
    if task is not None and task.state in ("no-worker", "processing"):
        lost = f"the worker with the result of rank {place.rank} in epoch {place.epoch} was lost"
        hint = "Gather the results of an epoch before the next one"
        error = WorkerLost(f"{lost} after that epoch had ended, so the task cannot run again. {hint}")
        fail_task(task, scheduler, error)
