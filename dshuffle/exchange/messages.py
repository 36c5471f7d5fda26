"""What a message of an exchange is called.

Sender and receiver hold the same plan, so a message is named by (run, sender, destination, sequence) alone: which
rows it carries follows from the plan, and no sample number crosses the network.

Flows: what one participant sends another in a run, cut into messages.

The items of a flow (rows, or packets) have numbers: places in one list of all that a participant sends, and in one
of all that it receives. Sender and receiver draw up their lists from the same plan and cut them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
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


Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """The messages between one sender and one receiver.

    Parameters
    ----------
    bounds
        ``(m + 1,)`` ascending; message i has the items ``bounds[i]`` to ``bounds[i + 1] - 1``.
    gates
        ``(m,)`` the gate that a message waits for (where it is sent) or counts towards (where it arrives), or -1;
        ``None`` if no message has one.

    Examples
    --------
    >>> flow = Flow.evenly(100, 25, at_most=10)
    >>> flow.bounds, flow.n_messages
    (array([100, 108, 116, 125]), 3)
    """

    bounds: Places
    gates: Places | None = None

    @classmethod
    def evenly(cls, first: int, n_items: int, *, at_most: int) -> Flow:
        """Items from ``first`` on in as few messages as possible, equally long within one item."""
        return cls(first + _evenly(n_items, at_most))

    @property
    def n_messages(self) -> int:
        """Messages."""
        return len(self.bounds) - 1

    @property
    def longest(self) -> int:
        """Items of the longest message."""
        return int(np.diff(self.bounds).max(initial=0))

    def message(self, sequence: int) -> tuple[int, int]:
        """First and past-the-last item of a message."""
        if not 0 <= sequence < self.n_messages:
            raise InvalidParameter.of("sequence", sequence, f"within [0, {self.n_messages})")
        return int(self.bounds[sequence]), int(self.bounds[sequence + 1])


def rows_per_message(row_nbytes: int, message_bytes: int) -> int:
    """As many whole rows as ``message_bytes`` hold, at least one."""
    return max(1, message_bytes // max(1, row_nbytes))


def flows_of_samples(
    samples: Mapping[int, Places], *, at_most: int, whole: int | None = None
) -> tuple[Places, dict[int, Flow]]:
    """One list of the samples that go to, or come from, several participants, and the flows in it.

    Parameters
    ----------
    samples
        Participant -> samples.
    at_most
        Samples in a message, at most.
    whole
        A participant whose samples make one message, however many they are.
    """
    flows = {}
    first = 0
    for other, ids in samples.items():
        flows[other] = Flow.evenly(first, len(ids), at_most=max(1, len(ids)) if other == whole else at_most)
        first += len(ids)
    return np.concatenate([np.empty(0, np.int64), *samples.values()]), flows


def flows_of_hops(
    others: NDArray[np.int32], groups: NDArray[np.int32], gates: NDArray[np.int32], *, at_most: int
) -> tuple[Places, dict[int, Flow]]:
    """Order hops by the other participant, then by group, and cut them.

    Parameters
    ----------
    others
        ``(m,)`` where each hop goes to, or comes from.
    groups
        ``(m,)`` what may share a message: the same numbers on both sides.
    gates
        ``(m,)`` gate of each hop on this side, or -1; one for all hops of a flow and group.
    at_most
        Hops in a message, at most.

    Returns
    -------
    order : (m,) int64
        The hops in the order of the list; those of the same participant and group in the order given.
    flows : dict
        Participant -> flow, which counts places in that list.
    """
    order = np.lexsort((groups, others))
    others, groups, gates = others[order], groups[order], gates[order]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (others[1:] != others[:-1]) | (groups[1:] != groups[:-1])
    ends = np.flatnonzero(np.append(new[1:], True))[: len(order)]
    bounds: dict[int, list[Places]] = {}
    gates_of: dict[int, list[Places]] = {}
    for start, end in zip(np.flatnonzero(new).tolist(), (ends + 1).tolist(), strict=True):
        other = int(others[start])
        cuts = start + _evenly(end - start, at_most)
        bounds.setdefault(other, [cuts[:1]]).append(cuts[1:])
        gates_of.setdefault(other, []).append(np.full(len(cuts) - 1, gates[start], dtype=np.int64))
    flows = {other: Flow(np.concatenate(bounds[other]), np.concatenate(gates_of[other])) for other in bounds}
    return order, flows


def _evenly(n_items: int, at_most: int) -> Places:
    if at_most < 1:
        raise InvalidParameter.of("at_most", at_most, "an integer >= 1")
    count = -(-n_items // at_most)
    return np.arange(count + 1) * n_items // max(1, count)
