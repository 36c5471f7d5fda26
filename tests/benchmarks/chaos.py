"""Faults on real processes: nothing is lost, nothing is doubled, and the rows are those of the store.

    python tests/benchmarks/chaos.py [--faults 300] [--seed 0] [--workers 4]

Sessions of many kinds run one after another on a local cluster. In every second epoch a fault strikes a random worker,
or the client, before, during or after the tasks. Each task compares its rows with the dataset's, and writes the numbers
of its samples to a file of its epoch and rank. Every second session does not fetch the results. After each epoch that
has ended, the files must have every sample once. The table says how often each fault struck, what the client noticed,
and how long the epoch took.
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, Future, LocalCluster

from dshuffle import Dataset, Epoch, Partition, Shuffler, create_dataset
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


@dataclass
class Figures:
    """What one kind of fault has done."""

    count: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: list[float] = field(default_factory=list)


class Chaos:
    """A cluster, a dataset, and the faults. A fault is a function of the session, a rank and the running tasks."""

    def __init__(self, cluster: LocalCluster, client: Client, dataset: Dataset, folder: Path, seed: int) -> None:
        self.cluster, self.client, self.dataset, self.folder = cluster, client, dataset, folder
        self.rng = random.Random(seed)
        self.timers: list[threading.Timer] = []
        self.faults: dict[str, Callable[[Shuffler, int, list[Future[Any]]], None]] = {
            "SIGKILL": lambda shuffler, rank, _: self.send(shuffler, rank, signal.SIGKILL),
            "SIGKILL of rank 0": lambda shuffler, rank, _: self.send(shuffler, 0, signal.SIGKILL),
            "SIGKILL of two workers": lambda shuffler, rank, _: self.kill_two(shuffler, rank),
            "SIGSTOP, 3 s": lambda shuffler, rank, _: self.stop(shuffler, rank, 3.0),
            f"SIGSTOP, {2 * HEARTBEAT:.0f} s": lambda shuffler, rank, _: self.stop(shuffler, rank, 2 * HEARTBEAT),
            "SIGTERM": lambda shuffler, rank, _: self.send(shuffler, rank, signal.SIGTERM),
            "connections to peers reset": lambda shuffler, rank, _: self.run(shuffler, rank, reset_connections),
            "connection of the client reset": lambda shuffler, rank, _: self.cut_client(),
            "tasks cancelled": lambda shuffler, rank, futures: self.client.cancel(futures[rank:]),
            "corrupted on the wire": lambda shuffler, rank, _: self.run(shuffler, rank, spoil_next_message),
            "store away, 1 s": lambda shuffler, rank, _: self.hide(),
        }

    def send(self, shuffler: Shuffler, rank: int, how: signal.Signals) -> int:
        address = shuffler.addresses[rank]
        pid = next(nanny.pid for nanny in self.cluster.workers.values() if nanny.worker_address == address)
        os.kill(pid, how)
        return int(pid)

    def kill_two(self, shuffler: Shuffler, rank: int) -> None:
        for number in (rank, (rank + 1) % shuffler.n_workers):
            self.send(shuffler, number, signal.SIGKILL)

    def stop(self, shuffler: Shuffler, rank: int, seconds: float) -> None:
        self.later(seconds, os.kill, self.send(shuffler, rank, signal.SIGSTOP), signal.SIGCONT)

    def run(self, shuffler: Shuffler, rank: int, function: Callable[[Any], None]) -> None:
        self.client.run(function, workers=[shuffler.addresses[rank]])

    def cut_client(self) -> None:
        async def abort() -> None:
            comm: Any = self.client.scheduler_comm
            comm.comm.abort()

        self.client.sync(abort)
        while self.client.status != "running":
            time.sleep(0.05)

    def hide(self) -> None:
        hidden = self.dataset.url + ".away"
        if os.path.exists(hidden):
            return
        os.rename(self.dataset.url, hidden)
        self.later(1.0, os.rename, hidden, self.dataset.url)

    def later(self, seconds: float, call: Callable[..., Any], *args: Any) -> None:
        timer = threading.Timer(seconds, call, args)
        timer.start()
        self.timers.append(timer)

    def opened(self, way: dict[str, Any]) -> Shuffler:
        """Open a session; again if a worker is just ending because of the last fault."""
        for _ in range(3):
            try:
                return Shuffler(self.client, self.dataset, seed=self.rng.randrange(2**32), **way)
            except ClusterError as error:
                print(f"a session could not be opened: {error}", flush=True)
                time.sleep(5.0)
        raise RuntimeError("no session could be opened")

    def session(self, way: dict[str, Any], epochs: int, figures: dict[str, Figures], left: int, gathers: bool) -> int:
        """Run one session; the number of faults that struck."""
        struck, done = 0, 0
        epoch: Epoch | None = None
        again: Epoch | None = None  # tasks of which did not finish
        fault = ""
        for path in self.folder.glob("*-*.npy"):  # of an epoch in which a session ended
            path.unlink()
        with self.opened(way) as shuffler:
            while True:
                started = time.monotonic()
                try:
                    if again is not None:
                        self.train(shuffler, again, "", True)
                        again = None
                    for epoch in shuffler.epochs(epochs - done):
                        self.check(epoch.number - 1)
                        if fault:
                            figures[fault].seconds.append(time.monotonic() - started)
                        started, done = time.monotonic(), epoch.number + 1
                        strikes = epoch.number % 2 == 1 and struck < left
                        fault = self.rng.choice(list(self.faults)) if strikes else ""
                        if strikes:
                            struck += 1
                            figures[fault].count += 1
                        self.train(shuffler, epoch, fault, gathers)
                    self.check(epochs - 1)
                    break
                except (ClusterError, ExchangeError, CancelledError) as error:
                    # All workers are on the previous epoch, or its tasks did not finish. Another attempt goes on.
                    figures[fault].errors[type(error).__name__] += 1
                    shuffler.accept()
                    if isinstance(error, WorkerLost):  # the session has ended
                        break
                    if not isinstance(error, ExchangeError) and epoch is not None:
                        again = epoch
                    time.sleep(1.0)
        for timer in self.timers:
            timer.join()
        self.timers.clear()
        return struck

    def train(self, shuffler: Shuffler, epoch: Epoch, fault: str, gathers: bool) -> None:
        """Run the tasks of an epoch, with a fault before, during or after them."""
        rank, when = self.rng.randrange(shuffler.n_workers), self.rng.choice(["before", "during", "after"])
        if fault and when == "before":
            self.faults[fault](shuffler, rank, [])
        futures = epoch.map(checked, str(self.folder), 0.2)
        if fault and when == "during":
            time.sleep(0.1)
            self.faults[fault](shuffler, rank, futures)
        if gathers:
            self.client.gather(futures)
        if fault and when == "after":
            self.faults[fault](shuffler, rank, futures)

    def check(self, number: int) -> None:
        """Check that every sample was trained on once in an epoch, and remove the files of the epoch."""
        if number < 0:
            return
        paths = sorted(self.folder.glob(f"{number}-*.npy"))
        samples = np.sort(np.concatenate([np.load(path) for path in paths]))
        assert np.array_equal(samples, np.arange(self.dataset.n_samples)), f"lost or doubled in epoch {number}"
        for path in paths:
            path.unlink()


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


def reset_connections(dask_worker: Any) -> None:
    """Abort all connections of a worker to other workers."""
    for comms in [*dask_worker.rpc.available.values(), *dask_worker.rpc.occupied.values()]:
        for comm in list(comms):
            comm.abort()


def spoil_next_message(dask_worker: Any) -> None:
    """Flip a bit in the next message that this worker packs."""
    from dshuffle.exchange.sender import Sender

    pack = Sender._pack

    async def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        Sender._pack = pack  # type: ignore[method-assign]
        buffer = await pack(self, *args, **kwargs)
        if buffer.rows.size:
            buffer.rows[0, 0] ^= 1
        return buffer

    Sender._pack = spoilt  # type: ignore[method-assign]


def main(argv: list[str] | None = None) -> dict[str, Figures]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args(argv)
    folder = tempfile.mkdtemp(prefix="chaos-")
    figures: dict[str, Figures] = collections.defaultdict(Figures)
    rng = np.random.default_rng(options.seed)
    truth = {"x": rng.random((4000, 40)), "y": np.arange(4000)}
    np.savez(f"{folder}/truth.npz", **truth)
    dataset = create_dataset(f"{folder}/d.zarr", truth, chunk_rows=100)
    settings = {
        "dshuffle.heartbeat": HEARTBEAT,
        "dshuffle.replacement-timeout": "10m",  # on a busy machine, a nanny may take minutes to start a worker
        "distributed.scheduler.allowed-failures": 10**6,
        "distributed.comm.timeouts.connect": "10s",
        "distributed.deploy.lost-worker-timeout": "1h",  # otherwise a worker killed twice would not come back
    }
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # each fault would be told in many lines
    epochs, struck, started = 0, 0, time.monotonic()
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        chaos = Chaos(cluster, client, dataset, Path(folder), options.seed)
        while struck < options.faults:
            for way in WAYS:
                if struck >= options.faults:
                    break
                client.wait_for_workers(options.workers)
                gathers = (epochs // 24) % 2 == 0
                struck += chaos.session(way, 24, figures, options.faults - struck, gathers)
                epochs += 24
                print(f"{struck} faults, {epochs} epochs, {time.monotonic() - started:.0f} s", flush=True)
    shutil.rmtree(folder)
    print("\n| fault | times | errors that the client saw | median epoch | longest epoch |\n|---|---|---|---|---|")
    for name, found in sorted(figures.items()):
        if name:
            errors = ", ".join(f"{count} {error}" for error, count in found.errors.items()) or "none"
            print(
                f"| {name} | {found.count} | {errors} | {statistics.median(found.seconds):.1f} s "
                f"| {max(found.seconds):.1f} s |"
            )
    print(f"\n{struck} faults in {epochs} epochs: nothing lost, nothing doubled, every row as in the dataset.")
    return figures


if __name__ == "__main__":
    main()
