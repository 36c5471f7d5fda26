"""Relays: how packets reach their destinations over unicast links.

Every component of a packet takes one hop to its destination, from the server or from a worker that already has the
packet. A *gate* controls the start of hops: a hop may wait at its sender until all hops that open the gate have
arrived there. A relay is a list of hops with gates, so the code that carries packets does not depend on the relay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from dshuffle.kernels import kernel
from dshuffle.planning.epoch_plan import SERVER, Packets
from dshuffle.planning.types import Ranks, Samples, group_by

BATCHES = 12
"""Minimum number of batches of a relay, so that little is left to pass on when the last batch arrives."""
LEAST_BATCH_BYTES = 2**19
"""Minimum size of a batch, below which the cost per message is noticeable. It takes precedence over ``BATCHES``."""
MESSAGE_BYTES = 2**23
WINDOW_BYTES = 2**25
"""Defaults for the size of a full message (``MESSAGE_BYTES``) and for the data in flight to a worker."""


@dataclass(frozen=True, slots=True, eq=False)
class Hops:
    """One hop for every component of a plan."""

    packets: Samples  # ``(E,)`` int64, the packet of each hop.
    senders: Ranks  # ``(E,)`` int32, the sender of each hop: a rank that gets the packet too, or :data:`SERVER`.
    waits_for: Ranks  # ``(E,)`` int32, the gate at the sender that must be open first, or -1.
    opens: Ranks  # ``(E,)`` int32, the gate at the destination that opens when all its hops have arrived, or -1.


def route(relay: str, plan: Packets, n_workers: int, batch: int) -> Hops:
    """Return the hops of a plan whose packets come from the server."""
    packets = np.repeat(np.arange(plan.n_packets), np.diff(plan.offsets))
    return RELAYS[relay](plan, packets, n_workers, batch)


def packets_per_batch(
    n_packets: int,
    n_workers: int,
    row_nbytes: int,
    *,
    message_bytes: int = MESSAGE_BYTES,
    window_bytes: int = WINDOW_BYTES,
) -> int:
    """Return the maximum number of packets that a relay waits for before it passes them on."""
    # They make one message. The window has room for one such message from every other participant, so a worker can
    # request one from each at any time.
    row = max(1, row_nbytes)
    best = max(n_packets // (n_workers * BATCHES), LEAST_BATCH_BYTES // row)
    return max(1, min(best, message_bytes // row, max(1, window_bytes // row) // n_workers))


def batch_sizes(n_packets: int, n_workers: int, row_nbytes: int) -> list[int]:
    """Return the number of packets in each batch of a worker that relays ``1 / n_workers`` of ``n_packets``."""
    return _batches(max(1, n_packets // n_workers), packets_per_batch(n_packets, n_workers, row_nbytes))


def _pipelined(plan: Packets, packets: Samples, n_workers: int, batch: int) -> Hops:
    """Send each packet from the server to one of its destinations, which passes it to the others."""
    # The destination that has passed on the least so far relays the packet, so the load is even from the first packet
    # to the last. The packets of a relaying worker go in batches. It passes on one batch while the next one arrives.
    # With full-duplex links the two stages together take the time of the slower one.
    relays = np.empty(plan.n_packets, dtype=np.int32)
    _balance(plan.offsets, plan.destinations, relays, np.zeros(n_workers, dtype=np.int64))
    order, starts = group_by(relays, n_workers)
    numbers = np.empty(plan.n_packets, dtype=np.int32)
    for worker in range(n_workers):
        sizes = _batches(int(starts[worker + 1] - starts[worker]), batch)
        numbers[order[starts[worker] : starts[worker + 1]]] = np.repeat(np.arange(len(sizes)), sizes)
    batches = numbers[packets]
    first = relays[packets] == plan.destinations
    nothing = np.int32(-1)
    return Hops(
        packets,
        senders=np.where(first, np.int32(SERVER), relays[packets]),
        waits_for=np.where(first, nothing, batches),
        opens=np.where(first, batches, nothing),
    )


def _batches(n_packets: int, most: int) -> list[int]:
    """Return the batch sizes of one worker; they shrink at the end, as nothing arrives while the last is passed on."""
    sizes = []
    while n_packets > 0:
        sizes.append(min(n_packets, most, max(n_packets // 3, most // 4, 1)))
        n_packets -= sizes[-1]
    return sizes


def _ring(plan: Packets, packets: Samples, n_workers: int, batch: int) -> Hops:
    """Scatter the packets from the server over their destinations, which then pass them around in a ring."""
    # Chung et al. (2017), section IV and Theorem 4; see docs/papers.md. The paper splits the data for a set of workers
    # by bytes, into one part per member. We split it by packets: the first destination of each packet is chosen so that
    # all members send equally many. As in the paper, a round begins when the previous one has ended. Here each worker
    # applies this rule separately.
    steps = np.empty(plan.n_components, dtype=np.int32)
    senders = np.empty(plan.n_components, dtype=np.int32)
    _around(plan.offsets, plan.destinations, steps, senders, np.zeros(n_workers, dtype=np.int64))
    return Hops(packets, senders, waits_for=steps - np.int32(1), opens=steps)


def _unicast(plan: Packets, packets: Samples, n_workers: int, batch: int) -> Hops:
    """Send each packet from the server to every one of its destinations."""
    nothing = np.full(plan.n_components, -1, dtype=np.int32)
    return Hops(packets, np.full(plan.n_components, SERVER, dtype=np.int32), nothing, nothing)


RELAYS: dict[str, Callable[[Packets, Samples, int, int], Hops]] = {
    "pipelined": _pipelined,
    "ring": _ring,
    "unicast": _unicast,
}
"""Relay name -> planner of the hops."""


@kernel("(i8[::1], i4[::1], i4[::1], i8[::1])")
def _balance(offsets, destinations, relays, handed_on):  # type: ignore[no-untyped-def]
    for packet in range(relays.size):
        begin, end = offsets[packet], offsets[packet + 1]
        least = destinations[begin]
        for e in range(begin + 1, end):
            if handed_on[destinations[e]] < handed_on[least]:
                least = destinations[e]
        relays[packet] = least
        handed_on[least] += end - begin - 1


@kernel("(i8[::1], i4[::1], i4[::1], i4[::1], i8[::1])")
def _around(offsets, destinations, steps, senders, handed_on):  # type: ignore[no-untyped-def]
    for packet in range(offsets.size - 1):
        begin, end = offsets[packet], offsets[packet + 1]
        size = end - begin
        # The ring ends at the member that has passed on the most, and begins after it.
        last = begin
        for e in range(begin, end):
            if handed_on[destinations[e]] > handed_on[destinations[last]]:
                last = e
        before = np.int32(SERVER)
        for step in range(size):
            e = begin + (last + 1 - begin + step) % size
            steps[e], senders[e] = step, before
            before = destinations[e]
            if e != last:
                handed_on[before] += 1


LINK_SECONDS = 0.05
"""What a message takes on its receiver's link, where lengths allow."""

