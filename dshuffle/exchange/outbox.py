"""The sending side of an exchange as a state machine: events in, instructions out.

Requests arrive in any order. A request may arrive before this sender has heard of its run, because the scheduler's
message reached the receiver first; it waits until the run begins. Requests of an older run are refused. Requests beyond
the window wait for an acknowledgement, so the memory for packed messages is bounded. A relay cannot forward a packet
before it has arrived, so each message may wait for a gate, which is opened by number.

A lost acknowledgement occupies a window slot until the run ends, or until the sender gives it up
(``ACKNOWLEDGED_WITHIN`` in `sender.py`). A request that waits for the slot is answered with "later" after some seconds,
and the receiver asks again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dshuffle.errors import InvalidParameter
from dshuffle.exchange.messages import MessageId
from dshuffle.planning import name_of

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
    """Decides which requests to answer, to keep waiting, or to refuse.

    Parameters
    ----------
    sender
        Participant that sends (a rank or the server).
    window
        Maximum number of messages packed and not yet acknowledged.
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
        self._waiting: OrderedDict[MessageId, None] = OrderedDict()  # one entry per message
        self._in_flight: set[MessageId] = set()
        self._to_one = window
        self._unlimited: set[int] = set()

    @property
    def in_flight(self) -> frozenset[MessageId]:
        """Messages that are packed and not yet acknowledged."""
        return frozenset(self._in_flight)

    def is_open(self, run_id: int) -> bool:
        """Whether a run is under way."""
        return self._open and run_id == self.run_id

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
