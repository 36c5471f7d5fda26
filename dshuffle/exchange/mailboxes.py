"""Both sides of an exchange as state machines without sockets, clocks or tasks: events in, instructions out."""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dshuffle.errors import ExchangeError, InvalidParameter
from dshuffle.exchange.messages import MessageId
from dshuffle.planning import name_of

PATIENCE = 5.0
"""Seconds into an exchange before a sender can be slow, and seconds that a slow sender would still take at least."""

MARGIN = 3.0
"""Reading must be estimated to take this many times less than waiting, because both estimates are rough."""


def slow_senders(
    owed: Mapping[int, int],
    arrived: Mapping[int, int],
    *,
    seconds: float,
    seconds_to_read: Callable[[int], float],
) -> list[int]:
    """Senders whose rows should be read from the store instead, or readers that others should take the place of."""
    # At least half of the senders must have delivered all their rows. So no sender looks slow because the network, or
    # the receiver, is slow.
    late = {sender: rows - arrived.get(sender, 0) for sender, rows in owed.items() if rows > arrived.get(sender, 0)}
    if seconds < PATIENCE or 2 * len(late) > len(owed):
        return []
    # At its rate so far, a sender needs ``left * seconds / arrived`` more seconds.
    return [
        sender
        for sender, left in late.items()
        if left * seconds > arrived.get(sender, 0) * max(PATIENCE, MARGIN * seconds_to_read(left))
        and seconds_to_read(left) < math.inf
    ]


class InboxState(enum.Enum):
    """State of the receiving side."""

    IDLE = "idle"
    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Fetch:
    """Request a message from its sender, unpack and verify it, then report `arrived` or `failed`."""

    message: MessageId


@dataclass(frozen=True, slots=True)
class ReadInstead:
    """Read the rows of a message that its sender cannot deliver from the store, then report `arrived` or `failed`."""

    message: MessageId


@dataclass(frozen=True, slots=True)
class ReportReady:
    """Tell the scheduler that all messages of this run have arrived."""

    run_id: int


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """Tell the scheduler that this rank cannot finish the run, and whether another run may succeed."""

    run_id: int
    reason: str
    again: bool


InboxInstruction = Fetch | ReadInstead | ReportReady | ReportFailed


