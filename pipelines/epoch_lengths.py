"""How long an epoch of matrix completion is, in entries of its largest blocks, where columns are sorted by popularity.

    python pipelines/epoch_lengths.py [--seeds 5] [--workers 20] [--rows 500] [--entries-a-row 20]

Workers process a block of columns each, and wait for the one that has the most entries before they hand blocks on; so
the length of an epoch is the sum of its rounds' largest blocks. Printed in multiples of the ideal, equal blocks, and
counted, not timed: on logical workers, threads of one process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import numpy as np
from distributed import Client
from rich import box
from rich.console import Console
from rich.table import Table

import dshuffle
from dshuffle.compare import local_cluster
from dshuffle.training.matrix_completion import column_blocks, entries_by_block


def zipf_entries(size: int, per_row: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Entries at distinct columns of each row of a square matrix, column j drawn with a weight of 1 / (1 + j)."""
    gumbel = np.random.default_rng(seed).gumbel(size=(size, size)) - np.log(1 + np.arange(size))
    columns = np.sort(np.argpartition(-gumbel, per_row)[:, :per_row]).ravel()
    return {"row": np.repeat(np.arange(size), per_row), "column": columns, "value": np.ones(columns.size)}


def block_sizes(partition: dshuffle.Partition, blocks: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Entries that the worker has in each block; a task on each worker."""
    return np.diff(entries_by_block(partition, blocks).starts)


def length(client: Client, dataset: dshuffle.Dataset, sharding: str, permute: str, per_row: int, seed: int) -> float:
    """Of an epoch that has the shares of a sharding, in multiples of the ideal."""
    assignment = f"chunks:{per_row}"  # so that shares are whole rows
    with dshuffle.Shuffler(client, dataset, assignment=assignment, sharding=sharding, seed=seed) as shuffler:
        n = shuffler.n_workers
        columns = round(dataset.n_samples / per_row)
        blocks = column_blocks(columns, n, seed=seed, epoch=0, permute=permute)
        futures = next(shuffler.epochs(1)).map(block_sizes, blocks)
        sizes = [future.result() for future in futures]
    rounds = [max(sizes[k][(k + turn) % n] for k in range(n)) for turn in range(n)]
    return float(sum(rounds) / (dataset.n_samples / n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--rows", type=int, default=500, help="and columns")
    parser.add_argument("--entries-a-row", type=int, default=20)
    options = parser.parse_args()
    orders = {"as numbered": ("contiguous", "never"), "permuted once": ("random", "once")}
    found: dict[str, list[float]] = {name: [] for name in orders}
    with (
        tempfile.TemporaryDirectory() as folder,
        local_cluster(options.workers, processes=False) as client,
    ):
        for seed in range(options.seeds):
            data = zipf_entries(options.rows, options.entries_a_row, seed)
            dataset = dshuffle.create_dataset(f"{folder}/{seed}.zarr", data)
            for name, (sharding, permute) in orders.items():
                found[name].append(length(client, dataset, sharding, permute, options.entries_a_row, seed))
    table = Table("rows and columns", "epoch length / ideal", "lowest", "highest", box=box.SIMPLE_HEAD)
    for name, lengths in found.items():
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.fmean(lengths), min(lengths), max(lengths))))
    Console().print(table)


if __name__ == "__main__":
    main()
