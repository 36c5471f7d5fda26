"""What clients, the scheduler and workers tell each other: types, their fields, orders and replies."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
        message = msgspec.convert(fields, kind)
        # Structs of messages of rows check it themselves, as there are so many; dataclasses cannot.
        if not (isinstance(message, msgspec.Struct) and message.__struct_config__.forbid_unknown_fields):
            _check_names(fields, msgspec.to_builtins(message))
    except msgspec.ValidationError as error:
        reason = f"{sender} sent what is not a message of the type {kind.__name__} ({error}). {SAME_BUILD}"
        raise ClusterError(reason, transient=False) from error
    return message


def _check_names(fields: Any, known: Any) -> None:
    """Refuse fields that are not among those that the message of them has."""
    if isinstance(known, dict):
        for name, value in fields.items():
            if name not in known:
                raise msgspec.ValidationError(f"Object contains unknown field `{name}`")
            _check_names(value, known[name])
    elif isinstance(known, (list, tuple)):
        for value, part in zip(fields, known, strict=True):
            _check_names(value, part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a participant counted in a run. The scheduler checks that the counts of all participants fit together."""

    digest: int  # digest of what the plan depends on, the same for all
    # Samples that have to move, packets that carry them, and rows in these packets. They are sums over all workers, or
    # those of one worker that planned its own part.
    needed: int = 0
    packets: int = 0
    expected: int
    # Rows that a worker which planned its own part sends to others, and receives from others. Otherwise None.
    leaving: int | None = None
    arriving: int | None = None
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
    # sender -> bytes that came from it over the network, and seconds in which they came
    links: dict[int, tuple[int, float]] = field(default_factory=dict)
    held: int = 0


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
    server: str  # role of the server: ``"dedicated"``, ``"beside rank R"``, or empty
    left_out: tuple[str, ...]  # paused workers that do not take part
    history: WorkerHistory  # number of workers, and how it has changed
    too_few_files: str = ""  # what to do about workers that may not have enough open files; empty if all may


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


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A message without fields."""


class SessionOrder(Order, frozen=True):
    """An order that concerns a session, whether it is open or not."""

    session_id: str


class Together(Order, frozen=True):
    """Ranks that load their partitions together, and addresses of the workers that read the store for them."""

    ranks: list[int] = []
    readers: list[str] = []


class OpenOrder(Order, frozen=True, rename={"digest": "drawn"}):
    """Open a session."""

    number: int  # Number of the order. Orders that were given before the session was closed here are refused.
    last_run: int = 0  # Number of the last run that has begun elsewhere. The worker takes part in later ones only.
    restore: bool = False  # whether the worker takes a lost rank
    # with ``restore``, the epoch whose partition is read; None if the first epoch has not begun
    epoch: int | None = None
    digest: SampleDigest | None = None  # digest of the samples of the rank in this epoch; None if it is not known
    together: Together = Together()  # with ``restore``, who loads together


class CloseOrder(SessionOrder, frozen=True):
    """Close a session, unless a later order has opened it. After it, orders to open up to this number are refused.

    With ``keeps``, only the tasks and the exchange end, and the partition stays as a source of a session that follows.
    """

    number: int
    keeps: bool = False


class MembersOrder(Order, frozen=True):
    """Use the addresses of workers that have taken lost ranks, unless a later order has been carried out.

    They are those of all participants that have moved since the session was opened, and not only of the last ones.
    """

    addresses: dict[int, str]
    number: int


class BeginOrder(Order, frozen=True):
    """Begin an attempt at an epoch's exchange."""

    run_id: int  # number of the attempt, its epoch and its delivery
    epoch: int
    delivery: str
    rate: float | None  # rate of the workers' links in bytes per second, as far as it is known


class PlanOrder(Order, frozen=True):
    """Plan the epoch after that of a run, with a delivery."""

    run_id: int
    delivery: str


class AbortOrder(Order, frozen=True):
    """Abort a run."""

    run_id: int


class CommitOrder(SessionOrder, frozen=True):
    """Swap to the epoch of a run."""

    run_id: int


class TrainedQuery(Order, frozen=True):
    """Which samples of an epoch have been trained on?"""

    epoch: int


class KeptQuery(Order, frozen=True):
    """Which partitions of a dataset are kept in a directory?"""

    directory: str
    dataset: str


class RowsQuery(SessionOrder, frozen=True):
    """Send rows of the partition of an epoch. The samples are beside the fields."""

    epoch: int


class BlockQuery(SessionOrder, frozen=True):
    """Send rows of a block of the store, whose numbers are beside the fields."""

    load: str
    owner: int  # the participant that needs the rows, and how many take part in the load
    n_owners: int
    block: int  # Number of the block. With -1, blocks are announced whose rows the participant will ask for.


class MeanQuery(SessionOrder, frozen=True):
    """Wait for the mean of the values of all ranks. Those of one rank are beside the fields."""

    number: int  # number of the call of :meth:`dshuffle.Epoch.together`, and of the mean in this call
    step: int
    size: int  # number of ranks, and the rank and the weight of the values
    rank: int
    weight: float


class EndCollectiveOrder(SessionOrder, frozen=True):
    """Fail the ranks that wait for a mean, and say whether another try may succeed."""

    number: int
    reason: str
    transient: bool = True


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
