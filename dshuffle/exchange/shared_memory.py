"""Memory that workers of one host share, so that long messages between them do not pass through sockets.

A sender packs messages into an anonymous file in memory. A receiver opens the file through ``/proc`` and maps the part
with its message. Such files have no name, so nothing is left behind when processes end or are killed.

The length of a file is sealed before its place is told: a process that reads beyond the end of a mapped file is killed
(SIGBUS), so a sender that truncated its file would kill its receivers. A receiver checks the seals, and cannot change
the memory of the sender.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dshuffle.rows import ByteMatrix, Checksums

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

    Raises
    ------
    OSError
        If the system refuses such memory.
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

    Raises
    ------
    OSError
        If this process cannot open the file, if it is gone, or if its owner could make it shorter.
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
