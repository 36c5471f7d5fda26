"""Faults on real processes: nothing is lost, nothing is doubled, and the rows are those of the store.

    python tests/benchmarks/chaos.py [--faults 200] [--seed 0] [--workers 4]

Sessions of many kinds run one after another on a local cluster. In every second epoch a fault strikes a random worker,
before, during or after its task. Each task returns its samples and compares their rows with the dataset's. The table
says how often each fault struck, what the client noticed, and how long the epoch took.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster

from dshuffle import Dataset, Partition, Shuffler, create_dataset
from dshuffle.errors import ClusterError, ExchangeError

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
    """A cluster, a dataset, and the faults."""

    def __init__(self, cluster: LocalCluster, client: Client, dataset: Dataset, seed: int) -> None:
        self.cluster, self.client, self.dataset = cluster, client, dataset
        self.rng = random.Random(seed)
        self.timers: list[threading.Timer] = []
        self.faults: dict[str, Callable[[Shuffler, int], None]] = {
            "SIGKILL": lambda shuffler, rank: self.send(shuffler, rank, signal.SIGKILL),
            "SIGSTOP, 3 s": lambda shuffler, rank: self.stop(shuffler, rank, 3.0),
            f"SIGSTOP, {2 * HEARTBEAT:.0f} s": lambda shuffler, rank: self.stop(shuffler, rank, 2 * HEARTBEAT),
            "SIGTERM": lambda shuffler, rank: self.send(shuffler, rank, signal.SIGTERM),
            "corrupted on the wire": lambda shuffler, rank: self.corrupt(shuffler, rank),
            "store away, 1 s": lambda shuffler, rank: self.hide(),
        }

    def send(self, shuffler: Shuffler, rank: int, how: signal.Signals) -> int:
        address = shuffler.addresses[rank]
        pid = next(nanny.pid for nanny in self.cluster.workers.values() if nanny.worker_address == address)
        os.kill(pid, how)
        return int(pid)

    def stop(self, shuffler: Shuffler, rank: int, seconds: float) -> None:
        self.later(seconds, os.kill, self.send(shuffler, rank, signal.SIGSTOP), signal.SIGCONT)

    def corrupt(self, shuffler: Shuffler, rank: int) -> None:
        self.client.run(spoil_next_message, workers=[shuffler.addresses[rank]])

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

    def session(self, way: dict[str, Any], epochs: int, figures: dict[str, Figures], truth: Any, left: int) -> int:
        """Run one session; the number of faults that struck."""
        struck, done = 0, 0
        with self.opened(way) as shuffler:
            fault = ""
            while done < epochs:
                started = time.monotonic()
                try:
                    for epoch in shuffler.epochs(epochs - done):
                        strikes = epoch.number % 2 == 1 and struck < left
                        fault = self.rng.choice(list(self.faults)) if strikes else fault
                        when = self.rng.choice(["before", "during", "after"])
                        rank = self.rng.randrange(shuffler.n_workers)  # rank 0 may also serve
                        if strikes and when == "before":
                            self.faults[fault](shuffler, rank)
                        futures = epoch.map(checked, truth, 0.2)
                        if strikes and when == "during":
                            time.sleep(0.1)
                            self.faults[fault](shuffler, rank)
                        samples = self.client.gather(futures)
                        if strikes and when == "after":
                            self.faults[fault](shuffler, rank)
                        if strikes:
                            struck += 1
                            figures[fault].count += 1
                        found = np.sort(np.concatenate(samples))
                        assert np.array_equal(found, np.arange(self.dataset.n_samples)), "lost or doubled"
                        if fault:
                            figures[fault].seconds.append(time.monotonic() - started)
                        started, done = time.monotonic(), epoch.number + 1
                        fault = fault if strikes else ""
                except ExchangeError as error:
                    # All are on the previous epoch, and another call goes on.
                    figures[fault].errors[type(error).__name__] += 1
                    time.sleep(1.0)
        for timer in self.timers:
            timer.join()
        self.timers.clear()
        return struck


def checked(partition: Partition, truth: dict[str, Any], seconds: float) -> Any:
    """The samples of a partition, whose rows must be the dataset's."""
    time.sleep(seconds)
    sample_ids = partition.sample_ids.copy()
    for name, rows in truth.items():
        if not np.array_equal(partition[name], rows[sample_ids]):
            raise AssertionError(f"a wrong row on rank {partition.rank}")
    return sample_ids


def spoil_next_message(dask_worker: Any) -> None:
    """Flip a bit in the next message that this worker packs."""
    from dshuffle.exchange.sender import Sender

    pack = Sender._pack

    async def spoilt(self: Any, message: Any, source: Any, first: int, last: int) -> Any:
        Sender._pack = pack  # type: ignore[method-assign]
        rows, checksums = await pack(self, message, source, first, last)
        if rows.size:
            rows[0, 0] ^= 1
        return rows, checksums

    Sender._pack = spoilt  # type: ignore[method-assign]


def main(argv: list[str] | None = None) -> dict[str, Figures]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args(argv)
    folder = tempfile.mkdtemp(prefix="chaos-")
    figures: dict[str, Figures] = collections.defaultdict(Figures)
    rng = np.random.default_rng(options.seed)
    truth = {"x": rng.random((4000, 40)), "y": np.arange(4000)}
    dataset = create_dataset(f"{folder}/d.zarr", truth, chunk_rows=100)
    settings = {
        "dshuffle.heartbeat": HEARTBEAT,
        "distributed.scheduler.allowed-failures": 10**6,
        "distributed.comm.timeouts.connect": "10s",
        "distributed.deploy.lost-worker-timeout": "1h",  # otherwise a worker killed twice would not come back
    }
    epochs, struck, started = 0, 0, time.monotonic()
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        chaos = Chaos(cluster, client, dataset, options.seed)
        while struck < options.faults:
            for way in WAYS:
                if struck >= options.faults:
                    break
                client.wait_for_workers(options.workers)
                struck += chaos.session(way, 24, figures, truth, options.faults - struck)
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
