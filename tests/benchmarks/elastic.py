"""What it costs when workers join and retire: exchanges of an elastic session, and of one that opens again instead.

    python tests/benchmarks/elastic.py [--workers 6] [--joins 2] [--rows 40000] [--row-bytes 8192] [--link 200mbit]

Workers are processes of this machine whose links are emulated. A session trains two epochs, workers join, it trains
two more epochs, and the same number of workers retires. An epoch is a task that does nothing. For every change: seconds
of the exchange, bytes that workers received from each other and from the dataset, and how long the busiest link takes.
This is the link of the worker that receives most, or of one that retires and sends its whole partition. The last line
is that of a session that is opened again on the same workers.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.compare import EmulatedRates
from dshuffle.units import human_bytes, parse_rate


def show(what: str, record: dshuffle.EpochRecord, rate: float, leaving: float = 0.0) -> None:
    busiest, received = max(leaving, *record.wire_received_bytes), human_bytes(sum(record.wire_received_bytes))
    print(
        f"{what:34} {record.n_workers:7} {record.exchange_seconds:8.2f} s {received:>10} "
        f"{human_bytes(record.store_bytes):>10} {busiest / rate:8.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--joins", type=int, default=2)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--row-bytes", type=int, default=8192)
    parser.add_argument("--link", default="200 Mbit/s")
    parser.add_argument("--assignment", default="global")
    options = parser.parse_args()
    few, many, rate = options.workers, options.workers + options.joins, parse_rate("--link", options.link)
    config = EmulatedRates(links=rate).configuration(many)
    rows = np.random.default_rng(0).integers(0, 256, (options.rows, options.row_bytes), dtype=np.uint8)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=few, threads_per_worker=1, dashboard_address=None, config=config) as cluster,
        Client(cluster) as client,
    ):
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": rows})
        with dshuffle.Shuffler(client, dataset, elastic=True, assignment=options.assignment) as shuffler:
            for epoch in shuffler.epochs(8):
                client.gather(epoch.map(len))
                if epoch.number == 1:
                    cluster.scale(many)
                    client.wait_for_workers(many)
                elif epoch.number == 4:
                    client.retire_workers(shuffler.addresses[few:])
        print(f"{'exchange':34} {'workers':>7} {'takes':>10} {'received':>10} {'from store':>10} {'at link':>10}")
        before: dshuffle.EpochRecord | None = None
        for record in shuffler.records:
            changed = before is not None and record.n_workers != before.n_workers
            what = (
                "first epoch" if before is None else "workers have changed" if changed else "an epoch like the others"
            )
            retired = before is not None and record.n_workers < before.n_workers
            show(what, record, rate, options.rows * options.row_bytes / many if retired else 0.0)
            before = record
        with dshuffle.Shuffler(client, dataset, first_epoch=8, assignment=options.assignment) as shuffler:
            for epoch in shuffler.epochs(1):
                client.gather(epoch.map(len))
        show("a new session, opened from the store", shuffler.records[0], rate)


if __name__ == "__main__":
    main()
