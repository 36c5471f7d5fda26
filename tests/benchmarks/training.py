"""How fast workers train on their partitions, against the SGD kernel alone.

    python tests/benchmarks/training.py [--samples 200000] [--features 127] [--workers 2] [--epochs 12]

`kernel`: passes over contiguous arrays in memory, on one core, while nothing else runs. `kernel beside`: the same in
the workers' tasks, right before and after their passes, whatever the machine and the exchange do at that moment. `local
pass`: what a worker does with its partition, looking its samples up in the cache in a new order. `fit`: the whole of
`fit_linear_regression`, with the residuals that it measures after every epoch, the averaging, and the exchange; `pass
in fit`: the passes in it, at the beginning of each exchange. Rates are samples a second and worker, medians; read the
ratios, of which `local pass of kernel beside` is taken pass by pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.training import compile_kernels, fit_linear_regression, keyed_regression
from dshuffle.training.linear_regression import local_pass, sgd_pass


def kernel_seconds(rows: np.ndarray, targets: np.ndarray) -> float:
    """How long the kernel takes on rows that lie as it wants them."""
    rows.flags.writeable = targets.flags.writeable = False  # as a partition's are
    weights, in_order = np.zeros(rows.shape[1]), np.arange(len(rows))
    started = time.perf_counter()
    sgd_pass(weights, rows, 0, targets[:, np.newaxis], 0, in_order, 1e-3)
    return time.perf_counter() - started


def pass_and_kernel(partition: dshuffle.Partition) -> tuple[float, float]:
    """Samples a second of a pass over a partition, and of the kernel on copies of the same rows; a task."""
    rows, targets = partition["x"], partition["y"]
    before = kernel_seconds(rows, targets)
    started = time.perf_counter()
    local_pass(partition, None, 1e-3)
    taken = time.perf_counter() - started
    return len(rows) / taken, len(rows) / ((before + kernel_seconds(rows, targets)) / 2)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--features", type=int, default=127)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--assignment", default="global")
    options = parser.parse_args(argv)
    if options.epochs < 2:
        parser.error("--epochs must be at least 2: the first one compiles")
    n_dense = options.features - options.features // 2
    compile_kernels()
    with tempfile.TemporaryDirectory() as folder:
        arrays = keyed_regression(options.samples, n_keys=options.features // 2, n_dense=n_dense)
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", arrays)
        part = dataset.read_rows(np.arange(options.samples // options.workers))
        alone = statistics.median(kernel_seconds(part["x"], part["y"]) for _ in range(options.epochs))
        with (
            LocalCluster(
                n_workers=options.workers, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=0
            ) as cluster,
            Client(cluster) as client,
            dask.config.set({"dshuffle.message-bytes": "4 MiB"}),
            dshuffle.Shuffler(client, dataset, assignment=options.assignment) as shuffler,
        ):
            # The first epoch imports and compiles.
            measured = [client.gather(epoch.map(pass_and_kernel)) for epoch in shuffler.epochs(options.epochs)][1:]
            history = fit_linear_regression(shuffler, epochs=options.epochs, step=1e-3)
    passes = [one for epoch in measured for one in epoch]
    seconds = np.diff([point.seconds for point in history.points])
    rates = {
        "kernel": len(part["x"]) / alone,
        "kernel beside": statistics.median(beside for _, beside in passes),
        "local pass": statistics.median(rate for rate, _ in passes),
        "pass in fit": statistics.median(history.worker_rates),
        "fit": options.samples / options.workers / float(np.median(seconds)),
    }
    result = {
        "rates": rates,
        "of kernel": {name: rate / rates["kernel"] for name, rate in rates.items()},
        "local pass of kernel beside": statistics.median(rate / beside for rate, beside in passes),
    }
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
