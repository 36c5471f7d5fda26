"""What a message of an exchange is called.

Sender and receiver hold the same plan, so a message is named by (run, sender, destination, sequence) alone: which
rows it carries follows from the plan, and no sample number crosses the network.
"""

from __future__ import annotations

from dataclasses import dataclass

from dshuffle.planning import name_of

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True, order=True)
class MessageId:
    """One message: the ``sequence``-th of those that ``sender`` owes ``destination`` in a run."""

    run_id: int
    sender: int
    destination: int
    sequence: int

    def __str__(self) -> str:
        return f"run {self.run_id}, {name_of(self.sender)} to {name_of(self.destination)}, message {self.sequence}"
