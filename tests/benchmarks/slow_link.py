"""How long an exchange takes if the link of one worker is slower than the others, with equal and with smaller shares.

    python tests/benchmarks/slow_link.py [--workers 4] [--times 4] [--rows 20000] [--row-bytes 1024] [--link 20mbit]
                                         [--cache 0.6]

Workers are processes of this machine, and all links are emulated: rank 0 has ``--link``, and the others have a rate
that is ``--times`` higher. Shares are equal, or that of rank 0 is as many times smaller as its link is slower. Caches
hold a fraction of all samples, so peers can choose who sends a sample. For each kind of shares: the median of the
exchanges, their spread, the bytes that rank 0 sent and received in one, and the part of the time that the slowest link
needs for what it receives.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import dask
import numpy as np
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.emulated_links import HEADERS
from dshuffle.units import human_bytes, parse_rate

EPOCHS = 6


def emulate(rate: float) -> None:
    """Give this worker a link of a rate in bytes per second."""
    dask.config.set({"dshuffle.emulated-links": f"{rate}B"})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Median seconds of an exchange with each kind of shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--times", type=float, default=4, help="how much slower the link of rank 0 is")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--row-bytes", type=int, default=1024)
    parser.add_argument("--link", default="20mbit", help="rate of the link of rank 0")
    parser.add_argument("--cache", type=float, default=0.6, help="fraction of all samples that a worker holds")
    options = parser.parse_args(arguments)
    slow = parse_rate("--link", options.link)
    rates = np.array([slow] + [slow * options.times] * (options.workers - 1))
    rows = np.random.default_rng(0).integers(0, 256, (options.rows, options.row_bytes), dtype=np.uint8)
    medians = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": rows})
        with dshuffle.Shuffler(client, dataset) as shuffler:
            addresses = shuffler.addresses
        for address, rate in zip(addresses, rates, strict=True):
            client.run(emulate, rate, workers=[address])
        print(f"{'shares':8} {'median':>8} {'least':>8} {'most':>8} {'rank 0 sent':>12} {'received':>9} {'bound':>7}")
        for name, shares in {"even": "even", "smaller": [1.0] + [options.times] * (options.workers - 1)}.items():
            with dshuffle.Shuffler(client, dataset, shares=shares, cache_fraction=options.cache) as shuffler:
                assert shuffler.addresses == addresses
                for epoch in shuffler.epochs(EPOCHS):
                    client.gather(epoch.map(len))
            records = shuffler.records[1:]  # the first epoch was read from the dataset
            seconds = [record.exchange_seconds for record in records]
            last = records[-1]
            bound = float((np.array(last.wire_received_bytes) * HEADERS / rates).max())
            medians[name] = statistics.median(seconds)
            print(
                f"{name:8} {medians[name]:6.2f} s {min(seconds):6.2f} s {max(seconds):6.2f} s "
                f"{human_bytes(last.wire_sent_bytes[0]):>12} {human_bytes(last.wire_received_bytes[0]):>9} "
                f"{medians[name] / bound:7.2f}"
            )
    return medians


if __name__ == "__main__":
    main()
