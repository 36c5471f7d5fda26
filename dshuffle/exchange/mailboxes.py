"""Messages, and both sides of their exchange as state machines without sockets, clocks or tasks."""

from __future__ import annotations

import heapq
import itertools
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning import STORE, name_of

KIB, MIB = 2**10, 2**20

Items = NDArray[np.int64]
"""Numbers of items: samples, packets or components of packets, or positions in a list of them."""


class MessageId(NamedTuple):
    """Id of one message: number ``sequence`` (from 0) from ``sender`` to ``destination`` in a run."""

    run_id: int
    sender: int
    destination: int
    sequence: int

    def __str__(self) -> str:
        return f"run {self.run_id}, {name_of(self.sender)} to {name_of(self.destination)}, message {self.sequence}"


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """The messages between one sender and one receiver."""

    bounds: Items  # ``(m + 1,)`` ascending; message i contains items ``bounds[i]`` to ``bounds[i + 1] - 1``.
    # ``(m,)`` relay gate of each message, or -1 if it has none. A message waits for its gate at the sender and counts
    # towards its gate at the receiver. ``None`` if no message has a gate.
    gates: Items | None = None

    @property
    def n_messages(self) -> int:
        """Number of messages."""
        return len(self.bounds) - 1

    @property
    def n_items(self) -> int:
        """Number of items in all messages."""
        return int(self.bounds[-1] - self.bounds[0])

    @property
    def longest(self) -> int:
        """Number of items in the longest message."""
        return int(np.diff(self.bounds).max(initial=0))

    def message(self, sequence: int) -> tuple[int, int]:
        """Return the first item of a message and the one past its last."""
        return int(self.bounds[sequence]), int(self.bounds[sequence + 1])


