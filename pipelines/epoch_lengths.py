"""Count the length of a matrix completion epoch when columns are sorted by popularity.

    python pipelines/epoch_lengths.py [--seeds 5] [--workers 20] [--rows 500] [--entries-a-row 20]

In each round, every worker processes one block of columns. All workers wait for the largest block before they pass the
blocks on. The length of an epoch is therefore the sum of the largest blocks over the rounds, counted in entries. The
table shows it relative to equal blocks. Lengths are counted, not timed; the workers are threads of one process.
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
from dshuffle.units import at_least


def zipf_entries(size: int, per_row: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Draw distinct columns for each row of a square matrix, column j with weight 1 / (1 + j)."""
    gumbel = np.random.default_rng(seed).gumbel(size=(size, size)) - np.log(1 + np.arange(size))
    columns = np.sort(np.argpartition(-gumbel, per_row)[:, :per_row]).ravel()
    return {"row": np.repeat(np.arange(size), per_row), "column": columns, "value": np.ones(columns.size)}


def block_sizes(partition: dshuffle.Partition, blocks: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Count a worker's entries in each block; runs as a task on each worker."""
    return np.array([np.count_nonzero(np.isin(partition["column"], block)) for block in blocks])


def length(client: Client, dataset: dshuffle.Dataset, sharding: str, permute: str, per_row: int, seed: int) -> float:
    """Return the length of an epoch relative to equal blocks."""
    assignment = f"chunks:{per_row}"  # shares are whole rows
    with dshuffle.Shuffler(client, dataset, assignment=assignment, sharding=sharding, seed=seed) as shuffler:
        n = shuffler.n_workers
        columns = round(dataset.n_samples / per_row)
        order = np.arange(columns) if permute == "never" else np.random.default_rng([seed, 1]).permutation(columns)
        blocks = np.array_split(order, n)  # as in fit_matrix_completion
        futures = next(shuffler.epochs(1)).map(block_sizes, blocks)
        sizes = [future.result() for future in futures]
    rounds = [max(sizes[k][(k + turn) % n] for k in range(n)) for turn in range(n)]
    return float(sum(rounds) / (dataset.n_samples / n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=at_least(1), default=5)
    parser.add_argument("--workers", type=at_least(1), default=20)
    parser.add_argument("--rows", type=at_least(1), default=500, help="number of rows and of columns")
    parser.add_argument("--entries-a-row", type=at_least(1), default=20)
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
    table = Table("rows and columns", "mean length", "min", "max", box=box.SIMPLE_HEAD)
    for name, lengths in found.items():
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.fmean(lengths), min(lengths), max(lengths))))
    Console().print(table)


if __name__ == "__main__":
    main()
