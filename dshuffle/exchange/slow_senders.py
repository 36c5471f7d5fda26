"""Which senders are so slow that reading their rows from the store ends the exchange sooner."""

from __future__ import annotations

from collections.abc import Mapping

PATIENCE = 5.0
"""Seconds into an exchange before a sender can be slow, and seconds that a slow sender would still take at least."""

MARGIN = 3.0
"""Reading must be estimated to take this many times less than waiting, because both estimates are rough."""


def slow_senders(owed: Mapping[int, int], arrived: Mapping[int, int], *, seconds: float, read_rate: float) -> list[int]:
    """Senders whose rows should be read from the store instead.

    At least half of the senders must have delivered all their rows. So no sender looks slow because the network, or the
    receiver, is slow.

    Parameters
    ----------
    owed, arrived
        Sender -> rows that it sends in this exchange, and rows that have arrived.
    seconds
        Duration of the exchange so far.
    read_rate
        Rows per second that this worker reads from the store; 0 if they cannot be read.

    Examples
    --------
    >>> slow_senders({0: 100, 1: 100, 2: 100}, {0: 100, 1: 100, 2: 10}, seconds=6.0, read_rate=50.0)
    [2]
    >>> slow_senders({0: 100, 1: 100, 2: 100}, {0: 100, 1: 100, 2: 80}, seconds=6.0, read_rate=50.0)
    []
    """
    late = {sender: rows - arrived.get(sender, 0) for sender, rows in owed.items() if rows > arrived.get(sender, 0)}
    if seconds < PATIENCE or read_rate <= 0 or 2 * len(late) > len(owed):
        return []
    # At its rate so far, a sender needs ``left * seconds / arrived`` more seconds.
    return [
        sender
        for sender, left in late.items()
        if left * seconds > arrived.get(sender, 0) * max(PATIENCE, MARGIN * left / read_rate)
    ]
