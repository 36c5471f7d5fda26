"""The tasks of an epoch: how they are submitted, and whether they have ended."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import dask
from distributed import Client, Future, wait

from dshuffle.errors import ClusterError, InvalidParameter, WorkerLost
from dshuffle.planning import name_of
from dshuffle.runtime.client.session_client import PATIENCE, SessionClient
from dshuffle.runtime.messages import UnfinishedTask
from dshuffle.runtime.session_spec import PerRank
from dshuffle.runtime.task_keys import rank_of_key, task_key, task_name
from dshuffle.runtime.worker.worker_plugin import run_on_partition


def submit_to_all(
    client: Client,
    addresses: Sequence[str],
    session_id: str,
    epoch: int,
    call: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> list[Future[Any]]:
    """Submit one task ``fn(partition, *args, **kwargs)`` to each worker, if possible in one message."""
    ranks = range(len(addresses))
    for value in (*args, *kwargs.values()):
        if isinstance(value, PerRank) and len(value.values) != len(ranks):
            raise InvalidParameter.of("len(PerRank.values)", len(value.values), f"{len(ranks)}, one value per worker")
    values = [value for values in (*args, *kwargs.values()) if isinstance(values, PerRank) for value in values.values]
    # Tasks in one message share their arguments if the scheduler and the workers are in one process. Dask also warns
    # about any message of 10 MiB or more, even if it has a separate part for each worker.
    apart = addresses[0].startswith("inproc://") or not all(isinstance(value, Future) for value in values)
    futures: list[Future[Any]] = []
    name = task_name(fn, args)
    # ``client.map`` takes one set of workers for all tasks. The scheduler calls this function for each task instead.
    with dask.annotate(workers=functools.partial(worker_of, tuple(addresses))):  # type: ignore[attr-defined]
        for group in [[rank] for rank in ranks] if apart else [list(ranks)]:
            futures += client.map(
                run_on_partition,
                [session_id] * len(group),
                group,
                [epoch] * len(group),
                [fn] * len(group),
                [[PerRank.of(value, rank) for value in args] for rank in group],
                [{name: PerRank.of(value, rank) for name, value in kwargs.items()} for rank in group],
                key=[task_key(name, session_id, epoch, call, rank) for rank in group],
                pure=False,
            )
    return futures


def worker_of(addresses: Sequence[str], key: str) -> list[str]:
    """Workers on which a task may run, from the rank at the end of its key. The scheduler calls this function."""
    return [addresses[rank_of_key(key)]]


Call: TypeAlias = "list[Future[Any]]"  # Dask 2025.9 does not know types of results
"""The tasks of one call of :meth:`dshuffle.Epoch.map`, by rank."""


@dataclass(slots=True)
class EpochTasks:
    """The tasks of one epoch, call by call.

    Parameters
    ----------
    n_calls
        Number of calls so far. Calls whose tasks are not waited for count, too.
    calls
        Number of a call -> its tasks, for the calls whose tasks must end before the epoch does.
    accepted
        Numbers of the calls whose tasks need not finish.
    error
        The error that has kept the epoch from ending; None if there was none.
    interrupted
        Whether the session was lost, and the loop has heard of it otherwise than by a task.
    """

    epoch: int
    n_calls: int = 0
    calls: dict[int, Call] = field(default_factory=dict)
    accepted: set[int] = field(default_factory=set)
    error: BaseException | None = None
    interrupted: bool = False
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
        """Wait for all tasks, and end the epoch."""
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
