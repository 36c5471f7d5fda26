"""Ids of messages, and how the rows of a flow are cut into messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.planning import STORE, name_of
from dshuffle.planning.types import Samples
from dshuffle.rows import ByteMatrix, Checksums

Stop = Callable[[], bool]


class RowHolder(Protocol):
    """Holder of rows by sample: a cache partition or the server."""

    def pack(self, sample_ids: Samples, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy rows and checksums of samples into buffers. Raises ExchangeError if a sample is missing."""


class LeavingRows:
    """The rows that a participant sends in a run: a :class:`~dshuffle.exchange.endpoints.RowSource`."""

    # sample_ids: ``(m,)`` sample of each item.

    def __init__(self, holder: RowHolder, sample_ids: Samples) -> None:
        self._holder = holder
        self._sample_ids = sample_ids

    def pack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy the rows of items ``first`` to ``last - 1`` into buffers."""
        self._holder.pack(self._sample_ids[first:last], rows, checksums)


class Bring(Protocol):
    """Brings samples into reserved slots, from wherever they are."""

    async def __call__(
        self,
        sample_ids: Samples,
        slots: Samples,
        stop: Stop,
        *,
        done: NDArray[np.bool_],
        progress: Callable[[int], None],
        recovers: bool,
    ) -> None:
        """Bring those that are not ``done``, and note them there."""


class ArrivingRows:
    """The rows that a rank receives in a run: a :class:`~dshuffle.exchange.endpoints.RowSink`."""

    # cache: cache partition that receives the rows.
    # sample_ids, slots: ``(m,)`` sample and reserved slot of each item.

    intact = True  # rows do not depend on each other

    def __init__(self, cache: CachePartition, sample_ids: Samples, slots: Samples, bring: Bring) -> None:
        self.n_loading = 0
        self._cache = cache
        self._sample_ids = sample_ids
        self._slots = slots
        self._bring = bring
        self._brought: dict[int, NDArray[np.bool_]] = {}  # of loads that have failed, by their first item

    def unpack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Verify rows and copy them into their slots."""
        self._cache.unpack(self._sample_ids[first:last], self._slots[first:last], rows, checksums)

    async def load(self, first: int, last: int, stop: Stop, *, recovers: bool) -> None:
        """Bring rows into their slots; those that an earlier attempt has brought stay there."""
        done = self._brought.setdefault(first, np.zeros(last - first, np.bool_))
        n_loaded = int(np.count_nonzero(done))

        def progress(n_rows: int) -> None:
            nonlocal n_loaded
            n_loaded += n_rows
            self.n_loading += n_rows

        self.n_loading += n_loaded
        try:
            sample_ids, slots = self._sample_ids[first:last], self._slots[first:last]
            await self._bring(sample_ids, slots, stop, done=done, progress=progress, recovers=recovers)
        finally:
            self.n_loading -= n_loaded
        del self._brought[first]


KIB, MIB = 2**10, 2**20


class MessageId(NamedTuple):
    """Id of one message: number ``sequence`` (from 0) from ``sender`` to ``destination`` in a run."""

    run_id: int
    sender: int
    destination: int
    sequence: int

    def __str__(self) -> str:
        return f"run {self.run_id}, {name_of(self.sender)} to {name_of(self.destination)}, message {self.sequence}"


Items = NDArray[np.int64]
"""Numbers of items: samples, packets or components of packets, or positions in a list of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """The messages between one sender and one receiver."""

    bounds: Items  # ``(m + 1,)`` ascending; message i contains items ``bounds[i]`` to ``bounds[i + 1] - 1``.
    # ``(m,)`` relay gate of each message, or -1 if it has none. A message waits for its gate at the sender and counts
    # towards its gate at the receiver. ``None`` if no message has a gate.
    gates: Items | None = None

    @classmethod
    def evenly(cls, first: int, n_items: int, *, at_most: int) -> Flow:
        """Cut ``n_items`` items, starting at ``first``, into as few messages as possible of nearly equal length."""
        return cls(first + _evenly(n_items, at_most))

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
        if not 0 <= sequence < self.n_messages:
            raise InvalidParameter.of("sequence", sequence, f"within [0, {self.n_messages})")
        return int(self.bounds[sequence]), int(self.bounds[sequence + 1])


def rows_per_message(row_nbytes: int, message_bytes: int) -> int:
    """Return the number of whole rows that fit into ``message_bytes``, at least one."""
    return max(1, message_bytes // max(1, row_nbytes))


def flows_of_samples(samples: Mapping[int, Items], *, at_most: int) -> tuple[Items, dict[int, Flow]]:
    """Concatenate the samples exchanged with several participants, and cut them into flows."""
    # What comes from the store is loaded as one message.
    flows = {}
    first = 0
    for participant, ids in samples.items():
        flows[participant] = Flow.evenly(first, len(ids), at_most=max(1, len(ids)) if participant == STORE else at_most)
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
    participants, groups, gates = participants[order], groups[order], gates[order]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (participants[1:] != participants[:-1]) | (groups[1:] != groups[:-1])
    ends = np.flatnonzero(np.append(new[1:], True))[: len(order)]
    bounds: dict[int, list[Items]] = {}
    gates_of: dict[int, list[Items]] = {}
    for start, end in zip(np.flatnonzero(new).tolist(), (ends + 1).tolist(), strict=True):
        participant = int(participants[start])
        cuts = start + _evenly(end - start, at_most)
        bounds.setdefault(participant, [cuts[:1]]).append(cuts[1:])
        gates_of.setdefault(participant, []).append(np.full(len(cuts) - 1, gates[start], dtype=np.int64))
    flows = {
        participant: Flow(np.concatenate(bounds[participant]), np.concatenate(gates_of[participant]))
        for participant in bounds
    }
    return order, flows


def _evenly(n_items: int, at_most: int) -> Items:
    if at_most < 1:
        raise InvalidParameter.of("at_most", at_most, "an integer >= 1")
    count = -(-n_items // at_most)
    return np.arange(count + 1) * n_items // max(1, count)
