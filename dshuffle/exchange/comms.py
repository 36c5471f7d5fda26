"""Requests and answers between workers over Dask.

No other module sends samples over the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import logging
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from distributed import Status, Worker
from distributed.protocol.serialize import ToPickle, to_serialize

from dshuffle.emulated_links import emulated
from dshuffle.errors import ExchangeError
from dshuffle.exchange.mailboxes import MessageId
from dshuffle.rows import ByteMatrix, Checksums, RowLayout

logger = logging.getLogger(__name__)

LEAST_NBYTES = 2**18
"""Messages up to this length are not worth mapping."""

_ALIGNMENT = 64

CHECKSUM_NBYTES = 4
"""Bytes of a row's checksum."""


class Place(NamedTuple):
    """Where another process finds the rows and checksums of a message."""

    # ``pid``, ``fd``, ``device`` and ``inode`` say which file it is. The checksums begin at byte ``first`` of the file,
    # and the rows ``rows_after`` bytes later.

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
    """A name that two processes have in common if they can share memory, or ``""`` if this one cannot."""
    # They have the same kernel, namespaces and user. Processes in different network namespaces have different names,
    # also on one machine: the traffic between containers, or between hosts that are emulated by namespaces, stays
    # visible.
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
    """Buffers of equal length that other processes of this host can map."""

    # nbytes: size in bytes. The kernel provides pages when they are first written.

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
        """As many buffers as there is room for: rows, their checksums, and their place."""
        # All earlier buffers must be out of use.
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
    """Map the rows and checksums of a message of another process."""
    # The arrays can be written, because kernels are compiled for such arrays only. What is written stays here.
    # Without O_NONBLOCK, opening a pipe waits for its other end.
    fd = os.open(f"/proc/{place.pid:d}/fd/{place.fd:d}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (place.device, place.inode):  # the sender has reused the number
            raise FileNotFoundError(f"process {place.pid} no longer has this memory")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:  # an OSError for other files
            raise OSError(f"the memory of process {place.pid} is not sealed against shrinking")
        nbytes = place.rows_after + place.n_rows * place.row_nbytes
        if min(place) < 0 or place.first + nbytes > status.st_size:
            raise OSError(f"process {place.pid} has less memory than it says")
        memory = mmap.mmap(
            fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=place.first
        )
    finally:
        os.close(fd)
    return _arrays(memory, 0, place)


def _rows_after(n_rows: int) -> int:
    return -(-n_rows * CHECKSUM_NBYTES // _ALIGNMENT) * _ALIGNMENT


def _arrays(memory: mmap.mmap, first: int, place: Place) -> tuple[ByteMatrix, Checksums]:
    checksums = np.frombuffer(memory, np.uint32, place.n_rows, first)
    rows = np.frombuffer(memory, np.uint8, place.n_rows * place.row_nbytes, first + place.rows_after)
    return rows.reshape(place.n_rows, place.row_nbytes), checksums


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Room for the rows of a message and their checksums."""

    rows: ByteMatrix  # rows, checksums: ``(n, row bytes)`` and ``(n,)``.
    checksums: Checksums
    place: Place | None = None  # Where another process of this host can map both; None if it cannot.

    @classmethod
    def new(cls, layout: RowLayout, n_rows: int) -> Buffer:
        """Allocate memory that is not shared."""
        return cls(layout.empty(n_rows), np.empty(n_rows, dtype=np.uint32))

    def first(self, n_rows: int) -> Buffer:
        """The part for a message that has fewer rows."""
        place = None if self.place is None else self.place._replace(n_rows=n_rows)
        return Buffer(self.rows[:n_rows], self.checksums[:n_rows], place)


class BufferPool:
    """A pool of buffers, each large enough for one full message."""

    # rows_per_message: number of rows in a full message.
    # size: maximum number of idle buffers of ``rows_per_message`` rows. The pool keeps more buffers if messages are
    # shorter, with the same total number of rows. Shared memory for as many rows is added when it is first needed.

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
        """Begin a run whose longest message has ``rows_per_message`` rows, 0 if it has none."""
        # Buffers that were never given back are dropped and not reused, because Dask or a receiver may still be reading
        # them.
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
        """Reserve a buffer for a message until it is given back."""
        # A message that is packed again because its first reply was lost gets another buffer: Dask may still hold the
        # first one. A long message gets a ``shared`` buffer if there is one.
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
        """Free all buffers that are not in use. Later buffers are not shared."""
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


_INFO = struct.Struct("=52xI")
"""Linux's ``struct tcp_info`` up to ``tcpi_last_data_recv``: milliseconds since data came."""


def seconds_since_data(worker: Worker, address: str) -> float | None:
    """Seconds since bytes came from an address over a connection on which this worker waits for an answer."""
    ages = []
    comm: Any
    for comm in worker.rpc.occupied.get(address, ()):
        with contextlib.suppress(AttributeError, OSError, struct.error):  # in this process, closed, or not on Linux
            information = comm.stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            ages.append(_INFO.unpack(information)[0] / 1000)
    return min(ages, default=None)


WORD = 8
"""Bytes of a word."""

SHORT_NBYTES = 2**18
"""Rows up to this length are sent as one string of bytes. Two arrays cost more to serialize, each as a frame."""


# Structs and not dataclasses: msgspec reads one in 0.7 us instead of 5 us, and a worker reads one for every message.


class RowsReply(msgspec.Struct, frozen=True, eq=False):
    """Rows that were requested."""

    rows: ByteMatrix  # rows, checksums: ``(n, row bytes)`` and ``(n,)``.
    checksums: Checksums
    # Whether the sender of a message waits for its acknowledgement. None if the rows are not a message of a run.
    acknowledge: bool | None = None
    place: Place | None = None  # Where another process of this host can map both; None if it cannot.
    link_seconds: float = 0.0  # How long the rows took to leave an emulated link; 0 if no link is emulated.

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.rows.nbytes + self.checksums.nbytes


class Refusal(msgspec.Struct, frozen=True, tag_field="status", tag="refused", forbid_unknown_fields=True):
    """Why a sender does not send a message, and whether another request for it can succeed."""

    reason: str
    again: bool = False


class Later(msgspec.Struct, frozen=True, tag_field="status", tag="later", forbid_unknown_fields=True):
    """A sender cannot send a message yet. The receiver requests it again."""


Reply = RowsReply | Refusal | Later


class _RowFields(msgspec.Struct, frozen=True, tag_field="status", tag="OK", forbid_unknown_fields=True):
    """The fields of a :class:`RowsReply` between processes. Those of the other forms are missing."""

    rows: np.ndarray | None = None
    checksums: np.ndarray | None = None
    packed: bytes | None = None
    shape: tuple[int, int] = (0, 0)
    place: Place | None = None
    acknowledge: bool | None = None
    link_seconds: float = 0.0


def to_fields(reply: Reply) -> dict[str, Any]:
    """The fields of a reply, in the form in which its rows are sent fastest."""
    if not isinstance(reply, RowsReply):
        plain: dict[str, Any] = msgspec.to_builtins(reply)
        return plain
    fields = {"status": "OK", "acknowledge": reply.acknowledge, "link_seconds": reply.link_seconds}
    rows, checksums = reply.rows, reply.checksums
    if reply.place is not None:
        return fields | {"place": reply.place}
    if 0 < reply.nbytes <= SHORT_NBYTES:
        padding = bytes(-checksums.nbytes % WORD)  # rows are read by words
        return fields | {"packed": b"".join((checksums.data, padding, rows.data)), "shape": rows.shape}
    # Dask sends each as a frame, without pickling.
    return fields | {"rows": to_serialize(rows), "checksums": to_serialize(checksums)}


def from_fields(fields: object, sender: str) -> Reply:
    """The reply of which :func:`to_fields` made fields. Raises the error that it has instead."""
    if isinstance(fields, dict) and fields.get("status") == "error":
        raise fields["error"].data if isinstance(fields["error"], ToPickle) else fields["error"]
    try:
        read = msgspec.convert(fields, Refusal | Later | _RowFields)
        if not isinstance(read, _RowFields):
            return read
        rows, checksums = read.rows, read.checksums
        if read.place is not None:
            rows, checksums = mapped(read.place)
        elif read.packed is not None:
            (n_rows, row_nbytes), buffer = read.shape, bytearray(read.packed)  # kernels need arrays that can be written
            first = n_rows * CHECKSUM_NBYTES + -n_rows * CHECKSUM_NBYTES % WORD
            rows = np.frombuffer(buffer, np.uint8, n_rows * row_nbytes, first).reshape(n_rows, row_nbytes)
            checksums = np.frombuffer(buffer, np.uint32, n_rows)
        if rows is None or checksums is None or rows.dtype != np.uint8 or checksums.dtype != np.uint32:
            raise ValueError("its rows or checksums are missing, or have another type")
        if not (rows.flags.c_contiguous and checksums.flags.c_contiguous):
            raise ValueError("its rows or checksums are not contiguous")
    except (msgspec.ValidationError, ValueError) as error:
        raise ExchangeError(f"{sender} sent a reply that cannot be read: {error}") from error
    return RowsReply(rows, checksums, read.acknowledge, None, read.link_seconds)


class DaskNetwork:
    """The network of one session, using the comms of this process's Dask worker."""

    # worker: Dask worker of this process.
    # session_id: session id on the other workers.
    # addresses: address of each participant (a rank or the server).
    # serve_here, acknowledge_here: handlers for participants in this process, which are called without using the
    # network.
    # shares_memory: whether long messages from workers of this host pass through shared memory.

    def __init__(
        self,
        worker: Worker,
        session_id: str,
        addresses: Mapping[int, str],
        *,
        serve_here: Callable[[MessageId], Awaitable[Reply]],
        acknowledge_here: Callable[[MessageId], None],
        shares_memory: bool,
    ) -> None:
        self._worker = worker
        self._session_id = session_id
        self._addresses = addresses
        self._serve_here = serve_here
        self._acknowledge_here = acknowledge_here
        self._unsent: dict[int, list[tuple[int, ...]]] = {}  # acknowledgements by sender
        self._closed = False
        # Messages within a process need not be copied at all.
        self._host = host() if shares_memory and not worker.address.startswith("inproc:") else ""
        self._unmappable: set[str] = set()

    def close(self) -> None:
        """Forget the handlers, which refer to the session. Its connections belong to the Dask worker."""
        del self._serve_here, self._acknowledge_here
        for sender in list(self._unsent):
            self._flush(sender)
        self._closed = True  # acknowledgements from now on are dropped, because the runs have ended

    def is_local(self, participant: int) -> bool:
        """Whether a participant runs on this worker."""
        return bool(self._addresses[participant] == self._worker.address)

    def heard(self) -> dict[int, float]:
        """Participant -> seconds since bytes came from it, for those that this worker waits for, if it is known."""
        ages = ((participant, seconds_since_data(self._worker, at)) for participant, at in self._addresses.items())
        return {participant: age for participant, age in ages if age is not None}

    async def fetch(self, message: MessageId) -> Reply:
        """Request a message. Concurrent requests use separate comms."""
        if self.is_local(message.sender):
            return await self._serve_here(message)
        address = self._addresses[message.sender]
        fields = await self._request(message, address, "" if address in self._unmappable else self._host)
        try:
            reply = from_fields(fields, address)
        except OSError as error:
            logger.warning("dshuffle: messages from %s use the network, not shared memory: %s", address, error)
            self._unmappable.add(address)
            reply = from_fields(await self._request(message, address, ""), address)
        return await received(self._worker, reply) if isinstance(reply, RowsReply) else reply

    async def acknowledge(self, message: MessageId) -> None:
        """Acknowledge a message with the next request to its sender, or with a one-way message if there is none."""
        if self.is_local(message.sender):
            self._acknowledge_here(message)
        else:
            self._add_unsent(message.sender, [tuple(message)])

    async def _request(self, message: MessageId, address: str, host: str) -> object:
        acknowledged = self._unsent.pop(message.sender, [])
        fields = {"session_id": self._session_id, "message": tuple(message), "acknowledged": acknowledged, "host": host}
        try:
            return await request(self._worker, address, "fetch", **fields)
        except BaseException:  # the acknowledgements may be lost; sending them twice is harmless
            self._add_unsent(message.sender, acknowledged)
            raise

    def _add_unsent(self, sender: int, acknowledged: list[tuple[int, ...]]) -> None:
        if acknowledged and not self._closed:
            self._unsent.setdefault(sender, []).extend(acknowledged)
            # Deferred twice, so that the task that makes the next request runs first.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._flush, sender)

    def _flush(self, sender: int) -> None:
        if sender in self._unsent and self._worker.status not in (Status.closing, Status.closed, Status.failed):
            self._worker._ongoing_background_tasks.call_soon(self._send_unsent, sender)

    async def _send_unsent(self, sender: int) -> None:
        if acknowledged := self._unsent.pop(sender, []):
            fields = {"session_id": self._session_id, "acknowledged": acknowledged, "reply": False}
            with contextlib.suppress(OSError, RuntimeError):  # the worker has left or is closing
                await request(self._worker, self._addresses[sender], "acknowledge", **fields)


async def request(worker: Worker, address: str, operation: str, **message: Any) -> Any:
    """Ask another worker for something. Arrays are sent as frames of their own."""
    fields = {name: to_serialize(it) if isinstance(it, np.ndarray) else it for name, it in message.items()}
    return await getattr(worker.rpc(address), f"dshuffle_{operation}")(**fields)


async def sent(worker: Worker, reply: Reply) -> dict[str, Any]:
    """The fields of a reply to another worker, once its rows have passed an emulated link."""
    if isinstance(reply, RowsReply) and (link := emulated("links", f"out of {worker.address}")) is not None:
        reply = msgspec.structs.replace(reply, link_seconds=await link.send(reply.nbytes))
    return to_fields(reply)


async def received(worker: Worker, reply: RowsReply) -> RowsReply:
    """Rows from another worker, once they have passed an emulated link."""
    if (link := emulated("links", f"into {worker.address}")) is not None:
        await link.receive(reply.nbytes, reply.link_seconds)
    return reply