def rows_per_message(row_nbytes: int, message_bytes: int) -> int:
    """Return the number of whole rows that fit into ``message_bytes``, at least one."""
    return max(1, message_bytes // max(1, row_nbytes))


def flows_of_samples(samples: Mapping[int, Items], *, at_most: int) -> tuple[Items, dict[int, Flow]]:
    """Concatenate the samples exchanged with several participants, and cut them into messages of nearly equal length.

    What comes from the store is loaded as one message.
    """
    flows, first = {}, 0
    for participant, ids in samples.items():
        count = min(1, len(ids)) if participant == STORE else -(-len(ids) // at_most)
        flows[participant] = Flow(first + np.arange(count + 1) * len(ids) // max(1, count))
        first += len(ids)
    return np.concatenate([np.empty(0, np.int64), *samples.values()]), flows


def flows_of_hops(
    participants: NDArray[np.int32], groups: NDArray[np.int32], gates: NDArray[np.int32], *, at_most: int
) -> tuple[Items, dict[int, Flow]]:
    """Sort hops by the other participant, then by group, and cut them into flows."""
    # participants: ``(m,)`` destination of each hop, or its sender.
    # groups: ``(m,)`` group of each hop, numbered alike on both sides. Only hops of the same group share a message.
    # gates: ``(m,)`` gate of each hop on this side, or -1. All hops of the same flow and group have the same gate.
    order = np.lexsort((groups, participants))
    places = np.stack([participants[order], groups[order]])
    starts = np.flatnonzero(np.append(True, np.diff(places).any(axis=0))[: len(order)])
    lengths = np.diff(starts, append=len(order))
    counts = -(-lengths // at_most)
    first = np.cumsum(counts) - counts
    of = np.repeat(np.arange(len(starts)), counts)  # the participant and group of each message
    bounds = np.append(starts[of] + (np.arange(len(of)) - first[of]) * lengths[of] // counts[of], len(order))
    owners, message_gates = places[0][starts][of], gates[order[starts]][of].astype(np.int64)
    flows = {}
    for participant in np.unique(owners).tolist():
        first_message, end = np.searchsorted(owners, [participant, participant + 1])
        flows[participant] = Flow(bounds[first_message : end + 1], message_gates[first_message:end])
    return order, flows


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring a message, unpack and verify it, then report `arrived` or `failed`.

    With ``instead``, its rows are read from the store, because its sender cannot deliver it.
    """

    message: MessageId
    instead: bool = False


@dataclass(frozen=True, slots=True)
class Arrived:
    """Tell the scheduler that all messages of a run have arrived, or why not and whether another run may succeed."""

    run_id: int
    reason: str | None = None
    again: bool = False


class Inbox:
    """The messages that a rank expects in a run: which have arrived, and which to request next."""

    # window: maximum number of messages requested and not yet unpacked, over all senders.
    # attempts: maximum number of requests for one message before its rows are read from the store instead.

    def __init__(self, rank: int, *, window: int, attempts: int = 3) -> None:
        self.rank = rank
        self.window = window
        self.attempts = attempts
        self.run_id = -1
        self._waiting: dict[int, deque[MessageId]] = {}
        self._asked: dict[MessageId, int] = {}
        self._unsent: dict[MessageId, str] = {}  # messages that are read from the store instead, and why
        self._open: Counter[int] = Counter()  # open requests by sender
        self._next_senders: list[tuple[int, int, int, int]] = []  # heap: (open requests, -messages left, turn, sender)
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
    ) -> list[Fetch | Arrived]:
        """Start a run."""
        self.abort()
        self.run_id, self.window = run_id, window or self.window
        self._waiting = {
            sender: deque(
                MessageId(run_id, sender, self.rank, sequence)
                for sequence in range(count)
                if (sender, sequence) not in done
            )
            for sender, count in owed.items()
        }
        # Receivers start with different senders, so that they do not all ask the same sender first.
        for sender in sorted(self._waiting, key=lambda sender: (sender <= self.rank, sender)):
            self._queue(sender)
        return self._next()

    def arrived(self, message: MessageId) -> list[Fetch | Arrived]:
        """Record that a message has been unpacked and verified."""
        if self._asked.pop(message, None) is None:
            return []
        self._open[message.sender] -= 1
        self._queue(message.sender)
        return self._next()

    def failed(self, message: MessageId, reason: str, *, again: bool = True) -> list[Fetch | Arrived]:
        """Record that a request failed, and repeat it unless that is pointless (``again=False``)."""
        if (attempts := self._asked.get(message)) is None:
            return []
        if not again or attempts > self.attempts:
            if before := self._unsent.get(message):
                reason = f"{before}, and the rows could not be read from the store: {reason}"
            self.abort()
            return [Arrived(self.run_id, f"{message}: {reason}", again)]
        # Retry immediately, within the same window slot: requests to other senders may wait for this message.
        self._asked[message] = attempts + 1
        if attempts < self.attempts:
            return [Fetch(message)]
        self._unsent[message] = f"{reason} (attempt {attempts})"
        return [Fetch(message, instead=True)]

    def abort(self) -> None:
        """Discard the current run."""
        self._waiting, self._asked, self._unsent = {}, {}, {}
        self._next_senders, self._open = [], Counter()

    def _next(self) -> list[Fetch | Arrived]:
        """Fill the window, or report that nothing is left."""
        # The next request goes to a sender with the fewest open requests, and among those to the one with most messages
        # left; ties are broken in turn. So if the window has one slot per sender, every sender with messages left has
        # an open request, and relays that wait for each other's messages cannot deadlock. With a smaller window, all
        # senders come to an end at about the same time.
        instructions: list[Fetch | Arrived] = []
        while len(self._asked) < self.window and self._next_senders:
            n_open, left, _, sender = heapq.heappop(self._next_senders)
            if (n_open, -left) != (self._open[sender], len(self._waiting[sender])):  # this has changed since
                continue
            message = self._waiting[sender].popleft()
            self._open[sender] += 1
            self._asked[message] = 1
            instructions.append(Fetch(message))
            self._queue(sender)
        return instructions if self._asked else [Arrived(self.run_id)]

    def _queue(self, sender: int) -> None:
        """Let a sender have its turn, if it has messages left."""
        if left := len(self._waiting[sender]):
            heapq.heappush(self._next_senders, (self._open[sender], -left, next(self._turns), sender))


@dataclass(frozen=True, slots=True)
class Answer:
    """Pack the rows of a message and reply with them, or say why it is refused."""

    message: MessageId
    refusal: str | None = None


class Outbox:
    """Decides which requests to answer, to keep waiting, or to refuse."""

    # sender: participant that sends (a rank or the server).
    # window: maximum number of messages packed and not yet acknowledged.

    def __init__(self, sender: int, *, window: int) -> None:
        self.sender = sender
        self.window = window
        self.run_id = -1
        self.in_flight: set[MessageId] = set()
        """Messages that are packed and not yet acknowledged."""
        self._open = False
        self._owed: Mapping[int, int] = {}
        self._gates: Mapping[int, Sequence[int]] = {}
        self._open_gates: set[int] = set()
        self._waiting: OrderedDict[MessageId, None] = OrderedDict()  # one entry per message
        self._to_one = window
        self._unlimited: set[int] = set()

    def begin(
        self,
        run_id: int,
        owed: Mapping[int, int],
        *,
        gates: Mapping[int, Sequence[int]] | None = None,
        window: int | None = None,
        to_one: int | None = None,
    ) -> list[Answer]:
        """Start a run."""
        self.run_id, self._open = run_id, True
        self.window = window or self.window
        self._to_one = to_one or self.window
        self._owed, self._gates, self._open_gates = owed, gates or {}, {-1}
        self._unlimited.clear()
        self.in_flight.clear()
        return self._requested_again()

    def open_gate(self, run_id: int, gate: int) -> list[Answer]:
        """Allow the messages that wait for a gate: their packets have arrived."""
        if run_id != self.run_id or not self._open:
            return []
        self._open_gates.add(gate)
        return self._next()

    def request(self, message: MessageId) -> list[Answer]:
        """Handle a request, which may be a repeated one."""
        if message.run_id < self.run_id or (message.run_id == self.run_id and not self._open):
            return [Answer(message, f"stale: {name_of(self.sender)} is past run {message.run_id}")]
        if message.run_id > self.run_id:
            self._waiting[message] = None
            return []
        owed = self._owed.get(message.destination, 0)
        if not 0 <= message.sequence < owed:
            return [Answer(message, f"this run has {owed} messages for destination {message.destination}")]
        gates = self._gates.get(message.destination)
        shut = gates is not None and gates[message.sequence] not in self._open_gates
        if message in self.in_flight or (not shut and self._has_room(message.destination)):
            # A message in flight that is requested again was lost; it keeps its window slot.
            self.in_flight.add(message)
            self._waiting.pop(message, None)  # it may have waited for the limit of its destination
            return [Answer(message)]
        self._waiting[message] = None
        return []

    def _has_room(self, destination: int) -> bool:
        """Whether the window has a slot for another message to a destination."""
        return len(self.in_flight) < self.window and (
            self._to_one >= self.window
            or destination in self._unlimited
            or sum(message.destination == destination for message in self.in_flight) < self._to_one
        )

    def withdraw(self, message: MessageId) -> None:
        """Drop a request that waits: its receiver will ask again."""
        self._waiting.pop(message, None)
        self._unlimited.add(message.destination)

    def acknowledged(self, message: MessageId) -> list[Answer]:
        """Free the window slot of a message that the receiver has unpacked or no longer waits for."""
        self.in_flight.discard(message)
        return self._next() if self._open else []

    def end(self, *, closes: bool = False) -> list[Answer]:
        """End the run, committed or aborted, and refuse the requests that wait for it; if no run follows, all."""
        self._open = False
        self.run_id = sys.maxsize if closes else self.run_id
        self.in_flight.clear()
        return self._requested_again()

    def _requested_again(self) -> list[Answer]:
        waiting, self._waiting = self._waiting, OrderedDict()
        return [answer for message in waiting for answer in self.request(message)]

    def _next(self) -> list[Answer]:
        """Retry the waiting requests while the window has free slots, those for earlier messages of a flow first."""
        answers: list[Answer] = []
        for message in sorted(self._waiting, key=lambda message: message.sequence):
            if len(self.in_flight) >= self.window:
                break
            del self._waiting[message]
            answers.extend(self.request(message))
        return answers
