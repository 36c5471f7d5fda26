"""The sending half of an exchange as a state machine: events in, instructions out.

Requests come in any order, and may come before this sender has heard of the run: a receiver whose scheduler message
was faster. They wait then. Requests of an older run are refused, those beyond the window wait for an
acknowledgement; so the packed bytes that a sender holds are bounded whatever the receivers do.

An acknowledgement that is lost holds its place until the message is asked for again or the run ends. That cannot
block a run for ever: whoever waits for the place asks in vain until its attempts are used up, which fails the run, and
the next one begins with an empty window. TCP loses an acknowledgement only along with the connection, so nothing
finer is worth having.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from dshuffle.errors import InvalidParameter
from dshuffle.exchange.messages import MessageId


@dataclass(frozen=True, slots=True)
class Send:
    """Pack the rows of this message and reply with them."""

    message: MessageId


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reply that this message is not to be had, and why."""

    message: MessageId
    reason: str


OutboxInstruction = Send | Refuse


class Outbox:
    """Which requests to answer now, which to keep waiting, which to refuse.

    Parameters
    ----------
    sender
        The participant that sends (a rank, or the server).
    window
        Most messages packed and not yet acknowledged.

    Examples
    --------
    >>> outbox = Outbox(sender=0, window=1)
    >>> outbox.request(MessageId(1, 0, 2, 0))
    []
    >>> outbox.begin(1, {2: 1})
    [Send(message=MessageId(run_id=1, sender=0, destination=2, sequence=0))]
    """

    def __init__(self, sender: int, *, window: int) -> None:
        if window < 1:
            raise InvalidParameter.of("window", window, "an integer >= 1")
        self.sender = sender
        self.window = window
        self.run_id = -1
        self._open = False
        self._owed: dict[int, int] = {}
        self._waiting: OrderedDict[MessageId, None] = OrderedDict()  # each once, however often it is asked for
        self._in_flight: set[MessageId] = set()

    @property
    def in_flight(self) -> frozenset[MessageId]:
        """Messages packed and not yet acknowledged."""
        return frozenset(self._in_flight)

    def begin(self, run_id: int, owed: Mapping[int, int]) -> list[OutboxInstruction]:
        """Start a run in which this sender owes each destination (key) so many messages (value)."""
        self.run_id = run_id
        self._open = True
        self._owed = dict(owed)
        self._in_flight.clear()
        early, self._waiting = self._waiting, OrderedDict[MessageId, None]()
        return [instruction for message in early for instruction in self.request(message)]

    def request(self, message: MessageId) -> list[OutboxInstruction]:
        """A receiver asks for a message, perhaps not for the first time."""
        if message.sender != self.sender:
            return [Refuse(message, f"asked of participant {self.sender}")]
        if message.run_id < self.run_id or (message.run_id == self.run_id and not self._open):
            return [Refuse(message, f"stale: participant {self.sender} is past run {message.run_id}")]
        if message.run_id > self.run_id:
            self._waiting[message] = None
            return []
        owed = self._owed.get(message.destination, 0)
        if not 0 <= message.sequence < owed:
            return [Refuse(message, f"this run owes {message.destination} {owed} messages")]
        if message in self._in_flight or len(self._in_flight) < self.window:
            # A message in flight that is asked for again was lost on its way: it keeps its place in the window.
            self._in_flight.add(message)
            return [Send(message)]
        self._waiting[message] = None
        return []

    def acknowledged(self, message: MessageId) -> list[OutboxInstruction]:
        """The receiver has the message (or has given it up): its place in the window is free."""
        self._in_flight.discard(message)
        instructions: list[OutboxInstruction] = []
        if not self._open:
            return instructions
        for _ in range(len(self._waiting)):
            if len(self._in_flight) >= self.window:
                break
            instructions.extend(self.request(self._waiting.popitem(last=False)[0]))
        return instructions

    def end(self) -> list[OutboxInstruction]:
        """The run is committed or aborted: whatever still waits for it is refused."""
        self._open = False
        self._in_flight.clear()
        waiting, self._waiting = self._waiting, OrderedDict[MessageId, None]()
        return [instruction for message in waiting for instruction in self.request(message)]

    def close(self) -> list[OutboxInstruction]:
        """There will be no more runs: who waits for one is refused, or would wait for ever."""
        refused = self.end()
        waiting, self._waiting = self._waiting, OrderedDict[MessageId, None]()
        return refused + [Refuse(message, f"participant {self.sender} has left") for message in waiting]
