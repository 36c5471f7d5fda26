"""What a worker requests, as a state machine without sockets, clocks or tasks, and which senders are too slow."""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from dshuffle.errors import ExchangeError, InvalidParameter
from dshuffle.exchange.messages import MessageId
from dshuffle.planning import name_of
from dshuffle.planning.epoch_plan import FORWARDER, forwarder_of

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
    """Senders whose rows should be read from the store instead, or readers that others should take the place of.

    At least half of the senders must have delivered all their rows. So no sender looks slow because the network, or the
    receiver, is slow.
    """
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
    """The messages that a rank expects in a run: which have arrived, and which to request next.

    Parameters
    ----------
    window
        Maximum number of messages requested and not yet unpacked, over all senders.
    attempts
        Maximum number of requests for one message before its rows are read from the store instead.
    """

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
        own_place = _place(self.rank)
        for sender in sorted(self._waiting, key=lambda sender: (_place(sender) <= own_place, _place(sender))):
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
        """Fill the window, or report that nothing is left.

        The next request goes to a sender with the fewest open requests, and among those to the one with most messages
        left; ties are broken in turn. So if the window has one slot per sender, every sender with messages left has an
        open request, and relays that wait for each other's messages cannot deadlock. With a smaller window, all senders
        come to an end at about the same time.
        """
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


def _place(participant: int) -> int:
    """Return the place of a participant in the order of requests. A forwarder has the place of its rank."""
    return forwarder_of(participant) if participant <= FORWARDER else participant
