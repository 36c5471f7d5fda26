"""``nfs://server/export/path`` without a mount: NFS version 3 in user space, through the C library libnfs.

The library is called through ctypes, which releases the interpreter lock during each call. The binding on PyPI keeps
the lock: no other thread ran while a chunk was being read, so training stopped, and it hung if the server stopped
answering. Only version 3 is supported, because version 4 returned wrong values through libnfs.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import functools
import os
import stat
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.redaction import hide_secrets

_POOL = ThreadPoolExecutor(8, thread_name_prefix="dshuffle-nfs")
# Versions 4.x and 5.x; version 6 has different signatures.
_LIBRARIES = ("libnfs.so.13", "libnfs.so.14")

T = TypeVar("T")


class _Entry(ctypes.Structure):
    """The beginning of libnfs's ``struct nfsdirent``."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("inode", ctypes.c_uint64),
        ("type", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
    )


class NfsStore(Store):
    """A Zarr store on an NFS export.

    Parameters
    ----------
    url
        ``nfs://server/path``. The longest prefix of the path that the server allows to be mounted is mounted; the rest
        are folders in it.
    timeout
        Seconds that a call to the server may take.
    read_only
        Whether writing is refused.
    """

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(self, url: str, *, timeout: float, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        server, _, path = url.removeprefix("nfs://").partition("/")
        if not server or not path or "@" in server or "?" in url or ":" in server:
            raise InvalidParameter.of("url", url, "nfs://server/export/path", "The server's rpcbind gives the ports.")
        self._url, self._server, self._path, self._timeout = url, server, "/" + path.strip("/"), timeout
        _library()
        self._idle: list[_Connection] = []  # a libnfs connection supports only one caller at a time
        self._lock = threading.Lock()
        self._mountable: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._url, self._timeout, self.read_only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NfsStore) and (self._url, self.read_only) == (other._url, other.read_only)

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({hide_secrets(self._url)!r})"

    def with_read_only(self, read_only: bool = False) -> Self:
        """Return the same store, read-only or writable."""
        return type(self)(self._url, timeout=self._timeout, read_only=read_only)

    # -- zarr's interface --------------------------------------------------------------------------------------

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Read a file or a byte range of it; return ``None`` if the file does not exist."""
        data = await self._call(lambda client: client.read(key, byte_range))
        return None if data is None else prototype.buffer.from_array_like(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Read several files or ranges."""
        return list(await asyncio.gather(*(self.get(key, prototype, byte_range) for key, byte_range in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Whether a file exists."""
        return await self._call(lambda client: client.is_file(key))

    async def set(self, key: str, value: Buffer) -> None:
        """Write a temporary file in the same folder and rename it."""
        self._check_writable()
        data = np.ascontiguousarray(value.as_numpy_array()).view(np.uint8)
        await self._call(lambda client: client.write(key, data))

    async def delete(self, key: str) -> None:
        """Remove a file if it exists."""
        self._check_writable()
        await self._call(lambda client: client.remove(key))

    async def delete_dir(self, prefix: str) -> None:
        """Remove a folder and its contents."""
        self._check_writable()
        await self._call(lambda client: client.remove_folder(prefix.rstrip("/")))

    def list(self) -> AsyncIterator[str]:
        """List all keys."""
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """List all keys that begin with a prefix."""
        folder = prefix.rpartition("/")[0]
        for key in await self._call(lambda client: list(client.walk(folder))):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List the names directly below a prefix."""
        for name, _ in await self._call(lambda client: client.names(prefix.rstrip("/"))):
            yield name

    # -- connections -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all connections; one that is in use, at the end of its call. Another call connects again."""
        with self._lock:
            self._is_open = False
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    async def _call(self, do: Callable[[_Connection], T]) -> T:
        await self._ensure_open()

        def run() -> T:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            connection = connection or self._connect()
            try:
                result = do(connection)
            except BaseException:  # late answers may remain on this connection
                connection.close()
                raise
            with self._lock:
                if keeps := self._is_open:
                    self._idle.append(connection)
            if not keeps:
                connection.close()
            return result

        return await asyncio.get_running_loop().run_in_executor(_POOL, run)

    def _connect(self) -> _Connection:
        if self._mountable is not None:
            return _Connection(self._server, self._mountable, self._path, self._timeout)
        export = self._path
        while True:
            try:
                connection = _Connection(self._server, export, self._path, self._timeout)
            except OSError as exc:
                refused = exc.errno in (errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.EPERM)
                if not refused:
                    raise
                export = os.path.dirname(export)
                if export == "/":
                    raise OSError(
                        exc.errno,
                        f"{self._server} exports neither {self._path} nor a folder above it to this machine "
                        f"(showmount -e {self._server} lists its exports): {exc.strerror}",
                    ) from None
            else:
                self._mountable = export
                return connection


def _reopened(url: str, timeout: float, read_only: bool) -> NfsStore:
    return NfsStore(url, timeout=timeout, read_only=read_only)


class _Connection:
    """One mounted export, used by one thread at a time."""

    def __init__(self, server: str, export: str, path: str, timeout: float) -> None:
        self._lib = _library()
        self._nfs = self._lib.nfs_init_context()
        if not self._nfs:
            raise MemoryError("libnfs cannot allocate memory for a connection")
        self._root = path.removeprefix(export).rstrip("/")
        self._lib.nfs_set_version(self._nfs, 3)
        self._lib.nfs_set_timeout(self._nfs, max(1, int(timeout * 1000)))
        try:
            self._check(self._lib.nfs_mount(self._nfs, server.encode(), export.encode()), f"mount {server}:{export}")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._lib.nfs_destroy_context(self._nfs)

    def read(self, key: str, byte_range: ByteRequest | None) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        handle = self._opened(key, os.O_RDONLY)
        if handle is None:
            return None
        try:
            size, start = self._status(handle).size, 0
            stop = size
            if isinstance(byte_range, RangeByteRequest):
                start, stop = byte_range.start, min(size, byte_range.end)
            elif isinstance(byte_range, OffsetByteRequest):
                start = byte_range.offset
            elif isinstance(byte_range, SuffixByteRequest):
                start = max(0, size - byte_range.suffix)
            data = np.empty(max(0, stop - start), np.uint8)
            at = 0
            while at < data.size:
                came = self._lib.nfs_pread(self._nfs, handle, start + at, data.size - at, data.ctypes.data + at)
                at += self._check(came, f"read {key}")
                if came == 0:
                    raise OSError(errno.EIO, f"{key} was truncated while it was read")
            return data
        finally:
            self._lib.nfs_close(self._nfs, handle)

    def write(self, key: str, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        beside = f"{key}.{uuid.uuid4().hex}.partial"
        handle = self._opened(beside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        if handle is None:
            self._make_folders(os.path.dirname(key))
            handle = self._opened(beside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            if handle is None:
                raise OSError(errno.ENOENT, f"the folder of {key} cannot be created")
        try:
            try:
                at = 0
                while at < data.size:
                    at += self._check(
                        self._lib.nfs_pwrite(self._nfs, handle, at, data.size - at, data.ctypes.data + at),
                        f"write {key}",
                    )
            finally:
                closed = self._lib.nfs_close(self._nfs, handle)
            self._check(closed, f"write {key}")
            self._check(self._lib.nfs_rename(self._nfs, self._at(beside), self._at(key)), f"write {key}")
        except BaseException:
            self._lib.nfs_unlink(self._nfs, self._at(beside))
            raise

    def remove(self, key: str) -> None:
        self._check(self._lib.nfs_unlink(self._nfs, self._at(key)), f"remove {key}", absent_is_fine=True)

    def remove_folder(self, folder: str) -> None:
        for name, is_folder in self.names(folder):
            key = f"{folder}/{name}" if folder else name
            if is_folder:
                self.remove_folder(key)
            else:
                self.remove(key)
        if folder:
            self._check(self._lib.nfs_rmdir(self._nfs, self._at(folder)), f"remove {folder}", absent_is_fine=True)

    def is_file(self, key: str) -> bool:
        attributes = _Status()
        status = self._lib.nfs_stat64(self._nfs, self._at(key), ctypes.byref(attributes))
        absent = self._check(status, f"stat {key}", absent_is_fine=True) < 0
        return not absent and stat.S_ISREG(attributes.mode)

    def names(self, folder: str) -> list[tuple[str, bool]]:
        """List the names in a folder and whether each is a folder; empty if the folder does not exist."""
        directory = ctypes.c_void_p()
        status = self._lib.nfs_opendir(self._nfs, self._at(folder), ctypes.byref(directory))
        if self._check(status, f"list {folder or 'the top level'}", absent_is_fine=True) < 0:
            return []
        try:
            entries = []
            while entry := self._lib.nfs_readdir(self._nfs, directory):
                name = os.fsdecode(entry.contents.name)
                if name not in (".", ".."):
                    entries.append((name, stat.S_ISDIR(entry.contents.mode) or entry.contents.type == 2))
            return sorted(entries)
        finally:
            self._lib.nfs_closedir(self._nfs, directory)

    def walk(self, folder: str) -> Iterator[str]:
        for name, is_folder in self.names(folder):
            key = f"{folder}/{name}" if folder else name
            if is_folder:
                yield from self.walk(key)
            else:
                yield key

    def _make_folders(self, folder: str) -> None:
        path = b""
        for name in self._at(folder).strip(b"/").split(b"/"):
            path += b"/" + name
            status = self._lib.nfs_mkdir(self._nfs, path)
            if status != -errno.EEXIST:
                self._check(status, f"create the folder {os.fsdecode(path)}")

    def _opened(self, key: str, flags: int) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        status = self._lib.nfs_open(self._nfs, self._at(key), flags, ctypes.byref(handle))
        return handle if self._check(status, f"open {key}", absent_is_fine=True) == 0 else None

    def _status(self, handle: ctypes.c_void_p) -> _Status:
        attributes = _Status()
        self._check(self._lib.nfs_fstat64(self._nfs, handle, ctypes.byref(attributes)), "stat a file")
        return attributes

    def _at(self, key: str) -> bytes:
        return os.fsencode(f"{self._root}/{key}" if key else self._root or "/")

    def _check(self, status: int, what: str, *, absent_is_fine: bool = False) -> int:
        if status >= 0 or (absent_is_fine and status in (-errno.ENOENT, -errno.ENOTDIR)):
            return int(status)
        message = self._lib.nfs_get_error(self._nfs)
        raise OSError(-status, f"cannot {what}: {os.fsdecode(message) if message else os.strerror(-status)}")


class _Status(ctypes.Structure):
    """libnfs's ``struct nfs_stat_64``."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks"),
            *("atime", "mtime", "ctime", "atime_nsec", "mtime_nsec", "ctime_nsec", "used"),
        )
    )


@functools.cache
def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        break
    else:
        raise DatasetError(
            "nfs:// URLs need the C library libnfs, version 4 or 5; install it with "
            "apt-get install libnfs13 (Debian 12) or libnfs14"
        )
    context, path, pointer, integer, u64 = (
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64),
    )
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "nfs_init_context": (context, ()),
        "nfs_destroy_context": (None, (context,)),
        "nfs_get_error": (path, (context,)),
        "nfs_set_version": (integer, (context, integer)),
        "nfs_set_timeout": (None, (context, integer)),
        "nfs_mount": (integer, (context, path, path)),
        "nfs_open": (integer, (context, path, integer, pointer)),
        "nfs_close": (integer, (context, pointer)),
        "nfs_pread": (integer, (context, pointer, u64, u64, pointer)),
        "nfs_pwrite": (integer, (context, pointer, u64, u64, pointer)),
        "nfs_stat64": (integer, (context, path, pointer)),
        "nfs_fstat64": (integer, (context, pointer, pointer)),
        "nfs_rename": (integer, (context, path, path)),
        "nfs_unlink": (integer, (context, path)),
        "nfs_mkdir": (integer, (context, path)),
        "nfs_rmdir": (integer, (context, path)),
        "nfs_opendir": (integer, (context, path, pointer)),
        "nfs_readdir": (ctypes.POINTER(_Entry), (context, pointer)),
        "nfs_closedir": (None, (context, pointer)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
