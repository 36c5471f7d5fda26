"""Faults on real processes: nothing is lost, nothing is doubled, and the rows are those of the store.

    python tests/benchmarks/chaos.py [--faults 300] [--seed 0] [--workers 4]

Sessions of many kinds run one after another. In every second epoch a fault strikes a random worker, its disk or its
link, or the client, before, during or after the tasks. Each task compares its rows with the dataset's, and writes the
numbers of its samples to a file of its epoch and rank. Every second session does not fetch the results. After each
epoch that has ended, the files must have every sample once. Each session has a checkpoint, from which another session
trains on one more epoch. Two of three sessions have their partitions on a disk, and one of the two keeps them. The
table says how often each fault struck, what the client noticed, and how long the epoch took.

Run it as root: workers are then on hosts of their own, with links that are cut, and the disk is a small file system
that is filled. Without the rights or the commands for that, these faults are left out.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import logging
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
import numpy as np
from chaos_faults import Faults, small_disk
from distributed import Client, Future, LocalCluster
from network_hosts import Hosts

from dshuffle import Epoch, Partition, Shuffler, create_dataset
from dshuffle.errors import ClusterError, ExchangeError, WorkerLost

# Pairwise over assignments, deliveries and caches.
WAYS: list[dict[str, Any]] = [
    {"assignment": "global", "delivery": "peer"},
    {"assignment": "global", "delivery": "storage"},
    {"assignment": "global", "delivery": "peer", "cache_fraction": 0.5},
    {"assignment": "global", "delivery": "clique", "cache_fraction": 0.5, "caching": "recent"},
    {"assignment": "global", "delivery": "server", "cache_fraction": 0.5, "caching": "even"},
    {"assignment": "partial:0.3", "delivery": "peer"},
    {"assignment": "partial:0.3", "delivery": "storage"},
    {"assignment": "partial:0.3", "delivery": "peer", "cache_fraction": 0.5, "caching": "recent"},
    {"assignment": "partial:0.3", "delivery": "coded", "cache_fraction": 0.5},
    {"assignment": "local", "delivery": "peer"},
    {"assignment": "chunks", "delivery": "storage"},
    {"assignment": "chunks", "delivery": "peer"},
    {"assignment": "aligned", "delivery": "leftover"},
]
HEARTBEAT = 6.0
EPOCHS = 24
"""Epochs of a session."""


@dataclass
class Figures:
    """What a kind of fault has done."""

    count: int = 0
    """How often it struck."""
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    """Errors that the client saw, by type."""
    seconds: list[float] = field(default_factory=list)
    """Time that the epoch of the fault took, or the next one if that took longer."""


class Chaos:
    """Sessions that faults strike, and the check of their epochs."""

    def __init__(self, faults: Faults, options: Namespace, folder: Path) -> None:
        self.faults, self.folder = faults, folder
        self.client, self.dataset = faults.client, faults.dataset
        self.rng = random.Random(options.seed)
        self.left = options.faults
        self.figures = {name: Figures() for name in faults.by_name}
        self.deck: list[str] = []

    def draw(self) -> str:
        """The next fault. Each kind comes once before any comes again."""
        if not self.deck:
            self.deck = list(self.figures)
            self.rng.shuffle(self.deck)
        return self.deck.pop()

    def opened(self, open_session: Callable[[], Shuffler]) -> Shuffler:
        """Open a session; again if a worker is just ending because of the last fault."""
        for _ in range(3):
            try:
                return open_session()
            except ClusterError as error:
                print(f"a session could not be opened: {error}", flush=True)
                time.sleep(5.0)
        raise RuntimeError("no session could be opened")

    def session(self, way: dict[str, Any], places: dict[str, Any], epochs: int, gathers: bool) -> None:
        """Run a session with faults. Then another one goes on from its checkpoint."""
        way = {**way, "seed": self.rng.randrange(2**32)}
        with self.opened(lambda: Shuffler(self.client, self.dataset, **way, **places)) as shuffler:
            done = self.epochs(shuffler, epochs, gathers)
        self.faults.settle()
        self.client.wait_for_workers(len(self.faults.hosts.addresses))
        for path in self.folder.glob("*-*.npy"):  # of an epoch in which the session ended
            path.unlink()
        state = places["checkpoint"]
        with self.opened(lambda: Shuffler.resume(self.client, self.dataset, state, **places)) as shuffler:
            assert shuffler.next_epoch == done, f"resumed at epoch {shuffler.next_epoch}, and not {done}"
            for epoch in shuffler.epochs(1):
                self.train(epoch, True)
            self.check(done)
        state.unlink()
        shutil.rmtree(places.get("cache_directory", ""), ignore_errors=True)

    def epochs(self, shuffler: Shuffler, epochs: int, gathers: bool) -> int:
        """Train on the epochs of a session until it ends; how many have ended."""
        done = 0
        epoch: Epoch | None = None
        again: Epoch | None = None  # tasks of which did not finish
        fault = latest = ""  # of this epoch, and of this one or the one before
        started = time.monotonic()
        while True:
            try:
                if again is not None:
                    self.train(again, True)
                    again = None
                for epoch in shuffler.epochs(epochs - done):
                    self.end(epoch.number - 1, fault, latest, started)
                    started, done = time.monotonic(), epoch.number + 1
                    strikes = epoch.number % 2 == 1 and self.left > 0
                    fault = self.draw() if strikes else ""
                    latest = fault or latest
                    self.train(epoch, gathers, fault, shuffler)
                self.end(epochs - 1, fault, latest, started)
                return epochs
            except (ClusterError, ExchangeError, CancelledError) as error:
                # All workers are on the previous epoch, or its tasks did not finish. Another attempt goes on.
                self.figures[latest].errors[type(error).__name__] += 1
                print(f"after {latest}: {type(error).__name__}: {error}", flush=True)
                if isinstance(error, WorkerLost):
                    shuffler.close()
                    return done - 1
                shuffler.accept()
                if not isinstance(error, ExchangeError) and epoch is not None:
                    again = epoch
                time.sleep(1.0)

    def train(self, epoch: Epoch, gathers: bool, fault: str = "", shuffler: Shuffler | None = None) -> None:
        """Run the tasks of an epoch, with a fault before, during or after them."""
        when = self.rng.choice(["before", "during", "after"])

        def strike(moment: str, futures: list[Future[Any]]) -> None:
            if fault and shuffler is not None and when == moment:
                self.left -= 1
                self.figures[fault].count += 1
                self.faults.by_name[fault](shuffler, self.rng.randrange(shuffler.n_workers), futures)

        strike("before", [])
        futures = epoch.map(checked, str(self.folder), 0.2)
        if when == "during":
            time.sleep(0.1)
            strike("during", futures)
        if gathers:
            self.client.gather(futures)
        strike("after", futures)

    def end(self, number: int, fault: str, latest: str, started: float) -> None:
        """Check an epoch that has ended, and note how long it took if it is the one of a fault or the next one."""
        if number < 0:
            return
        self.check(number)
        seconds = time.monotonic() - started
        if fault:
            self.figures[fault].seconds.append(seconds)
        elif latest:
            self.figures[latest].seconds[-1] = max(seconds, self.figures[latest].seconds[-1])

    def check(self, number: int) -> None:
        """Check that every sample was trained on once in an epoch, and remove the files of the epoch."""
        paths = sorted(self.folder.glob(f"{number}-*.npy"))
        samples = np.sort(np.concatenate([np.load(path) for path in paths]))
        assert np.array_equal(samples, np.arange(self.dataset.n_samples)), f"lost or doubled in epoch {number}"
        for path in paths:
            path.unlink()

    def table(self) -> str:
        lines = [
            "| fault | times | errors that the client saw | epoch, median | longest |",
            "|---|---|---|---|---|",
        ]
        for name, figures in self.figures.items():
            errors = ", ".join(f"{count} `{error}`" for error, count in figures.errors.items()) or "none"
            seconds = figures.seconds or [math.nan]
            median = statistics.median(seconds)
            lines.append(f"| {name} | {figures.count} | {errors} | {median:.1f} s | {max(seconds):.1f} s |")
        return "\n".join(lines)


def checked(partition: Partition, folder: str, seconds: float) -> None:
    """Compare the rows of a partition with the dataset's, and write the numbers of its samples to a file."""
    time.sleep(seconds)
    truth = np.load(f"{folder}/truth.npz")
    sample_ids = partition.sample_ids.copy()
    for name in partition.names:
        if not np.array_equal(partition[name], truth[name][sample_ids]):
            raise AssertionError(f"a wrong row on rank {partition.rank}")
    np.save(f"{folder}/{partition.epoch}-{partition.rank}.part.npy", sample_ids)
    os.replace(
        f"{folder}/{partition.epoch}-{partition.rank}.part.npy", f"{folder}/{partition.epoch}-{partition.rank}.npy"
    )


