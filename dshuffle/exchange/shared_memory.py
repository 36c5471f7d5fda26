"""Memory that workers of one host share, so that long messages between them do not pass through sockets.

A sender packs messages into an anonymous file in memory. A receiver opens the file through ``/proc`` and maps the part
with its message. Such files have no name, so nothing is left behind when processes end or are killed.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dshuffle.rows import ByteMatrix

LEAST_NBYTES = 2**18
"""Messages up to this length are not worth mapping."""

_ALIGNMENT = 64


class Place(NamedTuple):
    """Where another process finds the rows and checksums of a message.

    ``pid``, ``fd`` and ``inode`` say which file it is. The checksums begin at byte ``first`` of the file, and the rows
    ``rows_after`` bytes later.
    """

    pid: int
    fd: int
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
        self._fd = os.memfd_create("dshuffle", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, nbytes)
            self._inode = os.fstat(self._fd).st_ino
            self._memory = mmap.mmap(self._fd, nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        weakref.finalize(self._memory, os.close, self._fd)  # once no buffer is left

    def cut(self, n_rows: int, row_nbytes: int) -> list[tuple[ByteMatrix, NDArray[np.uint32], Place]]:
        """As many buffers as there is room for: rows, their checksums, and their place.

        All earlier buffers must be out of use.
        """
        length = buffer_nbytes(n_rows, row_nbytes)
        rows_after = _rows_after(n_rows)
        places = [
            Place(os.getpid(), self._fd, self._inode, first, rows_after, n_rows, row_nbytes)
            for first in range(0, self.nbytes - length + 1, length)
        ]
        return [(*_arrays(self._memory, place.first, place), place) for place in places]


def buffer_nbytes(n_rows: int, row_nbytes: int) -> int:
    """Bytes of a buffer for some rows and their checksums, in whole pages."""
    return -(-(_rows_after(n_rows) + n_rows * row_nbytes) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def mapped(place: Place) -> tuple[ByteMatrix, NDArray[np.uint32]]:
    """Map the rows and checksums of a message of another process.

    Raises
    ------
    OSError
        If this process cannot open the file, or it is gone.
    """
    fd = os.open(f"/proc/{place.pid:d}/fd/{place.fd:d}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_ino != place.inode:  # the sender has closed it, and uses the number for another one
            raise FileNotFoundError(f"process {place.pid} no longer has this memory")
        # Kernels are compiled for arrays that can be written, so the mapping must not be read-only.
        memory = mmap.mmap(fd, place.rows_after + place.n_rows * place.row_nbytes, offset=place.first)
    except ValueError as error:  # mmap's error if the file is too short
        raise OSError(f"process {place.pid} has less memory than it says: {error}") from error
    finally:
        os.close(fd)
    return _arrays(memory, 0, place)


def _rows_after(n_rows: int) -> int:
    return -(-n_rows * np.dtype(np.uint32).itemsize // _ALIGNMENT) * _ALIGNMENT


def _arrays(memory: mmap.mmap, first: int, place: Place) -> tuple[ByteMatrix, NDArray[np.uint32]]:
    checksums = np.frombuffer(memory, np.uint32, place.n_rows, first)
    rows = np.frombuffer(memory, np.uint8, place.n_rows * place.row_nbytes, first + place.rows_after)
    return rows.reshape(place.n_rows, place.row_nbytes), checksums
