"""Buffers of messages, which workers of one host share."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import mmap
import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dshuffle.exchange.messages import MessageId
from dshuffle.rows import ByteMatrix, Checksums, RowLayout

logger = logging.getLogger(__name__)


LEAST_NBYTES = 2**18
"""Messages up to this length are not worth mapping."""

_ALIGNMENT = 64
_CHECKSUM_NBYTES = np.dtype(np.uint32).itemsize


class Place(NamedTuple):
    """Where another process finds the rows and checksums of a message.

    ``pid``, ``fd``, ``device`` and ``inode`` say which file it is. The checksums begin at byte ``first`` of the file,
    and the rows ``rows_after`` bytes later.
    """

    pid: int
    fd: int
    device: int
    inode: int
    first: int
    rows_after: int
    n_rows: int
    row_nbytes: int


@functools.cache
def host() -> str:
    """A name that two processes have in common if they can share memory, or ``""`` if this one cannot.

    They have the same kernel, namespaces and user. Processes in different network namespaces have different names, also
    on one machine: the traffic between containers, or between hosts that are emulated by namespaces, stays visible.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except OSError:
        return ""
    return hashlib.blake2s(repr((boot, namespaces, os.geteuid())).encode(), digest_size=8).hexdigest()


def may_share(name: str) -> bool:
    """Whether a process whose :func:`host` has this name can map the memory of this process."""
    return bool(name) and name == host()


