"""What an epoch of shuffled batches takes with dshuffle, and with a file that all processes read.

    python tests/benchmarks/loaders.py [--samples 200000] [--row-bytes 1024] [--workers 4] [--training 0.0]
        [--cold] [--folder DIR]

Every way delivers the same rows, in batches of 256, to as many processes of this machine. Every process adds up one
column of each batch, and the sums must agree. `--training` is the time that a process trains in every epoch, a part of
it after each batch, in which it needs no processor. `--cold` empties the page cache before every epoch (root only), so
that files are read from the disk. `--folder` says where all files are, for instance on storage behind a slow link.

* `dshuffle`: partitions in the memory of Dask workers, which exchange samples while the processes train.
* `DistributedSampler`: every process reads its part of a random permutation from a file in memory (`np.memmap`), a
  batch at a time, some batches ahead. It draws the permutation as PyTorch's `DistributedSampler` does, without PyTorch.

`launchers.py` compares with other loaders, and trains a network.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.units import human_bytes, human_seconds

BATCH = 256

Batches = Callable[[int, int, str, tuple[int, int]], Iterator[np.ndarray]]
"""Batches of an epoch for one of some processes: epoch, rank, folder, and the numbers of processes and of samples."""


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def add_up(batches: Iterator[np.ndarray], n_samples: int, training: float) -> int:
    total = 0
    for batch in batches:
        total += int(batch[:, 0].sum(dtype=np.int64))
        if training:
            time.sleep(training * len(batch) / n_samples)
    return total


def of_partition(partition: dshuffle.Partition, training: float) -> int:
    return add_up((batch["x"] for batch in partition.batches(BATCH)), len(partition), training)


def ours(
    folder: str, x: np.ndarray, n_workers: int, epochs: int, training: float, cold: bool, **way: Any
) -> list[float]:
    with (
        LocalCluster(n_workers=n_workers, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        dataset = dshuffle.create_dataset(f"{folder}/x.zarr", {"x": x})
        with dshuffle.Shuffler(client, dataset, **way) as shuffler:
            seconds, last = [], time.perf_counter()
            for epoch in shuffler.epochs(epochs):
                assert sum(client.gather(epoch.map(of_partition, training))) == int(x[:, 0].sum(dtype=np.int64))
                seconds.append(time.perf_counter() - last)
                if cold:
                    drop_page_cache()
                last = time.perf_counter()
    return seconds


def from_memmap(epoch: int, rank: int, folder: str, sizes: tuple[int, int]) -> Iterator[np.ndarray]:
    n_workers, n_samples = sizes
    rows = np.load(f"{folder}/x.npy", mmap_mode="r")
    own = np.random.default_rng(epoch).permutation(n_samples)[rank::n_workers]
    for first in range(0, len(own), BATCH):
        yield rows[own[first : first + BATCH]]


def prefetched(batches: Iterator[np.ndarray], at_most: int = 8) -> Iterator[np.ndarray]:
    """Read batches ahead in a thread, as a `DataLoader` does in a process."""
    ready: queue.Queue[np.ndarray | None] = queue.Queue(at_most)

    def read() -> None:
        for batch in batches:
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


def _process(
    batches: Batches,
    rank: int,
    folder: str,
    sizes: tuple[int, int],
    epochs: int,
    training: float,
    turn: Barrier,
    out: Any,
) -> None:
    for epoch in range(epochs):
        turn.wait()
        out.put(add_up(prefetched(batches(epoch, rank, folder, sizes)), sizes[1] // sizes[0], training))
        turn.wait()


def theirs(
    batches: Batches, folder: str, x: np.ndarray, n_workers: int, epochs: int, training: float, cold: bool
) -> list[float]:
    spawn = multiprocessing.get_context("spawn")
    turn, out = spawn.Barrier(n_workers + 1), spawn.Queue()
    given = folder, (n_workers, len(x)), epochs, training, turn, out
    processes = [spawn.Process(target=_process, args=(batches, rank, *given), daemon=True) for rank in range(n_workers)]
    for process in processes:
        process.start()
    seconds = []
    for _ in range(epochs):
        if cold:
            drop_page_cache()
        turn.wait(300)
        began = time.perf_counter()
        turn.wait(300)
        seconds.append(time.perf_counter() - began)
        assert sum(out.get(timeout=60) for _ in processes) == int(x[:, 0].sum(dtype=np.int64))
    for process in processes:
        process.join(60)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--row-bytes", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=7, help="at least 2")
    parser.add_argument("--training", type=float, default=0.0)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", help="where the files are; by default the system's folder for temporary files")
    options = parser.parse_args()
    x = np.random.default_rng(0).integers(0, 256, (options.samples, options.row_bytes), dtype=np.uint8)
    share = options.workers, options.epochs, options.training, options.cold
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as folders:

        def folder() -> str:
            return folders.enter_context(tempfile.TemporaryDirectory(dir=options.folder))

        for way in ({"assignment": "global"}, {"assignment": "partial:0.1"}, {"assignment": "chunks"}):
            found[f"dshuffle, {way['assignment']}"] = ours(folder(), x, *share, **way)
        file = folder()
        np.save(f"{file}/x.npy", x)
        found["DistributedSampler on a file"] = theirs(from_memmap, file, x, *share)
    cold = ", page cache emptied before every epoch" if options.cold else ""
    print(
        f"{options.samples:,} rows, {human_bytes(x.nbytes)}, {options.workers} processes{cold}. Epochs after the first:"
    )
    print(f"{'way':30} {'median':>8} {'fastest':>8} {'slowest':>8} {'first':>8}")
    for name, (first, *seconds) in sorted(found.items(), key=lambda one: statistics.median(one[1][1:])):
        shown = map(human_seconds, (statistics.median(seconds), min(seconds), max(seconds), first))
        print(f"{name:30} " + " ".join(f"{one:>8}" for one in shown))


if __name__ == "__main__":
    main()
