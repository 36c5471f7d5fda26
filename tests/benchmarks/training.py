"""How fast workers train on their partitions, against the SGD kernel alone on one core.

    python tests/benchmarks/training.py [--samples 200000] [--features 127] [--workers 2] [--epochs 6]

All in one run, so read the ratios. `kernel`: one pass over contiguous arrays in memory. `local pass`: what a worker
does with its partition, gathering its rows out of the cache in a new order; the median worker and epoch. `fit`: the
whole of `fit_linear_regression`, with the residuals that it measures after every epoch, the averaging, and an exchange
under way beside it. Rates are samples a second and worker.
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
from dshuffle.training.linear_regression import sgd_pass


def kernel_rate(dataset: dshuffle.Dataset, repeats: int) -> float:
    """Samples a second of the kernel on rows that lie as it wants them."""
    part = dataset.read_rows(np.arange(min(dataset.n_samples, 50_000)))
    rows, targets = np.ascontiguousarray(part["x"]), part["y"][:, np.newaxis]
    rows.flags.writeable = targets.flags.writeable = False  # as a partition's are
    weights, in_order, taken = np.zeros(rows.shape[1]), np.arange(len(rows)), []
    for _ in range(repeats):
        started = time.perf_counter()
        sgd_pass(weights, rows, 0, targets, 0, in_order, 1e-3)
        taken.append(time.perf_counter() - started)
    return len(rows) / statistics.median(taken)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--features", type=int, default=127)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--assignment", default="global")
    options = parser.parse_args(argv)
    n_dense = options.features - options.features // 2
    compile_kernels()
    with tempfile.TemporaryDirectory() as folder:
        arrays = keyed_regression(options.samples, n_keys=options.features // 2, n_dense=n_dense)
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", arrays)
        kernel = kernel_rate(dataset, 5)
        with (
            LocalCluster(
                n_workers=options.workers, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=0
            ) as cluster,
            Client(cluster) as client,
            dask.config.set({"dshuffle.message-bytes": "4 MiB"}),
            dshuffle.Shuffler(client, dataset, assignment=options.assignment) as shuffler,
        ):
            history = fit_linear_regression(shuffler, epochs=options.epochs, step=1e-3)
    seconds = np.diff([point.seconds for point in history.points])
    rates = {
        "kernel": kernel,
        "local pass": statistics.median(history.worker_rates),
        "fit": options.samples / options.workers / float(np.median(seconds)),
    }
    result = {"rates": rates, "of kernel": {name: rate / kernel for name, rate in rates.items()}}
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
