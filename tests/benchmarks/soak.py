"""Thousands of epochs in one session: nothing may grow.

    python tests/benchmarks/soak.py [--epochs 5000] [--workers 3]

A session of short epochs runs on worker processes of this machine. The table compares the first tenth of the epochs,
after a warm-up, with the last tenth: seconds of an epoch, memory and open files of every process, and what the
scheduler remembers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

from dshuffle import Shuffler, create_dataset


def usage() -> dict[str, float]:
    """Memory, open files, threads and Python objects of this process."""
    import gc

    import psutil

    gc.collect()
    process = psutil.Process()
    return {
        "MiB": process.memory_info().rss / 2**20,
        "open files": process.num_fds(),
        "threads": process.num_threads(),
        "objects": len(gc.get_objects()),
    }


def remembered(dask_scheduler: Any) -> dict[str, float]:
    """What the scheduler remembers, beside its process."""
    plugin = dask_scheduler.plugins["dshuffle"]
    [coordinator] = plugin.coordinators.values()
    return {"tasks": len(dask_scheduler.tasks), "coroutines of the session": len(coordinator.tasks)}


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args(argv)
    tenth = max(1, options.epochs // 10)
    seconds: list[float] = []
    samples: list[dict[str, dict[str, float]]] = []
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        rows = {"x": np.random.default_rng(0).random((3000, 32)), "y": np.arange(3000)}
        dataset = create_dataset(os.path.join(folder, "d.zarr"), rows, chunk_rows=300)

        def take() -> None:
            found = {f"worker {n}": use for n, use in enumerate(client.run(usage).values())}
            scheduler = {**usage(), **client.run_on_scheduler(remembered)}
            samples.append({"client and scheduler": scheduler, **found})

        with Shuffler(client, dataset) as shuffler:
            started = time.perf_counter()
            for epoch in shuffler.epochs(options.epochs):
                ids = client.gather(epoch.map(lambda partition: int(partition["y"].sum())))
                assert sum(ids) == 3000 * 2999 // 2
                seconds.append(time.perf_counter() - started)
                started = time.perf_counter()
                if epoch.number in (tenth, options.epochs - 1):
                    take()
                if epoch.number % tenth == 0:
                    print(f"{epoch.number} epochs", flush=True)
    first, last = statistics.median(seconds[tenth : 2 * tenth]), statistics.median(seconds[-tenth:])
    print("\n| | after a tenth of the epochs | at the end |\n|---|---|---|")
    print(f"| seconds of an epoch (median) | {first:.4f} | {last:.4f} |")
    table = {"epoch": [first, last]}
    for process, before in samples[0].items():
        for name, value in before.items():
            table[f"{name}, {process}"] = [value, samples[1][process][name]]
            print(f"| {name}, {process} | {value:,.0f} | {samples[1][process][name]:,.0f} |")
    return table


if __name__ == "__main__":
    main()