UNDER_WAY = 5
"""Messages of this length that a receiver has asked for at any time. Three are enough where only links are slow; five
bridge the pauses of busy processors too."""

SHORTEST = 64 * 2**10
"""Bytes of the shortest messages that rows are cut into: on slower links, they take longer."""

UNKNOWN = 2**20
"""Bytes of a message until an exchange has been timed; three of them are under way."""

MOST_MESSAGES = 32
"""Messages that a receiver asks for at once, however short they are."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """Lengths of the messages of single rows in an exchange."""

    message_nbytes: int  # Bytes of a message, at most.
    under_way_nbytes: int  # Bytes that a receiver has asked for and that have not arrived.

    @classmethod
    def of(cls, rate: float | None, *, message_bytes: int, window_bytes: int) -> Self:
        """The lengths for links of a rate."""
        if rate is None:
            length = min(UNKNOWN, message_bytes)
            return cls(length, min(3 * length, window_bytes))
        nbytes = min(rate * LINK_SECONDS, window_bytes)
        length = min(message_bytes, max(SHORTEST, int(nbytes)))
        return cls(length, min(window_bytes, max(UNDER_WAY * length, int(UNDER_WAY * nbytes))))

    def asked(self, longest_nbytes: int) -> int:
        """Number of messages to ask for at once, if none is longer than this."""
        return max(1, min(MOST_MESSAGES, self.under_way_nbytes // max(1, longest_nbytes)))
