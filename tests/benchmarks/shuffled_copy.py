"""`dataset shuffle` of a dataset that is larger than the memory allowed, beside reading and writing it once each.

python tests/benchmarks/shuffled_copy.py --gib 4 --memory "1 GiB"
"""

from __future__ import annotations

import resource
import tempfile
import time

import click
import numpy as np

import dshuffle
from dshuffle.store import read_sources
from dshuffle.units import human_bytes, human_seconds

BLOCK = 4096


@click.command()
@click.option("--gib", default=4.0, show_default=True, help="Size of the dataset.")
@click.option("--memory", default="512 MiB", show_default=True, help="Memory budget of the shuffle.")
@click.option("--row-nbytes", default=4096, show_default=True)
@click.option("--folder", default=None, help="Folder on the disk to use.  [default: a temporary one]")
def main(gib: float, memory: str, row_nbytes: int, folder: str | None) -> None:
    """Compare the times."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        q, width = int(gib * 2**30) // row_nbytes, row_nbytes // 4
        values = np.arange(q, dtype="f4")
        rows = np.lib.stride_tricks.as_strided(values, (q, width), (4, 0))  # every item of a row is the same
        source = dshuffle.create_dataset(f"{place}/in.zarr", {"x": rows})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        dshuffle.create_dataset(f"{place}/copy.zarr", read_sources([f"{place}/in.zarr"]))
        copied = time.perf_counter() - started
        started = time.perf_counter()
        made = dshuffle.shuffle_dataset(source, f"{place}/out.zarr", memory_budget=memory, temporary=place)
        shuffled = time.perf_counter() - started
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        seen = np.zeros(q, bool)
        for first in range(0, q, BLOCK):
            found = made.read_rows(np.arange(first, min(first + BLOCK, q)))["x"]
            assert (found[:, 0] == found[:, -1]).all()
            seen[found[:, 0].astype(np.int64)] = True
        assert seen.all() or q > 2**24  # larger numbers are not exact in float32
        print(
            f"{q:,} rows of {human_bytes(row_nbytes)}, {human_bytes(q * row_nbytes)}: reading and writing once "
            f"{human_seconds(copied)}, shuffling {human_seconds(shuffled)} ({shuffled / copied:.2f} times), "
            f"{human_bytes(grown)} of memory"
        )


if __name__ == "__main__":
    main()
