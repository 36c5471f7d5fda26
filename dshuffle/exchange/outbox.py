"""The sending half of an exchange as a state machine: events in, instructions out.

Requests come in any order, and may come before this sender has heard of the run: a receiver whose scheduler message
was faster. They wait then. Requests of an older run are refused, those beyond the window wait for an
acknowledgement; so the packed bytes that a sender holds are bounded whatever the receivers do. What a relay is to
hand on waits until it has come in: each message may have a gate, which is opened by number.

An acknowledgement that is lost holds its place until the message is asked for again or the run ends. That cannot
block a run for ever: whoever waits for the place asks in vain until its attempts are used up, which fails the run, and
the next one begins with an empty window. TCP loses an acknowledgement only along with the connection, and whoever sent
it then sends it again, so nothing finer is worth having.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dshuffle.errors import InvalidParameter
from dshuffle.exchange.messages import MessageId
from dshuffle.planning import name_of


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
        self._gates: Mapping[int, Sequence[int]] = {}
        self._open_gates: set[int] = set()
        self._waiting: OrderedDict[MessageId, None] = OrderedDict()  # each once, however often it is asked for
        self._in_flight: set[MessageId] = set()

    @property
    def in_flight(self) -> frozenset[MessageId]:
        """Messages packed and not yet acknowledged."""
        return frozenset(self._in_flight)

    def begin(
        self,
        run_id: int,
        owed: Mapping[int, int],
        *,
        gates: Mapping[int, Sequence[int]] | None = None,
        window: int | None = None,
    ) -> list[OutboxInstruction]:
        """Start a run in which this sender owes each destination (key) so many messages (value).

        Parameters
        ----------
        gates
            Destination -> the gate that each of its messages waits for, or -1. Without an entry none waits.
        window
            The window from now on.
        """
        self.run_id = run_id
        self.window = window or self.window
        self._open = True
        self._owed = dict(owed)
        self._gates = gates or {}
        self._open_gates = {-1}
        self._in_flight.clear()
        early, self._waiting = self._waiting, OrderedDict[MessageId, None]()
        return [instruction for message in early for instruction in self.request(message)]

    def open_gate(self, run_id: int, gate: int) -> list[OutboxInstruction]:
        """What the messages of a gate are made of has come in."""
        if run_id != self.run_id or not self._open:
            return []
        self._open_gates.add(gate)
        return self._ask_again()

    def request(self, message: MessageId) -> list[OutboxInstruction]:
        """A receiver asks for a message, perhaps not for the first time."""
        if message.sender != self.sender:
            return [Refuse(message, f"asked of {name_of(self.sender)}")]
        if message.run_id < self.run_id or (message.run_id == self.run_id and not self._open):
            return [Refuse(message, f"stale: {name_of(self.sender)} is past run {message.run_id}")]
        if message.run_id > self.run_id:
            self._waiting[message] = None
            return []
        owed = self._owed.get(message.destination, 0)
        if not 0 <= message.sequence < owed:
            return [Refuse(message, f"this run owes {message.destination} {owed} messages")]
        gates = self._gates.get(message.destination)
        shut = gates is not None and gates[message.sequence] not in self._open_gates
        if message in self._in_flight or (not shut and len(self._in_flight) < self.window):
            # A message in flight that is asked for again was lost on its way: it keeps its place in the window.
            self._in_flight.add(message)
            return [Send(message)]
        self._waiting[message] = None
        return []

    def acknowledged(self, message: MessageId) -> list[OutboxInstruction]:
        """The receiver has the message (or has given it up): its place in the window is free."""
        self._in_flight.discard(message)
        return self._ask_again() if self._open else []

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
        return refused + [Refuse(message, f"{name_of(self.sender)} has left") for message in waiting]

    def _ask_again(self) -> list[OutboxInstruction]:
        """Put the requests that wait once more, in turn, while the window has room."""
        instructions: list[OutboxInstruction] = []
        for _ in range(len(self._waiting)):
            if len(self._in_flight) >= self.window:
                break
            instructions.extend(self.request(self._waiting.popitem(last=False)[0]))
        return instructions