def main(argv: list[str] | None = None) -> dict[str, Figures]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args(argv)
    settings = {
        "dshuffle.heartbeat": HEARTBEAT,
        "dshuffle.replacement-timeout": "10m",  # on a busy machine, a nanny may take minutes to start a worker
        "distributed.scheduler.allowed-failures": 10**6,
        "distributed.comm.timeouts.connect": "10s",
    }
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # each fault would fill many lines
    rng = np.random.default_rng(options.seed)
    truth = {"x": rng.random((4000, 40)), "y": np.arange(4000)}
    epochs, started = 0, time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        np.savez(folder / "truth.npz", **truth)
        dataset = create_dataset(str(folder / "d.zarr"), truth, chunk_rows=100)
        disk = stack.enter_context(small_disk(folder / "disk"))
        stack.enter_context(dask.config.set(settings))
        hosts = stack.enter_context(Hosts(options.workers, folder))
        if not hosts.have_links:
            print("this process may not make networks and mounts, so no disk is filled and no link is cut", flush=True)
        cluster = LocalCluster(n_workers=0, host=hosts.address, dashboard_address=None)
        client = stack.enter_context(Client(stack.enter_context(cluster)))
        hosts.start_workers(cluster.scheduler_address)
        chaos = Chaos(Faults(hosts, client, dataset, disk, HEARTBEAT), options, folder)
        in_memory = {"checkpoint": disk / "checkpoint.json"}
        on_disk = {**in_memory, "cache_directory": str(disk / "partitions")}
        kept = {**on_disk, "checkpoint": folder / "checkpoint.json", "keep_cache": True}
        places: list[dict[str, Any]] = [in_memory, on_disk, kept]
        stack.callback(lambda: print(f"\n{chaos.table()}\n", flush=True))  # also of a run that fails
        for number, way in enumerate(itertools.cycle(WAYS)):
            if chaos.left <= 0:
                break
            client.wait_for_workers(options.workers)
            chaos.session(way, places[number % 3], EPOCHS, gathers=number % 2 == 0)
            epochs += EPOCHS + 1
            print(
                f"{options.faults - chaos.left} faults, {epochs} epochs, {time.monotonic() - started:.0f} s", flush=True
            )
    print(f"{options.faults} faults in {epochs} epochs: nothing lost, nothing doubled, every row as in the dataset.")
    return chaos.figures


if __name__ == "__main__":
    main()
