"""What became of the tasks of a session: written down by the scheduler, where it is known."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Any

from dshuffle.runtime.messages import UnfinishedTask
from dshuffle.runtime.task_keys import TaskPlace, place_of_key


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
    """The outcomes of the tasks of one session, from its current epoch on.

    Examples
    --------
    >>> outcomes = TaskOutcomes()
    >>> outcomes.enter_state("train-dshuffle-0f3a-3-0-0", "memory")
    >>> outcomes.enter_state("train-dshuffle-0f3a-3-0-1", "forgotten")
    >>> outcomes.unfinished(epoch=3, calls=[0], n_ranks=3)
    [UnfinishedTask(call=0, rank=1, outcome='cancelled'), UnfinishedTask(call=0, rank=2, outcome='cancelled')]
    """

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
        """The tasks of an epoch that have ended without finishing.

        Parameters
        ----------
        calls
            Numbers of the calls that submitted the tasks. All of these tasks have ended, as far as their client knows.
        n_ranks
            Number of tasks of a call.

        Returns
        -------
        list of UnfinishedTask
            A task that never reached the scheduler was cancelled: the connection of its client was lost.
        """
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