class Inbox:
    """The messages that a rank expects in a run: which have arrived, and which to request next."""

    # window: maximum number of messages requested and not yet unpacked, over all senders.
    # attempts: maximum number of requests for one message before its rows are read from the store instead.

    def __init__(self, rank: int, *, window: int, attempts: int = 3) -> None:
        if window < 1:
            raise InvalidParameter.of("window", window, "an integer >= 1")
        self.rank = rank
        self.window = window
        self.attempts = attempts
        self.run_id = -1
        self.state = InboxState.IDLE
        self._waiting: dict[int, deque[MessageId]] = {}
        self._asked: dict[MessageId, int] = {}
        self._unsent: dict[MessageId, str] = {}  # messages that are read from the store instead, and why
        self._given_up: set[int] = set()  # senders of which nothing more is requested
        self._kept: set[int] = set()  # senders that were given up, but whose rows could not be read
        self._open: Counter[int] = Counter()  # open requests by sender
        self._free: list[tuple[int, int, int]] = []  # heap of senders without: (-messages left, turn, sender)
        self._turns = itertools.count()

    @property
    def outstanding(self) -> frozenset[MessageId]:
        """Messages that were requested and have not arrived."""
        return frozenset(self._asked)

    def begin(
        self,
        run_id: int,
        owed: Mapping[int, int],
        *,
        window: int | None = None,
        done: Collection[tuple[int, int]] = (),
    ) -> list[InboxInstruction]:
        """Start a run."""
        if self.state is not InboxState.IDLE:
            raise ExchangeError(
                f"run {run_id} cannot begin on rank {self.rank}: run {self.run_id} is {self.state.value}"
            )
        if run_id <= self.run_id:
            raise ExchangeError(f"run {run_id} cannot begin on rank {self.rank}: run {self.run_id} has already begun")
        self.run_id = run_id
        self._unsent.clear()
        self._given_up.clear()
        self._kept.clear()
        self.window = window or self.window
        self._waiting = {
            sender: deque(
                MessageId(run_id, sender, self.rank, sequence)
                for sequence in range(count)
                if not done or (sender, sequence) not in done
            )
            for sender, count in owed.items()
            if count > 0
        }
        # Receivers start with different senders, so that they do not all ask the same sender first.
        self._free, self._open = [], Counter()
        for sender in sorted(self._waiting, key=lambda sender: (sender <= self.rank, sender)):
            self._release(sender)
        self.state = InboxState.RECEIVING
        return self._next()

    def arrived(self, message: MessageId) -> list[InboxInstruction]:
        """Record that a message has been unpacked and verified."""
        if self.state is not InboxState.RECEIVING or self._asked.pop(message, None) is None:
            return []
        self._open[message.sender] -= 1
        if not self._open[message.sender]:
            del self._open[message.sender]
            self._release(message.sender)
        return self._next()

    def failed(self, message: MessageId, reason: str, *, again: bool = True) -> list[InboxInstruction]:
        """Record that a request failed, and repeat it unless that is pointless (``again=False``)."""
        if self.state is not InboxState.RECEIVING or message not in self._asked:
            return []
        attempts = self._asked[message]
        if message.sender in self._given_up and message in self._unsent:  # the sender is better than nothing
            self._given_up.discard(message.sender)
            self._kept.add(message.sender)
            del self._unsent[message]
            self._asked[message] = 1
            return [Fetch(message)]
        if not again or attempts > self.attempts:
            self.state = InboxState.FAILED
            if before := self._unsent.get(message):
                reason = f"{before}, and the rows could not be read from the store: {reason}"
            return [ReportFailed(self.run_id, f"{message}: {reason}", again)]
        # Retry immediately, within the same window slot: requests to other senders may wait for this message.
        self._asked[message] = attempts + 1
        if attempts < self.attempts:
            return [Fetch(message)]
        self._unsent[message] = f"{reason} (attempt {attempts})"
        return [ReadInstead(message)]

    def give_up(self, sender: int, unanswered: Collection[MessageId]) -> list[InboxInstruction]:
        """Read what a slow sender owes from the store instead: the unanswered requests, and all that would follow."""
        if self.state is not InboxState.RECEIVING or sender in self._given_up or sender in self._kept:
            return []
        self._given_up.add(sender)
        return [self._read(message) for message in unanswered if message.sender == sender and message in self._asked]

    def commit(self, run_id: int) -> None:
        """Finish the run after all participants have reported that they are ready."""
        if self.state is not InboxState.READY or run_id != self.run_id:
            raise ExchangeError(
                f"run {run_id} cannot be committed on rank {self.rank}: run {self.run_id} is {self.state.value}"
            )
        self.state = InboxState.IDLE

    def abort(self) -> None:
        """Discard the current run."""
        self.state = InboxState.IDLE
        self._waiting, self._asked = {}, {}
        self._free, self._open = [], Counter()

    def _next(self) -> list[InboxInstruction]:
        """Fill the window, or report that nothing is left."""
        # The next request goes to a sender with the fewest open requests, and among those to the one with most messages
        # left; ties are broken in turn. So if the window has one slot per sender, every sender with messages left has
        # an open request, and relays that wait for each other's messages cannot deadlock. With a smaller window, all
        # senders come to an end at about the same time.
        instructions: list[InboxInstruction] = []
        while len(self._asked) < self.window and (sender := self._next_sender()) is not None:
            message = self._waiting[sender].popleft()
            self._open[sender] = self._open.pop(sender, 0) + 1  # to the end, so that ties are broken in turn
            self._asked[message] = 1
            instructions.append(self._read(message) if sender in self._given_up else Fetch(message))
        if not self._asked and not self._free:
            self.state = InboxState.READY
            instructions.append(ReportReady(self.run_id))
        return instructions

    def _read(self, message: MessageId) -> ReadInstead:
        self._asked[message] = self.attempts + 1
        self._unsent[message] = f"{name_of(message.sender)} is slow"
        return ReadInstead(message)

    def _next_sender(self) -> int | None:
        if self._free:
            return heapq.heappop(self._free)[2]
        busy = [sender for sender in self._open if self._waiting[sender]]  # no more of them than the window has slots
        return min(busy, key=lambda sender: (self._open[sender], -len(self._waiting[sender])), default=None)

    def _release(self, sender: int) -> None:
        """Make a sender without an open request available for the next one."""
        if left := len(self._waiting[sender]):
            heapq.heappush(self._free, (-left, next(self._turns), sender))


EARLY = 2**16
"""Maximum number of requests that wait at a sender. Each receiver has at most one window of requests open."""


