"""Measure the read rate of a store: write files of 256 KiB and read them back in random order.

    python storage/testbed.py exec w1 python storage/read_rate.py nfs://10.78.0.4/shared
    python storage/testbed.py exec w1 python storage/read_rate.py s3://dshuffle
    python storage/testbed.py exec w1 python storage/read_rate.py /run/dshuffle-testbed/shared

Several processes read, each with one request at a time. The result is in Mbit/s, along with the idle share of the
processors. nfs:// needs the Python package libnfs, and s3:// needs obstore.
"""

from __future__ import annotations

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

FILE_BYTES = 256 << 10
FOLDER = "read-rate"

Access = tuple[Callable[[str, bytes], None], Callable[[str], bytes]]


def access(url: str) -> Access:
    """Return functions that write and read a file."""
    scheme = urlsplit(url).scheme
    if scheme == "nfs":
        mount = _module("libnfs").NFS(f"{url}?version=3")

        def write(name: str, data: bytes) -> None:
            file = mount.open(f"/{name}", "wb")
            file.write(bytearray(data))
            file.close()

        def read(name: str) -> bytes:
            file = mount.open(f"/{name}", "rb")
            data = bytes(file.read())
            file.close()
            return data

        return write, read
    if scheme == "s3":
        store = _module("obstore.store").from_url(url)
        return lambda name, data: store.put(name, data), lambda name: bytes(store.get(name).bytes())
    folder = Path(url)
    return lambda name, data: _write_file(folder / name, data), lambda name: (folder / name).read_bytes()


def _write_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)


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
