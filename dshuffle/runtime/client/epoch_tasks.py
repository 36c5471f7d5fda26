"""The tasks of an epoch, and whether the epoch has ended: when all of them have finished, or the user accepts it."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from distributed import Future, wait

from dshuffle.errors import ClusterError, InvalidParameter, WorkerLost
from dshuffle.planning import name_of
from dshuffle.runtime.client.session_client import PATIENCE, SessionClient
from dshuffle.runtime.messages import UnfinishedTask

Call: TypeAlias = "list[Future[Any]]"  # Dask 2025.9 does not know types of results
"""The tasks of one call of :meth:`dshuffle.Epoch.map`, by rank."""


@dataclass(slots=True)
class EpochTasks:
    """The tasks of one epoch, call by call.

    Parameters
    ----------
    epoch
        Number of the epoch.
    n_calls
        Number of calls so far. Calls whose tasks are not waited for count, too.
    calls
        Number of a call -> its tasks, for the calls whose tasks must end before the epoch does.
    accepted
        Numbers of the calls whose tasks need not finish.
    error
        The error that has kept the epoch from ending; None if there was none.
    """

    epoch: int
    n_calls: int = 0
    calls: dict[int, Call] = field(default_factory=dict)
    accepted: set[int] = field(default_factory=set)
    error: BaseException | None = None
    _called_at: float = 0.0

    @property
    def begun(self) -> bool:
        """Whether there was a task."""
        return self.n_calls > 0

    @property
    def any_call_done(self) -> bool:
        """Whether all tasks of some call have ended."""
        return any(all(future.done() for future in call) for call in self.calls.values())

    @property
    def futures(self) -> list[Future[Any]]:
        """The tasks of all calls."""
        return [future for call in self.calls.values() for future in call]

    @property
    def waiting_seconds(self) -> float:
        """Seconds since the last call, if a task has not ended; otherwise 0."""
        return time.monotonic() - self._called_at if any(not future.done() for future in self.futures) else 0.0

    def next_call(self) -> int:
        """The number of a new call."""
        self.n_calls, self._called_at = self.n_calls + 1, time.monotonic()
        self.error = None
        return self.n_calls - 1

    def forget(self, call: Call) -> None:
        """Do not wait for the tasks of a call."""
        del self.calls[self._number(call)]

    def accept(self, call: Call | None) -> None:
        """Let the epoch end although tasks of a call, or of all calls so far, did not finish."""
        self.accepted |= set(self.calls) if call is None else {self._number(call)}
        self.error = None

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()

    def wait(self, session: SessionClient) -> None:
        """Wait until all tasks have ended."""
        futures = self.futures
        with session.client.as_current():  # the default would be the client created last
            while pending := [future for future in futures if not future.done()]:
                try:
                    wait(pending, timeout=PATIENCE)
                except TimeoutError:
                    session.waiting_for()  # raises an error if the scheduler is gone while this is closed
                except CancelledError:
                    continue

    def end(self, session: SessionClient) -> None:
        """Wait for all tasks, and end the epoch.

        Raises
        ------
        Exception
            If tasks failed, were cancelled or lost. The error of a task is raised as it is. A lost worker may have
            caused other errors or be caused by them, so it is raised if there is no other error.
        """
        try:
            self._end(session)
        except Exception as error:
            self.error = error
            raise

    def _end(self, session: SessionClient) -> None:
        self.wait(session)
        numbers = sorted(self.calls.keys() - self.accepted)
        unfinished: tuple[UnfinishedTask, ...] = ()
        if numbers:
            unfinished = session.ask(tuple[UnfinishedTask, ...], "unfinished", epoch=self.epoch, calls=numbers)
        if not unfinished:
            self.clear()
            self.error = None
            return
        futures = [self.calls[task.call][task.rank] for task in unfinished]
        errors = [future.exception() for future in futures if future.status == "error"]
        errors.sort(key=lambda error: isinstance(error, WorkerLost))  # stable: by call and rank
        words = f"tasks of epoch {self.epoch} did not finish, so their samples were not trained on"
        error: BaseException = ClusterError(words) if not errors or errors[0] is None else errors[0]
        note = self._in_words(unfinished)
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise error

    def _number(self, call: Call) -> int:
        for number, futures in self.calls.items():
            if futures is call or (isinstance(call, list) and futures == call):
                return number
        raise InvalidParameter.of("futures", call, f"a list that a call of map has returned in epoch {self.epoch}")

    def _in_words(self, unfinished: tuple[UnfinishedTask, ...]) -> str:
        counts = Counter(task.outcome for task in unfinished)
        ranks = sorted({task.rank for task in unfinished})
        names = ", ".join(map(name_of, ranks[:5])) + (", ..." if len(ranks) > 5 else "")
        outcomes = " and ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        return (
            f"Tasks of epoch {self.epoch}: {outcomes} ({names}). To go on without their results, also after you have "
            "run other tasks in their place, call epoch.accept(), and then shuffler.epochs() for the other epochs"
        )
