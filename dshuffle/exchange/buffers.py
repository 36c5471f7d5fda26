"""Buffers that messages are packed into, used again once a message is acknowledged.

A fresh buffer costs as much as the packing itself: Dask's nannies make glibc give memory back at once, so that every
large allocation is mapped, cleared and unmapped (1.9 against 1.1 ms for a message of 8 MiB).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dshuffle.exchange.messages import MessageId
from dshuffle.rows import ByteMatrix, RowLayout

Buffer = tuple[ByteMatrix, NDArray[np.uint32]]


class BufferPool:
    """Idle buffers, each for one full message.

    Parameters
    ----------
    layout
        How a row is laid out.
    rows_per_message
        Rows of a full message.
    size
        Buffers of ``rows_per_message`` kept, at most, or as many more as their messages are shorter.
    """

    def __init__(self, layout: RowLayout, rows_per_message: int, size: int) -> None:
        self._layout = layout
        self._rows = rows_per_message
        self._room = size * rows_per_message
        self._idle: list[Buffer] = []
        self._in_use: dict[MessageId, Buffer] = {}

    def fit(self, rows_per_message: int) -> None:
        """The longest message has so many rows from now on."""
        # Much longer buffers than messages would take more room than the window has for them.
        if not self._rows * 7 // 8 <= rows_per_message <= self._rows:
            self._rows = rows_per_message
            self._idle.clear()

    def take(self, message: MessageId, n_rows: int) -> Buffer:
        """Room for a message; until it is given back nothing else is packed there.

        A message that is packed again (its first reply was lost) gets new room: Dask may still hold the old.
        """
        buffer = self._idle.pop() if self._idle else self._new(n_rows)
        self._in_use[message] = buffer
        return buffer[0][:n_rows], buffer[1][:n_rows]

    def give_back(self, message: MessageId) -> None:
        """The receiver has unpacked the message."""
        buffer = self._in_use.pop(message, None)
        if buffer is None or len(buffer[0]) != self._rows:
            return
        if (len(self._idle) + 1) * self._rows <= self._room:
            self._idle.append(buffer)

    def forget(self) -> None:
        """Let go of what was never given back: somebody may still be reading it."""
        self._in_use.clear()

    def _new(self, n_rows: int) -> Buffer:
        # The last message of a flow is a small one; only full ones are worth keeping.
        full = n_rows * 2 >= self._rows
        n_rows = self._rows if full else n_rows
        return self._layout.empty(n_rows), np.empty(n_rows, dtype=np.uint32)
