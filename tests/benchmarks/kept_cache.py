"""How long the first epoch of a resumed session takes: with partitions kept on local disks, and from the dataset.

    python tests/benchmarks/kept_cache.py [--workers 4] [--rows 80000] [--row-bytes 8192] [--link 1gbit] [--store 1gbit]

Workers are processes of this machine. Their links, and the store that all of them share, are emulated. A session trains
two epochs and ends with its cluster. Then sessions on new clusters resume it: with as many workers, with two more, and
without its partitions. For every first epoch: seconds of the exchange, and bytes that workers received from each other
and from the dataset. The last line is what keeping costs: seconds of an epoch's exchange with and without it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.compare import EmulatedRates
from dshuffle.units import human_bytes, parse_rate


def run(
    rates: EmulatedRates, n_workers: int, folder: str, epochs: int, make: Callable[[Client], dshuffle.Shuffler]
) -> tuple[list[dshuffle.EpochRecord], dict[str, Any]]:
    """Train on a cluster of its own, and return the records and the state."""
    config = rates.configuration(n_workers)
    with (
        LocalCluster(
            n_workers=n_workers, threads_per_worker=1, dashboard_address=None, local_directory=folder, config=config
        ) as cluster,
        Client(cluster) as client,
        make(client) as shuffler,
    ):
        for epoch in shuffler.epochs(epochs):
            client.gather(epoch.map(len))
        return shuffler.records, shuffler.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=80_000)
    parser.add_argument("--row-bytes", type=int, default=8192)
    parser.add_argument("--link", default="1 Gbit/s")
    parser.add_argument("--store", default="1 Gbit/s")
    options = parser.parse_args()
    rates = EmulatedRates(links=parse_rate("--link", options.link), store=parse_rate("--store", options.store))
    rows = np.random.default_rng(0).integers(0, 256, (options.rows, options.row_bytes), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": rows})
        disk = {"cache_directory": f"{folder}/rows"}
        kept = {**disk, "keep_cache": True}
        few, many = options.workers, options.workers + 2
        without, _ = run(rates, few, folder, 4, lambda client: dshuffle.Shuffler(client, dataset, **disk))
        records, state = run(rates, few, folder, 4, lambda client: dshuffle.Shuffler(client, dataset, **kept))
        print(f"{'first epoch of a session':34} {'workers':>7} {'takes':>10} {'received':>10} {'from store':>10}")
        for what, n_workers in (("resumed", few), ("resumed, more workers", many), ("resumed, nothing kept", few)):
            if what.endswith("kept"):
                shutil.rmtree(kept["cache_directory"])
            [record], _ = run(
                rates, n_workers, folder, 1, lambda client: dshuffle.Shuffler.resume(client, dataset, state, **kept)
            )
            received = human_bytes(sum(record.wire_received_bytes))
            print(
                f"{what:34} {n_workers:7} {record.exchange_seconds:8.2f} s {received:>10} "
                f"{human_bytes(record.store_bytes):>10}"
            )
        seconds = [statistics.median(one.exchange_seconds for one in each[1:]) for each in (without, records)]
        print(f"an epoch's exchange: {seconds[0]:.2f} s, and {seconds[1]:.2f} s if the partition is kept")


if __name__ == "__main__":
    main()
