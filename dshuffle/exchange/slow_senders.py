"""Which senders are so slow that reading their rows from the store ends the exchange sooner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

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

    Parameters
    ----------
    owed, arrived
        Sender -> rows that it sends in this exchange, and rows that have arrived.
    seconds
        Duration of the exchange so far.
    seconds_to_read
        Returns how long it takes to read a number of rows from the store: that of all chunks that hold any of them.

    Examples
    --------
    >>> owed, time = {0: 100, 1: 100, 2: 100}, lambda rows: rows / 50
    >>> slow_senders(owed, {0: 100, 1: 100, 2: 10}, seconds=6.0, seconds_to_read=time)
    [2]
    >>> slow_senders(owed, {0: 100, 1: 100, 2: 80}, seconds=6.0, seconds_to_read=time)
    []
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
