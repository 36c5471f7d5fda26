"""Seconds of the parts that decide how long an epoch takes: planning, kernels, reading, exchanges and tasks.

    python tests/benchmarks/suite.py [NAME ...]

The last line of the output is JSON: name -> seconds, the median of several runs in this process. Run on a quiet
machine. ``revisions.py`` runs this for two revisions, and compares them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.planning import Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.planner import OwnPlanner
from dshuffle.rows import RowLayout, checksum_rows, gather_rows, scatter_verified

MIB = 2**20
REPEATS = 5
EPOCHS = 6


def timed(call: Callable[[], object]) -> float:
    """Median seconds of a call, after one that may compile."""
    call()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def own_plan(assignment: str, n_samples: int = 10_000_000, n_workers: int = 256) -> float:
    """One worker plans its own part of an epoch."""
    planner = OwnPlanner(ShuffleSpec(n_samples, n_workers, Choices(assignment)), 3)
    epochs = iter(range(1, 100))
    return timed(lambda: planner.plan(next(epochs), "peer"))


def coded_plan(n_samples: int = 20_000, n_workers: int = 8) -> float:
    """All packets of an epoch are planned."""
    spec = ShuffleSpec(n_samples, n_workers, Choices("global", "clique", cache_fraction=0.5))

    def plan() -> None:
        planner = EpochPlanner(spec)
        planner.load()
        planner.advance("clique")

    return timed(plan)


def kernels(mib: int = 64, row_nbytes: int = 4096) -> dict[str, float]:
    """Rows are gathered, checksummed, and scattered with a comparison of their checksums."""
    layout = RowLayout.of({"x": (np.dtype("u1"), (row_nbytes,))})
    n_rows = mib * MIB // row_nbytes
    rows, arrived, ids = layout.empty(n_rows), layout.empty(n_rows), np.arange(n_rows)
    rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, dtype=np.uint8)
    slots = np.random.default_rng(1).permutation(n_rows)
    gather_rows(rows, slots, arrived)
    checksums = checksum_rows(arrived, ids)
    return {
        "kernels: gather": timed(lambda: gather_rows(rows, slots, arrived)),
        "kernels: checksums": timed(lambda: checksum_rows(rows, ids)),
        "kernels: scatter": timed(lambda: scatter_verified(rows, slots, arrived, ids, checksums)),
    }


def reading(mib: int = 64, row_nbytes: int = 4096) -> float:
    """All rows of a dataset on the local disk are read in random order."""
    n_rows = mib * MIB // row_nbytes
    with tempfile.TemporaryDirectory() as folder:
        rows = np.random.default_rng(0).integers(0, 256, (n_rows, row_nbytes), dtype=np.uint8)
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": rows}, chunk_rows=256)
        ids, target = np.random.default_rng(1).permutation(n_rows), dataset.layout.empty(n_rows)
        return timed(lambda: dataset.read_into(target, np.arange(n_rows), ids))


@contextmanager
def epochs_of(n_workers: int, n_samples: int, row_nbytes: int) -> Iterator[tuple[Client, dshuffle.Shuffler]]:
    """A session on workers in this process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=n_workers, processes=False, memory_limit=0, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        rows = np.zeros((n_samples, row_nbytes), np.uint8)
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": rows})
        with dshuffle.Shuffler(client, dataset) as shuffler:
            yield client, shuffler


def exchange(n_workers: int = 4, mib: int = 64, row_nbytes: int = 4096) -> float:
    """The exchange of an epoch between workers in this process, while nobody trains."""
    with epochs_of(n_workers, mib * MIB // row_nbytes, row_nbytes) as (client, shuffler):
        for epoch in shuffler.epochs(EPOCHS):
            client.gather(epoch.map(len))
        return statistics.median(record.exchange_seconds for record in shuffler.records[1:])


def tasks(n_workers: int = 16) -> float:
    """An epoch of tasks that do nothing, with next to no rows to move."""
    with epochs_of(n_workers, 100 * n_workers, 8) as (client, shuffler):
        ended = [time.perf_counter()]
        for epoch in shuffler.epochs(EPOCHS):
            client.gather(epoch.map(len))
            ended.append(time.perf_counter())
        return statistics.median(np.diff(ended)[1:].tolist())


SUITE: dict[str, Callable[[], float | dict[str, float]]] = {
    "plan: global": lambda: own_plan("global"),
    "plan: partial:0.1": lambda: own_plan("partial:0.1"),
    "plan: coded": coded_plan,
    "kernels": kernels,
    "reading": reading,
    "exchange": exchange,
    "tasks": tasks,
}
"""Name -> what measures it."""


def main(names: list[str]) -> dict[str, float]:
    """Measure some parts, or all."""
    found: dict[str, float] = {}
    for name in names or SUITE:
        measured = SUITE[name]()
        found |= measured if isinstance(measured, dict) else {name: measured}
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
