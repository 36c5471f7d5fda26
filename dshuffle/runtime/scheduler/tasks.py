"""Partition tasks in the tables of Dask's scheduler: what became of each, and those that cannot run.

A task is restricted to the worker of its rank. When the rank moves, the restriction changes, and Dask moves the task.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Any

from distributed import Scheduler
from distributed.core import Status
from distributed.metrics import monotonic
from distributed.protocol.pickle import dumps
from distributed.scheduler import TaskState, WorkerState

from dshuffle.errors import ClusterError, DShuffleError, WorkerLost
from dshuffle.runtime.messages import UnfinishedTask
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.session_spec import resources_in_words
from dshuffle.runtime.task_keys import TaskPlace, place_of_key

logger = logging.getLogger(__name__)


FINISHED, FAILED, CANCELLED, LOST = "finished", "failed", "cancelled", "lost"
"""What became of a task. If the worker that holds the result of a finished one is lost, the task has still trained."""

OUTCOME_OF_STATE = {"memory": FINISHED, "erred": FAILED, "forgotten": CANCELLED}
"""Outcome of a task that enters a state of Dask. Dask forgets a task that has no outcome if nobody wants it."""

WARN_AFTER = 10.0
"""Seconds after which the clients are told that a task waits for a paused worker."""

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


class PartitionTasks:
    """The partition tasks of all sessions, which are by id."""

    def __init__(self, scheduler: Scheduler, sessions: Mapping[str, Coordinator]) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._warned: set[Any] = set()  # tasks that the clients know to wait
        self._watching = False

    def enter_state(self, key: Any, state: str) -> None:
        """Take note of a task that enters a state of Dask."""
        place = place_of_key(key)
        if place is None:
            return
        session = self._sessions.get(place.session_id)
        if session is not None and state in OUTCOME_OF_STATE:
            record_outcome(session.outcomes, place, OUTCOME_OF_STATE[state])
        if state in ("no-worker", "processing"):
            asyncio.get_running_loop().call_soon(self._look, key)  # not now: the transition is still being made

    def move(self, session: Coordinator) -> None:
        """Look at all tasks of a session, because some of its ranks have moved, or it has ended."""
        for key in list(self._scheduler.tasks):
            if (place := place_of_key(key)) is not None and place.session_id == session.spec.session_id:
                self._look(key)

    def waiting_for(self) -> list[str]:
        """Which workers tasks are waiting for, and why, in words."""
        tasks = [task for task in self._scheduler.unrunnable if place_of_key(task.key)]
        places = [
            (task, self._scheduler.workers.get(each)) for task in tasks for each in task.worker_restrictions or ()
        ]
        return [_why(task, worker)[0] for task, worker in places if worker is not None]

    def _look(self, key: Any) -> None:
        """Move a task to the worker of its rank, or let it fail if it cannot run any more."""
        task, place = self._scheduler.tasks.get(key), place_of_key(key)
        if task is None or place is None or task.state not in ("no-worker", "processing"):
            return
        session, unrunnable, rank = self._sessions.get(place.session_id), task.state == "no-worker", place.rank
        if task.nbytes >= 0 and (session is None or place.epoch < session.epoch):  # it had a result
            lost = f"the worker with the result of rank {rank} in epoch {place.epoch} was lost"
            hint = "Gather the results of an epoch before the next one"
            self._fail(task, WorkerLost(f"{lost} after that epoch had ended, so the task cannot run again. {hint}"))
            return
        if session is None or session.ended:  # a worker that runs says so itself
            if unrunnable or (session is not None and rank in session.machine.losses):
                self._lose(task, place, session)
            return
        worker = self._scheduler.workers.get(session.addresses[rank])
        if rank in session.machine.newcomers:
            self._restrict(task, NOBODY)
        elif rank in session.machine.losses:
            return
        elif worker is not None and task.worker_restrictions not in (None, {worker.address}):
            self._restrict(task, worker.address)
        elif unrunnable and worker is not None:
            self._check_wait(task, worker, session.spec.settings.paused_timeout)
        elif unrunnable:
            self._lose(task, place, session)
        if unrunnable and not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_later(1.0, self._watch)

    def _watch(self) -> None:
        self._watching = False
        for task in list(self._scheduler.unrunnable):
            self._look(task.key)

    def _check_wait(self, task: TaskState, worker: WorkerState, limit: float) -> None:
        seconds, (reason, hint) = monotonic() - self._scheduler.unrunnable[task], _why(task, worker)
        if seconds >= limit:
            waited = f"a task waited {limit:g} s (dshuffle.paused-timeout) because {reason}"
            self._fail(task, ClusterError(f"{waited}. {hint}"))
        elif seconds >= WARN_AFTER and task.key not in self._warned:
            self._warned.add(task.key)
            message = f"dshuffle: a task is waiting because {reason}"
            logger.warning(message)
            self._scheduler.log_event("warn", {"message": dumps(message), "category": dumps(RuntimeWarning)})

    def _restrict(self, task: TaskState, address: str) -> None:
        if task.worker_restrictions == {address}:
            return
        self._scheduler.set_restrictions({task.key: {address}})
        # A task that runs on the worker before is given back, and then sent to the new one.
        finish: Any = "processing" if task.state == "no-worker" else "released"
        self._scheduler.transitions({task.key: finish}, stimulus_id=f"dshuffle-replaced-{task.key}")
        if task in self._scheduler.unrunnable:  # its new worker may be paused: from now on it waits for that
            self._scheduler.unrunnable[task] = monotonic()

    def _lose(self, task: TaskState, place: TaskPlace, session: Coordinator | None) -> None:
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


def _why(task: TaskState, worker: WorkerState) -> tuple[str, str]:
    """Why Dask does not run a task on the worker of its rank, and what to do."""
    place = place_of_key(task.key)
    name = f"rank {place.rank if place else '?'} ({worker.address})"
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