@dataclass(frozen=True, slots=True)
class Send:
    """Pack the rows of this message and reply with them."""

    message: MessageId


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reply that this message is not available, and why."""

    message: MessageId
    reason: str


OutboxInstruction = Send | Refuse


class Outbox:
    """Decides which requests to answer, to keep waiting, or to refuse."""

    # sender: participant that sends (a rank or the server).
    # window: maximum number of messages packed and not yet acknowledged.

    def __init__(self, sender: int, *, window: int) -> None:
        if window < 1:
            raise InvalidParameter.of("window", window, "an integer >= 1")
        self.sender = sender
        self.window = window
        self.run_id = -1
        self._open = False
        self._owed: dict[int, int] = {}
        self._gates: Mapping[int, Sequence[int]] = {}
        self._open_gates: set[int] = set()
        self._waiting: OrderedDict[MessageId, None] = OrderedDict()  # one entry per message
        self._in_flight: set[MessageId] = set()
        self._to_one = window
        self._unlimited: set[int] = set()

    @property
    def in_flight(self) -> frozenset[MessageId]:
        """Messages that are packed and not yet acknowledged."""
        return frozenset(self._in_flight)

    def begin(
        self,
        run_id: int,
        owed: Mapping[int, int],
        *,
        gates: Mapping[int, Sequence[int]] | None = None,
        window: int | None = None,
        to_one: int | None = None,
    ) -> list[OutboxInstruction]:
        """Start a run."""
        self.run_id = run_id
        self.window = window or self.window
        self._to_one = to_one or self.window
        self._unlimited.clear()
        self._open = True
        self._owed = dict(owed)
        self._gates = gates or {}
        self._open_gates = {-1}
        self._in_flight.clear()
        early, self._waiting = self._waiting, OrderedDict[MessageId, None]()
        return [instruction for message in early for instruction in self.request(message)]

    def open_gate(self, run_id: int, gate: int) -> list[OutboxInstruction]:
        """Allow the messages that wait for a gate: their packets have arrived."""
        if run_id != self.run_id or not self._open:
            return []
        self._open_gates.add(gate)
        return self._ask_again()

    def request(self, message: MessageId) -> list[OutboxInstruction]:
        """Handle a request, which may be a repeated one."""
        if message.sender != self.sender:
            return [Refuse(message, f"wrong sender: the request reached {name_of(self.sender)}")]
        if message.run_id < self.run_id or (message.run_id == self.run_id and not self._open):
            return [Refuse(message, f"stale: {name_of(self.sender)} is past run {message.run_id}")]
        if message.run_id > self.run_id:
            if len(self._waiting) >= EARLY and message not in self._waiting:
                return [Refuse(message, f"too many requests wait for run {message.run_id}, which has not begun")]
            self._waiting[message] = None
            return []
        owed = self._owed.get(message.destination, 0)
        if not 0 <= message.sequence < owed:
            return [Refuse(message, f"this run has {owed} messages for destination {message.destination}")]
        gates = self._gates.get(message.destination)
        shut = gates is not None and gates[message.sequence] not in self._open_gates
        if message in self._in_flight or (not shut and self._has_room(message.destination)):
            # A message in flight that is requested again was lost; it keeps its window slot.
            self._in_flight.add(message)
            self._waiting.pop(message, None)  # it may have waited for the limit of its destination
            return [Send(message)]
        self._waiting[message] = None
        return []

    def _has_room(self, destination: int) -> bool:
        """Whether the window has a slot for another message to a destination."""
        return len(self._in_flight) < self.window and (
            self._to_one >= self.window
            or destination in self._unlimited
            or sum(message.destination == destination for message in self._in_flight) < self._to_one
        )

    def withdraw(self, message: MessageId) -> None:
        """Drop a request that waits: its receiver will ask again."""
        self._waiting.pop(message, None)
        self._unlimited.add(message.destination)

    def acknowledged(self, message: MessageId) -> list[OutboxInstruction]:
        """Free the window slot of a message that the receiver has unpacked or no longer waits for."""
        self._in_flight.discard(message)
        return self._ask_again() if self._open else []

    def end(self) -> list[OutboxInstruction]:
        """End the run, committed or aborted, and refuse the requests that still wait for it."""
        self._open = False
        self._in_flight.clear()
        waiting, self._waiting = self._waiting, OrderedDict[MessageId, None]()
        return [instruction for message in waiting for instruction in self.request(message)]

    def close(self) -> list[OutboxInstruction]:
        """Refuse all waiting requests: no run will follow, and they would wait forever."""
        refused = self.end()
        waiting, self._waiting = self._waiting, OrderedDict[MessageId, None]()
        return refused + [Refuse(message, f"{name_of(self.sender)} has left") for message in waiting]

    def _ask_again(self) -> list[OutboxInstruction]:
        """Retry the waiting requests while the window has free slots, those for earlier messages of a flow first."""
        instructions: list[OutboxInstruction] = []
        for message in sorted(self._waiting, key=lambda message: message.sequence):
            if len(self._in_flight) >= self.window:
                break
            del self._waiting[message]
            instructions.extend(self.request(message))
        return instructions