class SharedMemory:
    """Buffers of equal length that other processes of this host can map.

    Parameters
    ----------
    nbytes
        Size in bytes. The kernel provides pages when they are first written.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = os.memfd_create("dshuffle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            # Not against writing: buffers are used again.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._status = os.fstat(self._fd)
            self._memory = mmap.mmap(self._fd, nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        self._close_fd = weakref.finalize(self._memory, os.close, self._fd)

    def cut(self, n_rows: int, row_nbytes: int) -> list[tuple[ByteMatrix, Checksums, Place]]:
        """As many buffers as there is room for: rows, their checksums, and their place.

        All earlier buffers must be out of use.
        """
        length = buffer_nbytes(n_rows, row_nbytes)
        rows_after = _rows_after(n_rows)
        file = (os.getpid(), self._fd, self._status.st_dev, self._status.st_ino)
        places = [
            Place(*file, first, rows_after, n_rows, row_nbytes) for first in range(0, self.nbytes - length + 1, length)
        ]
        return [(*_arrays(self._memory, place.first, place), place) for place in places]

    def close(self) -> None:
        """Free the memory, but not what receivers have mapped, nor a buffer that is still in use. Idempotent."""
        self._close_fd()
        with contextlib.suppress(BufferError):  # then the last buffer takes the memory with it
            self._memory.close()


def buffer_nbytes(n_rows: int, row_nbytes: int) -> int:
    """Bytes of a buffer for some rows and their checksums, in whole pages."""
    return -(-(_rows_after(n_rows) + n_rows * row_nbytes) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def mapped(place: Place) -> tuple[ByteMatrix, Checksums]:
    """Map the rows and checksums of a message of another process.

    The arrays can be written, because kernels are compiled for such arrays only. What is written stays here.
    """
    # Without O_NONBLOCK, opening a pipe waits for its other end.
    fd = os.open(f"/proc/{place.pid:d}/fd/{place.fd:d}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (place.device, place.inode):  # the sender has reused the number
            raise FileNotFoundError(f"process {place.pid} no longer has this memory")
        if not stat.S_ISREG(status.st_mode) or not _seals(fd) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"the memory of process {place.pid} is not sealed against shrinking")
        nbytes = place.rows_after + place.n_rows * place.row_nbytes
        if min(place) < 0 or not place.n_rows * _CHECKSUM_NBYTES <= place.rows_after < nbytes:
            raise OSError(f"process {place.pid} has no rows at {place}")
        if place.first + nbytes > status.st_size:
            raise OSError(f"process {place.pid} has less memory than it says")
        memory = mmap.mmap(
            fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=place.first
        )
    finally:
        os.close(fd)
    return _arrays(memory, 0, place)


def _seals(fd: int) -> int:
    """Seals of a file. Files that are not in memory have none."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def _rows_after(n_rows: int) -> int:
    return -(-n_rows * _CHECKSUM_NBYTES // _ALIGNMENT) * _ALIGNMENT


def _arrays(memory: mmap.mmap, first: int, place: Place) -> tuple[ByteMatrix, Checksums]:
    checksums = np.frombuffer(memory, np.uint32, place.n_rows, first)
    rows = np.frombuffer(memory, np.uint8, place.n_rows * place.row_nbytes, first + place.rows_after)
    return rows.reshape(place.n_rows, place.row_nbytes), checksums


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Room for the rows of a message and their checksums.

    Parameters
    ----------
    rows, checksums
        ``(n, row bytes)`` and ``(n,)``.
    place
        Where another process of this host can map both; None if it cannot.
    """

    rows: ByteMatrix
    checksums: Checksums
    place: Place | None = None

    @classmethod
    def new(cls, layout: RowLayout, n_rows: int) -> Buffer:
        """Allocate memory that is not shared."""
        return cls(layout.empty(n_rows), np.empty(n_rows, dtype=np.uint32))

    def first(self, n_rows: int) -> Buffer:
        """The part for a message that has fewer rows."""
        place = None if self.place is None else self.place._replace(n_rows=n_rows)
        return Buffer(self.rows[:n_rows], self.checksums[:n_rows], place)


class BufferPool:
    """A pool of buffers, each large enough for one full message.

    Parameters
    ----------
    rows_per_message
        Number of rows in a full message.
    size
        Maximum number of idle buffers of ``rows_per_message`` rows. The pool keeps more buffers if messages are
        shorter, with the same total number of rows. Shared memory for as many rows is added when it is first needed.
    """

    def __init__(self, layout: RowLayout, rows_per_message: int, size: int) -> None:
        self._layout = layout
        self._rows = rows_per_message
        self._room = size * rows_per_message
        self._shared_nbytes = size * buffer_nbytes(rows_per_message, layout.nbytes)
        self._idle: list[Buffer] = []
        self._in_use: dict[MessageId, Buffer] = {}
        self._memory: SharedMemory | None = None
        self._idle_shared: list[Buffer] = []
        self._n_shared = 0

    def begin(self, rows_per_message: int) -> None:
        """Begin a run whose longest message has ``rows_per_message`` rows, 0 if it has none.

        Buffers that were never given back are dropped and not reused, because Dask or a receiver may still be reading
        them.
        """
        self._in_use.clear()
        if len(self._idle_shared) < self._n_shared:
            self._drop_memory()
        if not rows_per_message:  # a run without messages keeps the buffers for the next one
            return
        # Buffers much longer than the messages would take more memory than the window allows for.
        if not self._rows * 7 // 8 <= rows_per_message <= self._rows:
            self._rows = rows_per_message
            self._idle.clear()
        self._cut()

    def take(self, message: MessageId, n_rows: int, *, shared: bool = False) -> Buffer:
        """Reserve a buffer for a message until it is given back.

        A message that is packed again because its first reply was lost gets another buffer: Dask may still hold the
        first one. A long message gets a ``shared`` buffer if there is one.
        """
        buffer = self._take_shared() if shared and n_rows * self._layout.nbytes > LEAST_NBYTES else None
        if buffer is None:
            buffer = self._idle.pop() if self._idle else self._new(n_rows)
        self._in_use[message] = buffer
        return buffer.first(n_rows)

    def single_use(self, n_rows: int) -> Buffer:
        """Make a buffer for a short message that is not given back: Dask drops it once it is sent."""
        return Buffer.new(self._layout, n_rows)

    def give_back(self, message: MessageId) -> None:
        """Release the buffer of a message that the receiver has unpacked."""
        buffer = self._in_use.pop(message, None)
        if buffer is None or len(buffer.rows) != self._rows:
            return
        if buffer.place is not None:
            self._idle_shared.append(buffer)
        elif (len(self._idle) + 1) * self._rows <= self._room:
            self._idle.append(buffer)

    def drop(self, message: MessageId) -> None:
        """Forget the buffer of a message, without reusing it: Dask or a receiver may still be reading it."""
        self._in_use.pop(message, None)

    def close(self) -> None:
        """Free all buffers that nobody reads or writes. Those that are taken from now on are not shared."""
        self._in_use.clear()
        self._idle.clear()
        self._shared_nbytes = 0
        self._drop_memory()

    def _drop_memory(self) -> None:
        self._idle_shared, self._n_shared = [], 0
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _take_shared(self) -> Buffer | None:
        if self._memory is None and self._shared_nbytes:
            try:
                self._memory = SharedMemory(self._shared_nbytes)
            except OSError as error:
                self._shared_nbytes = 0
                logger.warning("dshuffle: messages to workers of this host use the network: %s", error)
            self._cut()
        return self._idle_shared.pop() if self._idle_shared else None

    def _cut(self) -> None:
        """Cut the shared memory into buffers of full messages."""
        buffers = [] if self._memory is None else self._memory.cut(self._rows, self._layout.nbytes)
        self._idle_shared = [Buffer(*buffer) for buffer in buffers]
        self._n_shared = len(buffers)

    def _new(self, n_rows: int) -> Buffer:
        # The last message of a flow may be short; only full-size buffers are worth keeping.
        full = n_rows * 2 >= self._rows
        return Buffer.new(self._layout, self._rows if full else n_rows)
