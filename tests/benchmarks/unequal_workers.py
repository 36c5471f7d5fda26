"""How long an epoch takes if one worker is slower than the others, with equal and with measured shares.

    python tests/benchmarks/unequal_workers.py [--workers 4] [--times 4] [--rows 20000] [--row-bytes 1024]
                                               [--seconds 2.5]

Workers are processes of this machine. Their training is emulated: a task takes a fixed time for each of its samples, so
that equal shares take ``--seconds`` on the slow rank. Rows are exchanged as always. In the ideal epoch all ranks train
equally long, and nothing else takes time. For each kind of shares: the median of the last epochs, their spread,
and the part of the ideal. The last line says when measured shares changed, what that epoch took, and the weights. The
command fails if measured shares take more than 1.15 of the ideal.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time

import numpy as np
from distributed import Client, LocalCluster

import dshuffle

BOUND = 1.15
"""Largest part of the ideal that measured shares may take."""

EPOCHS, COUNTED = 12, 6
"""Epochs of a session, and those at its end that count."""


def train(partition: dshuffle.Partition, seconds_per_sample: float, times: float) -> None:
    """Take a time that grows with the number of samples; rank 0 takes a multiple of it."""
    started = time.perf_counter()
    trained = 0
    for batch in partition.batches(1000):
        trained += len(batch["x"])
    due = started + trained * seconds_per_sample * (times if partition.rank == 0 else 1)
    time.sleep(max(0.0, due - time.perf_counter()))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Median seconds of an epoch: the ideal, and with each kind of shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--times", type=float, default=4, help="how much slower rank 0 is")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--row-bytes", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=2.5, help="of an epoch with equal shares")
    options = parser.parse_args(arguments)
    each = options.seconds / options.times / (options.rows / options.workers)
    ideal = options.rows * each / (options.workers - 1 + 1 / options.times)
    task = functools.partial(train, seconds_per_sample=each, times=options.times)
    rows = np.random.default_rng(0).integers(0, 256, (options.rows, options.row_bytes), dtype=np.uint8)
    medians = {"ideal": ideal}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": rows})
        print(f"{'shares':10} {'median':>8} {'least':>8} {'most':>8} {'of the ideal':>13}")
        print(f"{'ideal':10} {ideal:6.2f} s")
        for shares in ("even", "measured"):
            with dshuffle.Shuffler(client, dataset, shares=shares) as shuffler:
                for epoch in shuffler.epochs(EPOCHS):
                    client.gather(epoch.map(task))
            seconds = [record.epoch_seconds for record in shuffler.records[-COUNTED:]]
            medians[shares] = statistics.median(seconds)
            print(
                f"{shares:10} {medians[shares]:6.2f} s {min(seconds):6.2f} s {max(seconds):6.2f} s "
                f"{medians[shares] / ideal:13.2f}"
            )
        changed = [record for record in shuffler.records if record.weights]
        if changed:
            first, before = changed[0], shuffler.records[changed[0].epoch - 1]
            print(
                f"changed in epoch {first.epoch}, which waited {first.waited_seconds:.2f} s; the epoch before took "
                f"{before.epoch_seconds:.2f} s. Weights: {changed[-1].weights}"
            )
    return medians


if __name__ == "__main__":
    seconds = main()
    if seconds["measured"] > BOUND * seconds["ideal"]:
        sys.exit(f"measured shares take more than {BOUND} of the ideal")
