"""What travels in an exchange: identities of messages, and how a flow of rows is cut into them.

Sender and receiver hold the same plan, so a message is named by (run, sender, destination, sequence) alone: which
rows it carries follows from the plan, and no sample number crosses the network.
"""

from __future__ import annotations

from dataclasses import dataclass

from dshuffle.errors import InvalidParameter

MIB = 2**20


@dataclass(frozen=True, slots=True, order=True)
class MessageId:
    """One message: the ``sequence``-th cut of the rows that ``sender`` owes ``destination`` in a run."""

    run_id: int
    sender: int
    destination: int
    sequence: int

    def __str__(self) -> str:
        return f"run {self.run_id}, {self.sender} -> {self.destination}, message {self.sequence}"


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows are cut into messages: all of ``rows_per_message`` rows but the last of a flow.

    Examples
    --------
    >>> cut = Cut.of(row_nbytes=1024, message_bytes=8 * 2**20)
    >>> cut.rows_per_message, cut.count(20_000), cut.bounds(2, 20_000)
    (8192, 3, (16384, 20000))
    """

    rows_per_message: int

    def __post_init__(self) -> None:
        if self.rows_per_message < 1:
            raise InvalidParameter.of("rows_per_message", self.rows_per_message, "an integer >= 1")

    @classmethod
    def of(cls, *, row_nbytes: int, message_bytes: int) -> Cut:
        """The cut whose messages are as close below ``message_bytes`` as whole rows allow."""
        return cls(max(1, message_bytes // max(1, row_nbytes)))

    def count(self, n_rows: int) -> int:
        """Messages that ``n_rows`` rows make."""
        return -(-n_rows // self.rows_per_message)

    def bounds(self, sequence: int, n_rows: int) -> tuple[int, int]:
        """First and past-the-last row of a message."""
        if not 0 <= sequence < self.count(n_rows):
            raise InvalidParameter.of("sequence", sequence, f"within [0, {self.count(n_rows)})")
        first = sequence * self.rows_per_message
        return first, min(first + self.rows_per_message, n_rows)
