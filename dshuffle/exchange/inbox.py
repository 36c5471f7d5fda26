"""The receiving half of an exchange as a state machine: events in, instructions out.

It knows no socket, no clock and no task; tests drive it by hand. Transfers are *pulled*: a receiver asks for each
message it is owed and keeps a bounded window of requests open. Pulling bounds the memory of the receiver whatever
the number of senders, makes a lost message a matter of asking again, and spreads the load of a sender by itself.

========== ============================================== ==========
state      event                                          next state
========== ============================================== ==========
idle       begin                                          receiving, or ready when nothing is owed
receiving  arrived: not the last one                      receiving
receiving  arrived: the last one                          ready
receiving  failed: attempts are left                      receiving (asked again)
receiving  failed: no attempts left, or not worth another failed
ready      commit                                         idle
any        abort                                          idle
========== ============================================== ==========

Events that name another run than the present one, or a message that has arrived already, change nothing.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from dshuffle.errors import ExchangeError, InvalidParameter
from dshuffle.exchange.messages import MessageId


class InboxState(enum.Enum):
    """Where the receiving half stands."""

    IDLE = "idle"
    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask the sender for a message, unpack and verify it, then report `arrived` or `failed`."""

    message: MessageId


@dataclass(frozen=True, slots=True)
class ReportReady:
    """Tell the scheduler that everything owed in this run has arrived."""

    run_id: int


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """Tell the scheduler that this run cannot be finished here."""

    run_id: int
    reason: str


InboxInstruction = Fetch | ReportReady | ReportFailed


class Inbox:
    """What a participant is owed in a run, what has arrived, and what to ask for next.

    Parameters
    ----------
    rank
        The receiver.
    window
        Most messages asked for and not yet unpacked, over all senders.
    attempts
        How often a message is asked for before the run is given up.

    Examples
    --------
    >>> inbox = Inbox(rank=0, window=1)
    >>> [fetch] = inbox.begin(1, {2: 1})
    >>> inbox.arrived(fetch.message)
    [ReportReady(run_id=1)]
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
        self._senders: deque[int] = deque()
        self._asked: dict[MessageId, int] = {}

    @property
    def outstanding(self) -> frozenset[MessageId]:
        """Messages asked for that have not arrived."""
        return frozenset(self._asked)

    def begin(self, run_id: int, owed: Mapping[int, int], *, window: int | None = None) -> list[InboxInstruction]:
        """Start a run in which each sender (key) owes so many messages (value), with another window if one is given."""
        if self.state is not InboxState.IDLE:
            raise ExchangeError(f"run {run_id} cannot begin: run {self.run_id} is {self.state.value} on {self.rank}")
        if run_id <= self.run_id:
            raise ExchangeError(f"run {run_id} cannot begin on {self.rank}: run {self.run_id} was there before")
        self.run_id = run_id
        self.window = window or self.window
        self._waiting = {
            sender: deque(MessageId(run_id, sender, self.rank, sequence) for sequence in range(count))
            for sender, count in owed.items()
            if count > 0
        }
        # Every receiver starts with another sender, so that no sender is asked by all of them at once.
        self._senders = deque(sorted(self._waiting, key=lambda sender: (sender <= self.rank, sender)))
        self.state = InboxState.RECEIVING
        return self._next()

    def arrived(self, message: MessageId) -> list[InboxInstruction]:
        """A message has been unpacked and verified."""
        if self.state is not InboxState.RECEIVING or self._asked.pop(message, None) is None:
            return []
        return self._next()

    def failed(self, message: MessageId, reason: str, *, again: bool = True) -> list[InboxInstruction]:
        """A message could not be had; ask again unless that is pointless (``again=False``)."""
        if self.state is not InboxState.RECEIVING or message not in self._asked:
            return []
        tried = self._asked[message]
        if not again or tried >= self.attempts:
            self.state = InboxState.FAILED
            return [ReportFailed(self.run_id, f"{message}: {reason} (attempt {tried} of {self.attempts})")]
        # At once and in the same place of the window: what has been asked of others may wait for this message.
        self._asked[message] = tried + 1
        return [Fetch(message)]

    def commit(self, run_id: int) -> None:
        """The scheduler has every participant's word: this run is done."""
        if self.state is not InboxState.READY or run_id != self.run_id:
            raise ExchangeError(
                f"run {run_id} cannot be committed on {self.rank}: run {self.run_id} is {self.state.value}"
            )
        self.state = InboxState.IDLE

    def abort(self) -> None:
        """Forget the present run."""
        self.state = InboxState.IDLE
        self._waiting, self._asked = {}, {}
        self._senders.clear()

    def _next(self) -> list[InboxInstruction]:
        """Fill the window; report when nothing is left.

        The sender of whom the least has been asked is next, and they take turns. So with a window of one for each
        sender there is never one who owes something and is asked for nothing, and relays that wait for each other's
        messages cannot stop an exchange.
        """
        instructions: list[InboxInstruction] = []
        while self._senders and len(self._asked) < self.window:
            asked = Counter(message.sender for message in self._asked)
            sender = min(self._senders, key=asked.__getitem__)
            self._senders.remove(sender)
            message = self._waiting[sender].popleft()
            if self._waiting[sender]:
                self._senders.append(sender)
            else:
                del self._waiting[sender]
            self._asked[message] = 1
            instructions.append(Fetch(message))
        if not self._asked and not self._senders:
            self.state = InboxState.READY
            instructions.append(ReportReady(self.run_id))
        return instructions
