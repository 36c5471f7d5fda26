"""How packets reach their destinations over links from one sender to one receiver.

Every component of a packet takes one hop to its destination: from the server, or from a worker that has the packet
already. A *gate* says when: a hop may wait at its sender until everything has come in there that counts towards the
gate. So a relay is nothing but hops with gates, and whoever carries them need not know which relay it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.planning.grouping import group_by
from dshuffle.planning.plan import SERVER, Plan
from dshuffle.planning.types import Ranks, Samples

BATCHES = 12
"""A relay hands packets on in at least so many batches, so that little is left to hand on when the last comes in..."""
LEAST_BATCH_BYTES = 2**19
"""...but not in smaller ones than this, where the cost of a message shows."""
MESSAGE_BYTES = 2**23
WINDOW_BYTES = 2**25
"""A full message, and what is under way to a worker, if no setting says otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Hops:
    """One hop for every component of a plan.

    Parameters
    ----------
    packets
        ``(E,)`` int64, the packet.
    senders
        ``(E,)`` int32, who hands it to the component's destination: a rank that gets it too, or :data:`SERVER`.
    waits_for
        ``(E,)`` int32, the gate at the sender that must be open, or -1.
    opens
        ``(E,)`` int32, the gate at the destination that opens when all hops towards it have arrived, or -1.
    """

    packets: Samples
    senders: Ranks
    waits_for: Ranks
    opens: Ranks


def route(relay: str, plan: Plan, n_workers: int, batch: int) -> Hops:
    """The hops of a plan of the server's.

    Parameters
    ----------
    relay
        A key of :data:`RELAYS`.
    batch
        Packets that a relay waits for before it hands them on, at most.

    Raises
    ------
    InvalidParameter
        If the relay is unknown.

    Examples
    --------
    >>> plan = Plan(np.array([0, 3]), np.arange(3), np.array([2, 0, 1], np.int32), np.array([-1], np.int32))
    >>> hops = route("pipelined", plan, 3, batch=1)
    >>> hops.senders, hops.opens, hops.waits_for
    (array([-1,  2,  2], dtype=int32), array([ 0, -1, -1], dtype=int32), array([-1,  0,  0], dtype=int32))
    """
    if relay not in RELAYS:
        raise InvalidParameter.of("relay", relay, f"one of {sorted(RELAYS)}")
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
    """Packets that a relay waits for before it hands them on, at most: they make one message.

    Of such messages one from every other participant fits the window, so that each can be asked for one at any time.

    Examples
    --------
    >>> packets_per_batch(96_000, 8, 1024), packets_per_batch(960, 8, 1024), packets_per_batch(96_000, 8, 2**20)
    (1000, 512, 4)
    """
    row = max(1, row_nbytes)
    best = max(n_packets // (n_workers * BATCHES), LEAST_BATCH_BYTES // row)
    return max(1, min(best, message_bytes // row, max(1, window_bytes // row) // n_workers))


def batch_sizes(n_packets: int, n_workers: int, row_nbytes: int) -> list[int]:
    """Packets of each batch of a relay that has its part of so many.

    Examples
    --------
    >>> batch_sizes(8000, 8, 1024), len(batch_sizes(96_000, 8, 1024))
    ([333, 222, 148, 128, 128, 41], 16)
    """
    return _batches(max(1, n_packets // n_workers), packets_per_batch(n_packets, n_workers, row_nbytes))


def _pipelined(plan: Plan, packets: Samples, n_workers: int, batch: int) -> Hops:
    """The server sends each packet to one of its destinations, which hands it to the others.

    Among its destinations that one hands a packet on which has handed on the least so far, so the load is even from
    the first packet to the last. The packets of one relaying worker go in batches, the first of which it hands on
    while the next is coming in: with full-duplex links the two stages take the time of the slower one.
    """
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
    """Sizes of one worker's batches: smaller ones at the end, when no more comes in while the last is handed on."""
    sizes = []
    while n_packets > 0:
        sizes.append(min(n_packets, most, max(n_packets // 3, most // 4, 1)))
        n_packets -= sizes[-1]
    return sizes


def _ring(plan: Plan, packets: Samples, n_workers: int, batch: int) -> Hops:
    """The server scatters the packets over their destinations, which then pass them around in a ring.

    References
    ----------
    Paper 000, section IV and Theorem 4. The paper splits what goes to one set of workers into as many parts as the
    set has members, by bytes; we by packets, to which of them a packet goes first being chosen so that each sends as
    many as the others. As there, a round begins when the one before has ended, here for each worker by itself.
    """
    steps = np.empty(plan.n_components, dtype=np.int32)
    senders = np.empty(plan.n_components, dtype=np.int32)
    _around(plan.offsets, plan.destinations, steps, senders, np.zeros(n_workers, dtype=np.int64))
    return Hops(packets, senders, waits_for=steps - np.int32(1), opens=steps)


def _unicast(plan: Plan, packets: Samples, n_workers: int, batch: int) -> Hops:
    """The server sends each packet to every one of its destinations."""
    nothing = np.full(plan.n_components, -1, dtype=np.int32)
    return Hops(packets, np.full(plan.n_components, SERVER, dtype=np.int32), nothing, nothing)


RELAYS: dict[str, Callable[[Plan, Samples, int, int], Hops]] = {
    "pipelined": _pipelined,
    "ring": _ring,
    "unicast": _unicast,
}
"""Relays: name -> planner of the hops."""


@numba.njit(nogil=True, cache=True)
def _balance(offsets, destinations, relays, handed_on):  # type: ignore[no-untyped-def]
    for packet in range(relays.size):
        begin, end = offsets[packet], offsets[packet + 1]
        least = destinations[begin]
        for e in range(begin + 1, end):
            if handed_on[destinations[e]] < handed_on[least]:
                least = destinations[e]
        relays[packet] = least
        handed_on[least] += end - begin - 1


@numba.njit(nogil=True, cache=True)
def _around(offsets, destinations, steps, senders, handed_on):  # type: ignore[no-untyped-def]
    for packet in range(offsets.size - 1):
        begin, end = offsets[packet], offsets[packet + 1]
        size = end - begin
        # The ring ends at the member that has handed on the most, and begins behind it.
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
