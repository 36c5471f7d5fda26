"""Files on this machine's file systems, including network mounts.

Handing one file of 64 KiB to a thread and back costs more than reading it from the page cache. So each thread reads
several small files per call. The pool has more threads than zarr's loop, because reads from a network mount mostly
wait. Writing makes half of the system calls that zarr's own store makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore

from dshuffle.private_files import replace_file

_POOL = ThreadPoolExecutor(16, thread_name_prefix="dshuffle-files")


def _renew_pool() -> None:
    global _POOL
    _POOL = ThreadPoolExecutor(16, thread_name_prefix="dshuffle-files")


os.register_at_fork(after_in_child=_renew_pool)  # threads do not survive a fork


class LocalFiles(LocalStore):
    """zarr's local store, with batches of files read in one thread, and a quicker way to write a file."""

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read a file or a byte range of it; return ``None`` if the file does not exist."""
        assert prototype is not None
        return (await self.get_partial_values(prototype, [(key, byte_range)]))[0]

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Read several files or byte ranges, one after the other in one thread."""
        root = os.fspath(self.root)
        requests = [(f"{root}/{key}", byte_range) for key, byte_range in key_ranges]
        contents = await asyncio.get_running_loop().run_in_executor(_POOL, _read_all, requests)
        return [None if data is None else prototype.buffer.from_bytes(data) for data in contents]

    async def set(self, key: str, value: Buffer) -> None:
        """Write a file. It has either its old or its new content, whatever happens."""
        self._check_writable()
        path = f"{os.fspath(self.root)}/{key}"
        await asyncio.get_running_loop().run_in_executor(_POOL, _write, path, memoryview(value.as_buffer_like()))


class PrivateFiles(LocalFiles):
    """Local files that only this user can read, once they are written."""

    async def set(self, key: str, value: Buffer) -> None:
        """Replace a file at once, or not at all."""
        path = os.path.join(self.root, key)
        await asyncio.get_running_loop().run_in_executor(_POOL, replace_file, path, value.to_bytes())


def _write(path: str, data: memoryview) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = f"{path}.{uuid.uuid4().hex}.partial"
    try:
        with open(part, "xb", buffering=0) as file:
            while data:
                data = data[file.write(data) :]
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise


def _read_all(requests: list[tuple[str, ByteRequest | None]]) -> list[bytes | None]:
    return [_read(path, byte_range) for path, byte_range in requests]


def _read(path: str, byte_range: ByteRequest | None) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as file:
            if byte_range is None:
                return file.readall()
            size = os.fstat(file.fileno()).st_size
            if isinstance(byte_range, RangeByteRequest):
                start, stop = byte_range.start, byte_range.end
            elif isinstance(byte_range, OffsetByteRequest):
                start, stop = byte_range.offset, size
            elif isinstance(byte_range, SuffixByteRequest):
                start, stop = max(0, size - byte_range.suffix), size
            else:
                raise TypeError(f"unexpected byte range {byte_range!r}")
            file.seek(start)
            parts = []
            while start < min(stop, size) and (part := file.read(min(stop, size) - start)):
                parts.append(part)
                start += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
