"""How fast workers train on their partitions, against the SGD kernel alone.

    python tests/benchmarks/training.py [--samples 200000] [--features 127] [--workers 2] [--epochs 12]
        [--assignment global] [--scheduler tcp://... --data /shared/training.zarr]

On processes of this machine, or on the workers of a running cluster, all of which must see the folder of the data.

`kernel`: passes over contiguous arrays in memory, on one worker while nothing else runs, every pass in a new random
order, as SGD that shuffles has it; `kernel in stored order`: from the first row to the last, which is no shuffling and
hardly waits for memory. `kernel beside`: the kernel in the workers' tasks, right before and after their passes,
whatever the machine and the exchange do at that moment. `local pass`: what a worker does with its partition, looking
its samples up in the cache in a new order. `fit`: the whole of `fit_linear_regression`, with the residuals that it
measures after every epoch, the averaging, and the exchange; `pass in fit`: the passes in it, at the beginning of each
exchange. Rates are samples a second and worker, medians; read the ratios, of which `local pass of kernel beside` is
taken pass by pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.kernels import compile_kernels
from dshuffle.synthetic import keyed_regression
from dshuffle.training import fit_linear_regression
from dshuffle.training.linear_regression import local_pass, visit


def kernel_seconds(rows: np.ndarray, targets: np.ndarray, *, stored: bool = False) -> float:
    """How long the kernel takes on rows that lie side by side, in a new random order or in the stored one."""
    rows.flags.writeable = targets.flags.writeable = False  # as a partition's are
    order = np.arange(len(rows)) if stored else np.random.default_rng().permutation(len(rows))
    weights = np.zeros(rows.shape[1])
    started = time.perf_counter()
    visit(weights, rows, 0, targets[:, np.newaxis], 0, order, weights, -1e-3, 1)
    return time.perf_counter() - started


def pass_and_kernel(partition: dshuffle.Partition) -> tuple[float, float]:
    """Samples a second of a pass over a partition, and of the kernel on copies of the same rows; a task."""
    rows, targets = partition["x"], partition["y"]
    before = kernel_seconds(rows, targets)
    started = time.perf_counter()
    local_pass(partition, None, 1e-3)
    taken = time.perf_counter() - started
    return len(rows) / taken, len(rows) / ((before + kernel_seconds(rows, targets)) / 2)


def kernel_alone(dataset: dshuffle.Dataset, n_samples: int, repeats: int) -> tuple[float, float]:
    """Samples a second of the kernel in random and in stored order; a task."""
    part = dataset.read_rows(np.arange(n_samples))
    random, stored = (
        statistics.median(kernel_seconds(part["x"], part["y"], stored=stored) for _ in range(repeats))
        for stored in (False, True)
    )
    return n_samples / random, n_samples / stored


def measure(client: Client, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """All rates, of the workers that there are."""
    n_dense = options.features - options.features // 2
    arrays = keyed_regression(options.samples, n_keys=options.features // 2, n_dense=n_dense)
    dataset = dshuffle.create_dataset(folder, arrays)
    with (
        dask.config.set({"dshuffle.message-bytes": "4 MiB"}),
        dshuffle.Shuffler(client, dataset, assignment=options.assignment) as shuffler,
    ):
        share = options.samples // shuffler.n_workers
        alone = client.submit(kernel_alone, dataset, share, options.epochs, workers=shuffler.addresses[:1])
        kernel, stored = alone.result()
        # The first epoch imports and compiles.
        measured = [client.gather(epoch.map(pass_and_kernel)) for epoch in shuffler.epochs(options.epochs)][1:]
        history = fit_linear_regression(shuffler, epochs=options.epochs, step=1e-3)
    passes = [one for epoch in measured for one in epoch]
    seconds = np.diff([point.seconds for point in history.points])
    rates = {
        "kernel": kernel,
        "kernel in stored order": stored,
        "kernel beside": statistics.median(beside for _, beside in passes),
        "local pass": statistics.median(rate for rate, _ in passes),
        "fit": share / float(np.median(seconds)),
    }
    return {
        "rates": rates,
        "of kernel": {name: rate / rates["kernel"] for name, rate in rates.items()},
        "local pass of kernel beside": statistics.median(rate / beside for rate, beside in passes),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--features", type=int, default=127)
    parser.add_argument("--workers", type=int, default=2, help="processes to start, without --scheduler")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--assignment", default="global")
    parser.add_argument("--scheduler", help="of a running cluster")
    parser.add_argument("--data", help="where to put the dataset; it must not exist. By default a temporary folder")
    options = parser.parse_args(argv)
    if options.epochs < 2:
        parser.error("--epochs must be at least 2: the first one compiles")
    compile_kernels()
    with contextlib.ExitStack() as stack:
        folder = options.data or stack.enter_context(tempfile.TemporaryDirectory()) + "/d.zarr"
        address = options.scheduler or stack.enter_context(
            LocalCluster(
                n_workers=options.workers, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=0
            )
        )
        result = measure(stack.enter_context(Client(address)), folder, options)
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
