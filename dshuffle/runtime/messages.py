"""What clients, the scheduler and workers tell each other: types, their fields, replies, and keys of tasks."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
from distributed.protocol.serialize import ToPickle

from dshuffle.errors import ClusterError, DShuffleError
from dshuffle.planning import WorkerHistory
from dshuffle.planning.remainder import SAME_BUILD, SampleDigest
from dshuffle.records import Measures

logger = logging.getLogger(__name__)


T = TypeVar("T")


def to_fields(message: Any) -> dict[str, Any]:
    """The fields of a message by name."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    return fields


def from_fields(kind: type[T], fields: object, sender: str) -> T:
    """The message of a type that :func:`to_fields` wrote."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        reason = f"{sender} sent what is not a message of the type {kind.__name__} ({error}). {SAME_BUILD}"
        raise ClusterError(reason, transient=False) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a participant counted in a run. The scheduler checks that the counts of all participants fit together."""

    digest: int  # digest of what the plan depends on, the same for all
    # Samples that have to move, packets that carry them, and rows in these packets. They are sums over all workers, or
    # those of one worker that planned its own part.
    needed: int = 0
    packets: int = 0
    expected: int
    leaving: int | None = None  # rows that a worker which planned its own part sends to others; otherwise None
    rows: int
    # Digest of the samples that the worker will train on, and its part of the digest of all samples that are due. None
    # for a server.
    drawn: SampleDigest | None = None
    due: SampleDigest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Whether a participant is ready to swap to the epoch of a run."""

    reason: str | None = None  # why it is not; None if it is
    again: bool = False  # whether another run can succeed
    counts: Counts | None = None  # what it counted; None if it has no plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """What a participant says of its state, in case an order or a vote was lost."""

    open: bool  # whether the session is open there
    epoch: int | None = None  # the epoch whose partition it holds; None if it holds none yet
    run_id: int = 0  # number of the last run that has begun there
    arrived: float | None = None  # fraction of the run's rows that have arrived, if it is known
    vote: Vote | None = None  # its vote on the run, once it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """Time of a rank's tasks in an epoch."""

    seconds: float = 0.0  # total time of the tasks
    waiting: float = 0.0  # the part of it in which tasks waited for other ranks, for example to average gradients

    @property
    def own(self) -> float:
        """Seconds that depend on this rank alone."""
        return max(0.0, self.seconds - self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a participant measured in the exchange that it has committed."""

    measures: Measures  # traffic and times of the exchange
    training: TrainingTime = TrainingTime()  # time of training in the epoch that has ended
    held: int = 0  # number of samples in its partition


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReply:
    """The answer to a commit: a report, or what the swap still waits for."""

    report: Report | None = None
    busy: str | None = None


Answer = MemberState | CommitReply | None
"""What a participant answers to an order of the session machine; nothing if the order only has to be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A session that has been opened for a client."""

    addresses: dict[int, str]  # address of every rank, and of the server
    left_out: tuple[str, ...]  # paused workers that do not take part
    history: WorkerHistory  # number of workers, and how it has changed


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochExchange:
    """What the exchange for an epoch moved and took, and the training of the epoch before."""

    epoch: int  # the epoch, the run that succeeded, and its delivery
    run_id: int
    delivery: str
    needed: int  # samples that had to move, packets that carried them, and rows in these packets
    packets: int
    components: int
    exchange_seconds: float  # time of the exchange, and how long the client waited for it
    waited_seconds: float
    measures: Measures
    addresses: dict[int, str]  # address of every rank, and of the server
    # time of training in the epoch before, by rank; None if it is not known
    training_before: tuple[TrainingTime, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberChanges:
    """How the workers of a cluster differ from the members of a session."""

    joined: tuple[str, ...]  # workers that could train and are not members
    leaving: tuple[str, ...]  # members that have left or are about to leave
    n_available: int  # number of workers that could train


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSamples:
    """How many samples of the current epoch each rank has trained on, and the digest of all of these."""

    epoch: int
    counts: tuple[int, ...]
    digest: SampleDigest


@dataclass(frozen=True, slots=True)
class UnfinishedTask:
    """A task that has ended without finishing: the number of its call, its rank, and what became of it."""

    call: int
    rank: int
    outcome: str


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that load their partitions together, and addresses of the workers that read the store for them."""

    ranks: list[int] = []
    readers: list[str] = []


class OpenOrder(msgspec.Struct, frozen=True, kw_only=True, rename={"digest": "drawn"}):
    """Open a session. Other orders are arguments of the methods that carry them out."""

    number: int  # Number of the order. Orders that were given before the session was closed here are refused.
    last_run: int = 0  # Number of the last run that has begun elsewhere. The worker takes part in later ones only.
    restore: bool = False  # whether the worker takes a lost rank
    # with ``restore``, the epoch whose partition is read; None if the first epoch has not begun
    epoch: int | None = None
    digest: SampleDigest | None = None  # digest of the samples of the rank in this epoch; None if it is not known
    together: Together = Together()  # with ``restore``, who loads together


Reply = dict[str, Any]


async def within(seconds: float, call: Awaitable[T]) -> T:
    """Await a call to another process, for some seconds at most."""
    return await unless(asyncio.sleep(seconds), call, TimeoutError(f"no answer within {seconds:g} s"))


async def unless(event: Awaitable[object], call: Awaitable[T], error: Exception) -> T:
    """Await a call to another process, and raise an error if an event comes first.

    ``asyncio.wait_for`` would wait until the cancelled call has ended. But Dask then flushes the connection, which can
    take forever if the other process is stopped.
    """
    task, awaited = asyncio.ensure_future(call), asyncio.ensure_future(event)
    task.add_done_callback(retrieve)
    try:
        await asyncio.wait([task, awaited], return_when=asyncio.FIRST_COMPLETED)
    finally:
        awaited.cancel()
        if not task.done():
            task.cancel()
    if not task.done() or task.cancelled():
        raise error
    return task.result()


def retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a call that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


class Arrays(dict[str, Any]):
    """A reply with arrays, which Dask sends as frames of their own."""


def replying(operation: str, method: Callable[..., Any]) -> Callable[..., Awaitable[Reply]]:
    """Make a handler of a method, which may be a coroutine. It replies with its error instead of raising it."""

    async def reply(**message: Any) -> Reply:
        try:
            result = method(**message)
            if inspect.isawaitable(result):
                result = await result
            return {"status": "OK", **(result if isinstance(result, Arrays) else {"message": to_fields(result)})}
        except DShuffleError as error:
            return {"status": "error", "error": ToPickle(error)}
        except Exception as error:
            logger.exception("dshuffle: %s failed", operation)
            return {"status": "error", "error": ToPickle(ClusterError(f"{type(error).__name__}: {error}"))}

    reply.__name__ = operation  # Dask logs it
    return reply


def unwrap(reply: Any, sender: str) -> Reply:
    """Return a reply, or raise the error that it contains."""
    if not isinstance(reply, dict) or "status" not in reply:
        raise ClusterError(f"dshuffle is not set up on {sender}: the reply was {reply!r}. Make a new Shuffler")
    if reply["status"] == "OK":
        return reply
    error = reply["error"]
    raise error.data if isinstance(error, ToPickle) else error


def message_in(reply: Any, kind: type[T], sender: str) -> T:
    """Return the message that a reply contains, or raise its error."""
    return from_fields(kind, unwrap(reply, sender).get("message"), sender)


CALLING = {"in_stored_order", "run_together", "timed"}
"""Functions of dshuffle that only call the function among their arguments."""


def task_key(name: str, session_id: str, epoch: int, call: int, rank: int) -> str:
    """Return the key of a task. Dask groups tasks by what is before the first hyphen, and the dashboard shows it."""
    return f"{name}-dshuffle-{session_id}-{epoch}-{call}-{rank}"


def rank_of_key(key: str) -> int:
    """Return the rank of a partition task."""
    return int(key.rsplit("-", 1)[1])


class TaskPlace(NamedTuple):
    """The session and the epoch of a partition task, its call within the epoch, and its rank."""

    session_id: str
    epoch: int
    call: int
    rank: int


def place_of_key(key: object) -> TaskPlace | None:
    """Return the place of a task; None if it is not a partition task."""
    match key.split("-") if isinstance(key, str) else ():
        case [_, "dshuffle", session_id, epoch, call, rank]:
            return TaskPlace(session_id, int(epoch), int(call), int(rank))
    return None


def task_name(fn: Callable[..., Any], args: Sequence[Any] = ()) -> str:
    """Return a name for tasks of a function. Functions of dshuffle that call the user's have the name of that one."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", type(fn).__name__)
    if name in CALLING and str(getattr(fn, "__module__", "")).startswith("dshuffle."):
        place = next((place for place, arg in enumerate(args) if callable(arg)), None)
        if place is not None:
            return task_name(args[place], args[place + 1 :])
    return re.sub(r"\W+", "_", name).strip("_") or "task"
