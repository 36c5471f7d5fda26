"""Results of partition tasks that are lost with their workers after the epoch has ended.

Dask runs such a task again if a client still needs the result. But no worker holds the partition of that epoch.
"""

from __future__ import annotations

import asyncio

from distributed import Scheduler

from dshuffle.errors import WorkerLost
from dshuffle.runtime.scheduler.unrunnable import fail_task
from dshuffle.runtime.task_keys import TaskPlace, place_of_key


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
        """Let a task fail that Dask runs again, if its session has closed or is on a later epoch.

        Parameters
        ----------
        key
            Its key.
        scheduler
            The Dask scheduler.
        epoch
            The epoch that its session is on; None if the session is closed.
        """
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
