"""Measure the read rate of a store: write files of 256 KiB and read them back in random order.

    python storage/testbed.py exec w1 python storage/read_rate.py nfs://10.78.0.4/shared
    python storage/testbed.py exec w1 python storage/read_rate.py s3://dshuffle
    python storage/testbed.py exec w1 python storage/read_rate.py /run/dshuffle-testbed/shared

Several processes read, each one file at a time. The result is in Mbit/s, along with the idle share of the processors.

nfs:// is read with the C library libnfs (apt-get install libnfs13, or libnfs14), which has no cache. s3:// needs
obstore. At a path, the page cache of this machine is emptied of the files before they are read. A server may have the
files in its memory, because they have just been written.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

LIBRARIES = ("libnfs.so.13", "libnfs.so.14")
FILE_BYTES = 256 << 10
FOLDER = "read-rate"

Access = tuple[Callable[[str, bytes], None], Callable[[str], bytes]]


def access(url: str) -> Access:
    """Return functions that write and read a file."""
    scheme = urlsplit(url).scheme
    if scheme == "nfs":
        export = Export(url)
        return export.write, export.read
    if scheme == "s3":
        store = _module("obstore.store").from_url(url)
        return lambda name, data: store.put(name, data), lambda name: bytes(store.get(name).bytes())
    folder = Path(url)
    return lambda name, data: _write_file(folder / name, data), lambda name: (folder / name).read_bytes()


class Export:
    """Files of an NFS version 3 export.

    The Python package libnfs does not serve: it cannot be imported since Python 3.12, and ignores failed writes.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        if not parts.hostname or not parts.path:
            raise click.ClickException(f"{url!r} is not allowed; it must be like nfs://10.78.0.4/shared")
        self._library = _libnfs()
        self._context = ctypes.c_void_p(self._library.nfs_init_context())
        self._library.nfs_set_version(self._context, 3)
        self._check(self._library.nfs_mount(self._context, parts.hostname.encode(), parts.path.encode()))

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        file = self._open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        written = self._check(self._library.nfs_pwrite(self._context, file, 0, len(data), data))
        self._check(self._library.nfs_close(self._context, file))
        if written != len(data):
            raise click.ClickException(f"{self.url}: only {written} of {len(data)} bytes of {name} were written")

    def read(self, name: str) -> bytes:
        """Read a file, of which at most ``FILE_BYTES`` bytes."""
        file, buffer = self._open(name, os.O_RDONLY), ctypes.create_string_buffer(FILE_BYTES)
        count = self._check(self._library.nfs_pread(self._context, file, 0, FILE_BYTES, buffer))
        self._check(self._library.nfs_close(self._context, file))
        return buffer.raw[:count]

    def _open(self, name: str, flags: int) -> ctypes.c_void_p:
        file = ctypes.c_void_p()
        self._check(self._library.nfs_open(self._context, f"/{name}".encode(), flags, ctypes.byref(file)))
        return file

    def _check(self, result: int) -> int:
        if result < 0:
            reason = self._library.nfs_get_error(self._context).decode(errors="replace")
            raise click.ClickException(f"{self.url}: {reason}")
        return result


def _libnfs() -> ctypes.CDLL:
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        break
    else:
        raise click.ClickException(
            "nfs:// URLs need the C library libnfs, version 4 or 5: apt-get install libnfs13, or libnfs14"
        )
    pointer, text, integer, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64
    library.nfs_init_context.restype = pointer
    library.nfs_get_error.restype = text
    library.nfs_get_error.argtypes = [pointer]
    library.nfs_set_version.argtypes = [pointer, integer]
    library.nfs_mount.argtypes = [pointer, text, text]
    library.nfs_open.argtypes = [pointer, text, integer, pointer]
    library.nfs_close.argtypes = [pointer, pointer]
    library.nfs_pwrite.argtypes = [pointer, pointer, size, size, text]
    library.nfs_pread.argtypes = [pointer, pointer, size, size, pointer]
    return library


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # only pages that are on the disk leave the page cache
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise click.ClickException(
            f"this URL needs {name}, which is not installed: pip install {name.partition('.')[0]}"
        ) from error


def write_share(url: str, names: list[str]) -> None:
    """Write files of random bytes."""
    write, _ = access(url)
    for name in names:
        write(name, os.urandom(FILE_BYTES))


def read_share(url: str, names: list[str]) -> int:
    """Read files and return their total size in bytes."""
    _, read = access(url)
    return sum(len(read(name)) for name in names)


def idle_and_total() -> tuple[int, int]:
    """Return the idle and the total clock ticks of this machine's processors."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return ticks[3] + ticks[4], sum(ticks)


@click.command()
@click.argument("url")
@click.option("--megabytes", type=click.IntRange(1), default=100, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=4, show_default=True)
def main(url: str, megabytes: int, processes: int) -> None:
    """Measure the store at URL: nfs://..., s3://BUCKET or a path."""
    names = [f"{FOLDER}-{number}" for number in range(max(processes, megabytes * 1_000_000 // FILE_BYTES))]
    with ProcessPoolExecutor(processes) as pool:
        list(pool.map(write_share, [url] * processes, [names[rank::processes] for rank in range(processes)]))
        random.shuffle(names)
        (idle, total), begun = idle_and_total(), time.monotonic()
        counts = list(pool.map(read_share, [url] * processes, [names[rank::processes] for rank in range(processes)]))
        seconds = time.monotonic() - begun
        idle_after, total_after = idle_and_total()
    if sum(counts) != len(names) * FILE_BYTES:
        raise click.ClickException(f"read {sum(counts)} bytes, but {len(names) * FILE_BYTES} bytes were written")
    share = (idle_after - idle) / max(1, total_after - total)
    click.echo(f"{url}: {sum(counts) * 8e-6 / seconds:.0f} Mbit/s, processors {share:.0%} idle")


if __name__ == "__main__":
    main()
