"""What an epoch costs apart from transferring rows: many workers in one process, and tasks that do nothing.

    python tests/benchmarks/many_workers.py [--workers 64] [--epochs 10]

All workers, the scheduler and the client share one interpreter. The seconds of an epoch are therefore almost
entirely the processor time of all of them. `tasks alone` is as many tasks, one on each worker, without dshuffle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

import dshuffle


def nothing(argument: Any) -> None:
    """A task."""


def tasks_alone(client: Client, repeats: int) -> float:
    """Median seconds of a task on each worker."""
    workers, seconds = list(client.scheduler_info(n_workers=-1)["workers"]), []
    for repeat in range(repeats):
        started = time.perf_counter()
        client.gather([client.submit(nothing, (repeat, worker), workers=[worker], pure=False) for worker in workers])
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def session(client: Client, dataset: dshuffle.Dataset, assignment: str, epochs: int) -> dict[str, float]:
    """Seconds until a session is open, and median seconds of its epochs after the first two."""
    started = time.perf_counter()
    with dshuffle.Shuffler(client, dataset, assignment=assignment) as shuffler:
        opened, seconds = time.perf_counter() - started, []
        began = time.perf_counter()
        for epoch in shuffler.epochs(epochs + 2):
            client.gather(epoch.map(nothing))
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
    return {"open": opened, "epoch": statistics.median(seconds[2:])}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(argv)
    x = np.zeros((1000 * options.workers, 4))
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=options.workers,
            threads_per_worker=1,
            processes=False,
            dashboard_address=":0",
            memory_limit=0,
        ) as cluster,
        Client(cluster) as client,
    ):
        dataset = dshuffle.create_dataset(f"{folder}/x.zarr", {"x": x}, chunk_rows=1000)
        found: dict[str, Any] = {"first session": session(client, dataset, "local", options.epochs)}
        for assignment in ("local", "global"):
            found[assignment] = session(client, dataset, assignment, options.epochs)
        found["tasks alone"] = {"epoch": tasks_alone(client, options.epochs)}
    for name, seconds in found.items():
        print(f"{name:14s} " + ", ".join(f"{what} {value:.3f} s" for what, value in seconds.items()))
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
