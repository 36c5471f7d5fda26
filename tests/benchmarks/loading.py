"""Loading first partitions: bytes from the store, and seconds, beside another revision.

    python tests/benchmarks/loading.py [--before REVISION] [--repeats 3] [--mib 256]

Two settings. "emulated": 8 workers in one process, links of 100 Mbit/s, a store of 400 Mbit/s for all workers together,
64 MiB in chunks of 1 MiB. "host": 8 processes on this machine without emulation, with contiguous sharding and
uncompressed chunks, and with random sharding and chunks compressed with zstd. The times are from the first epoch's
records: from the order to begin until all workers have their rows. "first read to last row" leaves out the messages
before and after that. The last line of the output is JSON.

Beside the bytes of each load, of all workers in stored bytes, there are the largest part that one of 32 workers reads,
times 32; the bytes of a resumption with three workers in place of five; and the most memory, in MiB, that a process
takes while it loads, beyond its partition.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import zarr
from distributed import Client, LocalCluster

from dshuffle import Dataset, Shuffler, create_dataset, open_dataset
from dshuffle.exchange.cache_partition import CachePartition

MIB = 2**20
LINK, STORE = 100e6 / 8, 400e6 / 8
EMULATED_NBYTES = 64 * MIB


def stored_nbytes(url: str) -> int:
    """Bytes of the stored chunks of a dataset."""
    return sum(path.stat().st_size for path in Path(url).glob("*/c/**/*") if path.is_file())


def compressed(url: str, rows: np.ndarray) -> None:
    """Write rows as a group with zstd, as other programs do."""
    group = zarr.create_group(url)
    array = group.create_array(
        "x",
        shape=rows.shape,
        dtype=rows.dtype,
        chunks=(1024, rows.shape[1]),
        compressors=zarr.codecs.ZstdCodec(level=1),
    )
    array[:] = rows


@contextlib.contextmanager
def reads_and_rows() -> Iterator[list[float]]:
    """Times at which chunks begin to be read, and at which rows have been placed, by the workers of this process."""
    times: list[float] = []
    read, unpack = Dataset.read_into, CachePartition.unpack

    def read_into(self: Dataset, *args: Any, **options: Any) -> Any:
        times.append(time.perf_counter())
        return read(self, *args, **options)

    def unpacked(self: CachePartition, *args: Any, **options: Any) -> Any:
        try:
            return unpack(self, *args, **options)
        finally:
            times.append(time.perf_counter())

    Dataset.read_into, CachePartition.unpack = read_into, unpacked
    try:
        yield times
    finally:
        Dataset.read_into, CachePartition.unpack = read, unpack


def loaded(client: Client, dataset: Any, repeats: int, **choices: Any) -> tuple[float, float]:
    """Median seconds of a first load, and bytes from the store."""
    seconds, nbytes = [], 0
    for _ in range(repeats):
        with Shuffler(client, dataset, **choices) as shuffler:
            next(shuffler.epochs(1))
        record = shuffler.records[0]
        seconds.append(record.exchange_seconds)
        nbytes = record.store_bytes
    return statistics.median(seconds), nbytes


def read_bytes(dask_worker: Any) -> list[int]:
    """Bytes that each session of a worker has read from the store."""
    sessions = dask_worker.plugins["dshuffle"].sessions.values()
    return [session.dataset.traffic.fetched_bytes for session in sessions]


def reset_peak() -> int:
    """Let the kernel forget the peak of this process; its bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def spread(folder: str) -> dict[str, float]:
    """How evenly 32 workers read whole samples and windows, and what a job reads that resumes with fewer workers."""
    results = {}
    whole = open_dataset(f"{folder}/emulated.zarr")
    stored = stored_nbytes(f"{folder}/emulated.zarr")
    options = {"processes": False, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(n_workers=32, **options) as cluster, Client(cluster) as client:
        for name, dataset in (("whole", whole), ("windows", whole.windows({"x": [-1, 0, 1]}))):
            with Shuffler(client, dataset, assignment="global") as shuffler:
                next(shuffler.epochs(1))
                parts = [sum(values) for values in client.run(read_bytes).values()]
            results |= {f"{name}, 32 bytes": sum(parts) / stored, f"{name}, 32 most": 32 * max(parts) / stored}
    with (
        LocalCluster(n_workers=5, **options) as cluster,
        Client(cluster) as client,
        Shuffler(client, whole, assignment="global") as shuffler,
    ):
        client.gather(next(shuffler.epochs(2)).map(len))
        state = shuffler.state_dict()
    with (
        LocalCluster(n_workers=3, **options) as cluster,
        Client(cluster) as client,
        Shuffler.resume(client, whole, state) as shuffler,
    ):
        next(shuffler.epochs(2))
        parts = [sum(values) for values in client.run(read_bytes).values()]
        results |= {"resumed, 3 bytes": sum(parts) / stored, "resumed, 3 most": 3 * max(parts) / stored}
    return results


def measure(folder: str, repeats: int) -> dict[str, float]:
    """Measure the package that is imported here."""
    options = {"n_workers": 8, "threads_per_worker": 1, "dashboard_address": ":0"}
    emulated = open_dataset(f"{folder}/emulated.zarr")
    stored = stored_nbytes(f"{folder}/emulated.zarr")
    results = {}
    rates = {"dshuffle.emulated-links": "100mbit", "dshuffle.emulated-store": "400mbit"}
    with (
        dask.config.set(rates),
        LocalCluster(processes=False, memory_limit=0, **options) as cluster,
        Client(cluster) as client,
    ):
        loaded(client, emulated.select(np.arange(8192)), 1, assignment="global")  # compiles
        seconds, nbytes = loaded(client, emulated, repeats, assignment="global")
        results |= {"emulated seconds": seconds, "emulated bytes": nbytes / stored}
        spans = []
        for _ in range(repeats):
            with reads_and_rows() as times:
                loaded(client, emulated, 1, assignment="global")
            spans.append(max(times) - min(times))
        results["first read to last row"] = statistics.median(spans)
    with LocalCluster(processes=True, **options) as cluster, Client(cluster) as client:
        contiguous = {"assignment": "global", "sharding": "contiguous"}
        for name, choices in (("plain", contiguous), ("zstd", {"assignment": "global"})):
            dataset = open_dataset(f"{folder}/{name}.zarr")
            loaded(client, dataset, 1, **choices)  # compiles, and fills the page cache
            seconds, nbytes = loaded(client, dataset, repeats, **choices)
            stored = stored_nbytes(f"{folder}/{name}.zarr")
            results |= {f"{name} seconds": seconds, f"{name} bytes": nbytes / stored}
            before = client.run(reset_peak)
            loaded(client, dataset, 1, **choices)
            partition = dataset.n_samples * dataset.row_nbytes / 8
            peaks = client.run(status, "VmHWM")
            beyond = max(peaks[address] - before[address] for address in before) - partition
            results |= {f"{name} beyond MiB": beyond / MIB}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="revision to compare with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.repeats)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        rows = rng.integers(0, 256, (EMULATED_NBYTES // 1024, 1024), dtype=np.uint8)
        create_dataset(f"{folder}/emulated.zarr", {"x": rows}, chunk_rows=1024)
        rows = rng.integers(0, 256, (options.mib * MIB // 1024, 1024), dtype=np.uint8)
        create_dataset(f"{folder}/plain.zarr", {"x": rows}, chunk_rows=1024)
        compressed(f"{folder}/zstd.zarr", rows % 8)
        results = {}
        for revision in filter(None, (options.before, "this")):
            path = str(Path(__file__).parents[2])
            if revision != "this":
                path = f"{folder}/{revision}"
                os.mkdir(path)
                root = str(Path(__file__).parents[2])
                archive = subprocess.run(
                    ["git", "-C", root, "archive", revision, "dshuffle"], check=True, stdout=subprocess.PIPE
                )
                subprocess.run(["tar", "-x", "-C", path], input=archive.stdout, check=True)
            command = [sys.executable, __file__, "--measure", folder, "--repeats", str(options.repeats)]
            environment = {**os.environ, "PYTHONPATH": path}
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
            if ran.returncode:
                sys.exit(ran.stderr)
            results[revision] = json.loads(ran.stdout.splitlines()[-1])
            if revision != "this":  # it read and placed rows by other functions
                del results[revision]["first read to last row"]
        results["this"] |= spread(folder)
        bound = max(EMULATED_NBYTES / STORE, 7 / 8 * EMULATED_NBYTES / 8 / LINK)
        for name in results["this"]:
            figures = "  ".join(
                f"{revision} {found[name]:8.3f}" for revision, found in results.items() if name in found
            )
            print(f"{name:22} {figures}")
        span = results["this"]["first read to last row"]
        print(f"emulated bound: {bound:.2f} s, times the bound: {span / bound:.3f}")
        print(json.dumps(results))


if __name__ == "__main__":
    main()
