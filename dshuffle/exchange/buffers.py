"""Reusable buffers that messages are packed into.

Reuse nearly halves the packing time: 1.1 ms instead of 1.9 ms for a message of 8 MiB. Dask's nannies make glibc return
freed memory to the system immediately, so every large allocation is mapped, cleared and unmapped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dshuffle.exchange.messages import MessageId
from dshuffle.rows import ByteMatrix, RowLayout

Buffer = tuple[ByteMatrix, NDArray[np.uint32]]


class BufferPool:
    """A pool of buffers, each large enough for one full message.

    Parameters
    ----------
    layout
        Layout of a row.
    rows_per_message
        Number of rows in a full message.
    size
        Maximum number of idle buffers of ``rows_per_message`` rows. The pool keeps more buffers if messages are
        shorter, with the same total number of rows.
    """

    def __init__(self, layout: RowLayout, rows_per_message: int, size: int) -> None:
        self._layout = layout
        self._rows = rows_per_message
        self._room = size * rows_per_message
        self._idle: list[Buffer] = []
        self._in_use: dict[MessageId, Buffer] = {}

    def fit(self, rows_per_message: int) -> None:
        """Set the number of rows in the longest message."""
        # Buffers much longer than the messages would take more memory than the window allows for.
        if not self._rows * 7 // 8 <= rows_per_message <= self._rows:
            self._rows = rows_per_message
            self._idle.clear()

    def take(self, message: MessageId, n_rows: int) -> Buffer:
        """Reserve a buffer for a message until it is given back.

        A message that is packed again because its first reply was lost gets another buffer: Dask may still hold the
        first one.
        """
        buffer = self._idle.pop() if self._idle else self._new(n_rows)
        self._in_use[message] = buffer
        return buffer[0][:n_rows], buffer[1][:n_rows]

    def single_use(self, n_rows: int) -> Buffer:
        """Make a buffer for a short message that is not given back: Dask drops it once it is sent."""
        return self._layout.empty(n_rows), np.empty(n_rows, dtype=np.uint32)

    def give_back(self, message: MessageId) -> None:
        """Release the buffer of a message that the receiver has unpacked."""
        buffer = self._in_use.pop(message, None)
        if buffer is None or len(buffer[0]) != self._rows:
            return
        if (len(self._idle) + 1) * self._rows <= self._room:
            self._idle.append(buffer)

    def drop(self, message: MessageId) -> None:
        """Forget the buffer of a message, without reusing it: Dask may still be reading it."""
        self._in_use.pop(message, None)

    def forget(self) -> None:
        """Drop the buffers that were never given back, without reusing them: Dask may still be reading them."""
        self._in_use.clear()

    def _new(self, n_rows: int) -> Buffer:
        # The last message of a flow may be short; only full-size buffers are worth keeping.
        full = n_rows * 2 >= self._rows
        n_rows = self._rows if full else n_rows
        return self._layout.empty(n_rows), np.empty(n_rows, dtype=np.uint32)
