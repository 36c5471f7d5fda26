"""How well ways of shuffling mix, from the orders in which workers would train in four epochs.

    python pipelines/studies/mixing.py [--samples 40000] [--chunk-rows 1000] [--workers 4] [--classes 10]

The dataset is sorted by class. For each way:

    together      probability that two rows of a chunk that shared a worker share one in the next epoch, too
    by chance     the same in a uniform draw
    distance      mean distance in training order of rows that are neighbours in the store; 1 in a uniform permutation
    class spread  deviation of the classes of a batch from those of all rows; 1 for random batches
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import scipy
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dshuffle import create_dataset
from dshuffle.compare import SimulatedCluster, default_ways

Numbers = NDArray[np.int64]
EPOCHS, BATCH_ROWS = 4, 256


def mixing(epochs: Sequence[Sequence[Numbers]], classes: Numbers, chunk_rows: int, batch_rows: int) -> list[float]:
    """The four figures of some epochs: in each, the samples of every worker in training order."""
    n_samples, n = len(classes), len(epochs[0])
    chunks, shares = np.arange(n_samples) // chunk_rows, np.bincount(classes) / n_samples
    pairs, sizes, distances, spreads, expected = np.zeros(2), np.zeros(n), [], 0.0, 0.0
    ranks = [np.empty(n_samples, np.int64) for _ in epochs]
    for of_epoch, orders in zip(ranks, epochs, strict=True):
        steps, place = np.empty(n_samples, np.int64), np.empty(n_samples, np.int64)
        sizes = np.array([len(order) for order in orders])
        for rank, order in enumerate(orders):
            of_epoch[order], steps[order] = rank, np.arange(len(order)) // batch_rows * n + rank
            for batch in np.split(order, range(batch_rows, len(order), batch_rows)):
                counts = np.bincount(classes[batch], minlength=len(shares))
                spreads += float(np.abs(counts / len(batch) - shares).sum())
                expected += sum(_deviation(n_samples, round(n_samples * share), len(batch)) for share in shares)
        ordered = np.concatenate(orders)
        place[ordered[np.argsort(steps[ordered], kind="stable")]] = np.arange(n_samples)
        distances.append(float(np.abs(np.diff(place)).mean()) * 3 / (n_samples + 1))
    for before, after in itertools.pairwise(ranks):
        pairs += [_pairs(chunks * n + before), _pairs((chunks * n + before) * n + after)]
    chance = float((sizes * (sizes - 1)).sum()) / (n_samples * (n_samples - 1))
    return [float(pairs[1] / pairs[0]), chance, float(np.mean(distances)), spreads / expected]


def _pairs(keys: Numbers) -> float:
    counts = np.unique(keys, return_counts=True)[1]
    return float((counts * (counts - 1)).sum()) / 2


@functools.cache
def _deviation(n_samples: int, n_marked: int, n_drawn: int) -> float:
    """Mean absolute deviation of the marked samples' share of a random draw without replacement."""
    drawn = np.arange(n_drawn + 1)
    chances = scipy.stats.hypergeom.pmf(drawn, n_samples, n_marked, n_drawn)
    return float(chances @ np.abs(drawn / n_drawn - n_marked / n_samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("samples", 40_000), ("chunk-rows", 1_000), ("workers", 4), ("classes", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    classes = np.arange(options.samples) * options.classes // options.samples
    dataset = create_dataset("memory://mixing", {"y": classes}, chunk_rows=options.chunk_rows, overwrite=True)
    cluster, table = SimulatedCluster.of(dataset, options.workers), Table("way", "together", "by chance", "distance")
    table.add_column("class spread")
    for way in default_ways():
        epochs = [list(epoch.orders) for epoch in cluster.session(way.choices).epochs(EPOCHS)]
        figures = mixing(epochs, classes, options.chunk_rows, BATCH_ROWS)
        table.add_row(way.label, *(f"{figure:.2f}" for figure in figures))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
