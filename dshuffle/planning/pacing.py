"""How long messages are, and how many bytes a worker has under way: both follow the rate of its link.

A receiver that asks everybody for everything at once overflows the queues of slow links, and lost packets wait for
timers. With a few messages under way, each worth some 50 ms of the link, an all-to-all comes close to the rate of the
links. On fast links messages take less time, because memory is limited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

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
    """Lengths of the messages of single rows in an exchange.

    Parameters
    ----------
    message_nbytes
        Bytes of a message, at most.
    under_way_nbytes
        Bytes that a receiver has asked for and that have not arrived.
    """

    message_nbytes: int
    under_way_nbytes: int

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
