"""Epochs of partitions that are several times as large as a worker's memory, beside reading them once from the disk.

python tests/benchmarks/beyond_memory.py --times 4 --row-nbytes 4096
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.errors import CacheBudgetError
from dshuffle.units import human_bytes, human_seconds

BLOCK = 1 << 20


def drop_page_cache() -> bool:
    """Empty the page cache, which root can."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return True
    return False


def read_once(folder: str, nbytes: int) -> float:
    """Seconds to read a file of this size from a disk, with an empty page cache if that is possible."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(-(-nbytes // BLOCK)):
            file.write(os.urandom(4096) * (BLOCK // 4096))
        file.flush()
        os.fsync(file.fileno())
        drop_page_cache()
        started = time.perf_counter()
        with open(file.name, "rb", buffering=0) as again:
            while again.read(BLOCK):
                pass
        return time.perf_counter() - started


def train(partition: dshuffle.Partition) -> tuple[np.ndarray, float]:
    """Read every row in training order; return the ids and the sum of the first items."""
    total = sum(float(batch["x"][:, 0].astype(np.float64).sum()) for batch in partition.batches(256))
    return partition.sample_ids.copy(), total


@click.command()
@click.option("--workers", default=2, show_default=True)
@click.option("--limit", "limit_mib", default=600, show_default=True, help="Memory limit of a worker in MiB.")
@click.option("--times", default=4.0, show_default=True, help="Bytes of a partition's slots / memory limit.")
@click.option("--row-nbytes", default=4096, show_default=True)
@click.option("--epochs", default=4, show_default=True)
@click.option("--cold/--warm", default=True, show_default=True, help="Whether to empty the page cache in every epoch.")
@click.option("--folder", default=None, help="Folder on the disk to use.  [default: a temporary one]")
def main(
    workers: int, limit_mib: int, times: float, row_nbytes: int, epochs: int, cold: bool, folder: str | None
) -> None:
    """Measure epochs of global + peer with partitions on a disk."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        share = int(times * limit_mib * 2**20) // 2 // row_nbytes  # as many rows again may arrive
        q, width = share * workers, row_nbytes // 4
        values = (np.arange(q) % 1000).astype("f4")
        rows = np.lib.stride_tricks.as_strided(values, (q, width), (4, 0))  # every item of a row is the same
        dataset = dshuffle.create_dataset(f"{place}/d.zarr", {"x": rows}, chunk_rows=max(1, BLOCK // row_nbytes))
        partition = 2 * share * row_nbytes
        print(
            f"{q:,} rows of {human_bytes(row_nbytes)}: {human_bytes(q * row_nbytes)}; a partition of "
            f"{human_bytes(partition)} on each of {workers} workers of {limit_mib} MiB"
        )
        seconds = read_once(place, q * row_nbytes)
        print(f"reading {human_bytes(q * row_nbytes)} once from the disk: {human_seconds(seconds)}")
        with (
            LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                memory_limit=f"{limit_mib}MiB",
                local_directory=place,
                dashboard_address=":0",
            ) as cluster,
            Client(cluster) as client,
        ):
            try:
                dshuffle.Shuffler(client, dataset).close()
                print("without cache_directory: it fits")
            except CacheBudgetError as error:
                print(f"without cache_directory: {str(error)[:78]}...")
            with dshuffle.Shuffler(client, dataset, cache_directory="local") as shuffler:
                last = time.perf_counter()
                for epoch in shuffler.epochs(epochs):
                    began = time.perf_counter()
                    if cold:
                        drop_page_cache()
                    last += time.perf_counter() - began
                    found = client.gather(epoch.map(train))
                    now = time.perf_counter()
                    ids = np.sort(np.concatenate([one for one, _ in found]))
                    assert np.array_equal(ids, np.arange(q))
                    assert sum(total for _, total in found) == float(values.astype(np.float64).sum())
                    print(f"epoch {epoch.number}: {human_seconds(now - last)}, exact")
                    last = now


if __name__ == "__main__":
    main()
