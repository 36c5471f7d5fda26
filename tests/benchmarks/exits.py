"""Processor time that a worker process takes from the order to close until it has ended, after one session.

    python tests/benchmarks/exits.py [--samples 20000] [--workers 2]

`plain Dask` is a cluster that has run a task, `permute` one that has permuted a Dask array, without a session.
`collected` is a session's cluster whose workers end as the interpreter does by default: it collects everything that
numba has made. All clusters are measured in one run. They are local, so the operating system adds the time of their
processes, up to the last instruction, to that of this process's children.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
from distributed import Client, LocalCluster, Nanny, wait

import dshuffle
from dshuffle.process_exit import collect_and_freeze


def nothing(argument: Any) -> None:
    """A task."""


def plain(client: Client, url: str) -> None:
    client.gather(client.map(nothing, range(10), pure=False))


def session(client: Client, url: str) -> None:
    with dshuffle.Shuffler(client, dshuffle.open_dataset(url)) as shuffler:
        for epoch in shuffler.epochs(2):
            client.gather(epoch.map(nothing))


def permute(client: Client, url: str) -> None:
    wait(dshuffle.permute(client, dask.array.arange(1_000_000, chunks=10_000), 1))


def collected(client: Client, url: str) -> None:
    session(client, url)
    client.run(atexit.unregister, collect_and_freeze)


SCENES: dict[str, Callable[[Client, str], None]] = {
    "plain Dask": plain,
    "session": session,
    "permute": permute,
    "collected": collected,
}


def children_seconds() -> float:
    """Processor seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def end(nannies: list[Nanny]) -> None:
    """Close the workers, and let each take as long as it needs. By default, a nanny kills its worker after 4 s."""
    await asyncio.gather(*(nanny.close(timeout=100) for nanny in nannies))


def exit_seconds(run: Callable[[Client, str], None], n_workers: int, url: str) -> dict[str, float]:
    """Processor seconds of each worker from the order to close, and wall seconds until all have ended."""
    cluster = LocalCluster(n_workers=n_workers, threads_per_worker=1, dashboard_address=":0", memory_limit=0)
    with cluster, Client(cluster) as client:
        run(client, url)
        ended_before = children_seconds()
        so_far = sum(client.run(time.process_time).values())
        started = time.perf_counter()
        cluster.sync(end, list(cluster.workers.values()))
        wall = time.perf_counter() - started
    return {"processor": (children_seconds() - ended_before - so_far) / n_workers, "wall": wall}


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder) / "x.zarr")
        dshuffle.create_dataset(url, {"x": np.zeros((options.samples, 8))})
        results = {name: exit_seconds(run, options.workers, url) for name, run in SCENES.items()}
    for name, result in results.items():
        more = result["processor"] - results["plain Dask"]["processor"]
        print(f"{name:12s} {result['processor']:6.2f} s a worker, {more:+5.2f} s  ({result['wall']:.2f} s to close)")
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
