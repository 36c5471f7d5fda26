"""Whether rows that are neighbours in a dataset are alike. If they are not, its stored order is a shuffle already."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.store import Dataset

PAIRS = 500
"""Number of pairs of neighbours to read."""
MOST_COLUMNS = 2_000
"""Largest number of columns of an array to look at, evenly spaced."""
FEWEST_PAIRS = 100
"""With fewer pairs, chance hides too much."""
PERMUTATIONS = 200
DEVIATIONS = 6.0
"""By how many standard deviations neighbours must be more alike than random pairs."""


def looks_random(dataset: Dataset) -> bool:
    """Whether a dataset seems to be stored in random order.

    It reads 500 pairs of neighbouring rows that are evenly spaced in the dataset, and compares them with random pairs
    of the same rows (a permutation test). It is False if neighbours are more alike in any array, and if the dataset has
    fewer than 200 rows or no numbers.

    Examples
    --------
    >>> from dshuffle import create_dataset
    >>> sorted_by_label = create_dataset("memory://doc-random", {"y": np.arange(5000) // 1000}, overwrite=True)
    >>> looks_random(sorted_by_label)
    False
    >>> values = np.random.default_rng(0).standard_normal(5000)
    >>> looks_random(create_dataset("memory://doc-random", {"y": values}, overwrite=True))
    True
    """
    n_pairs = min(PAIRS, dataset.n_samples // 2)
    if n_pairs < FEWEST_PAIRS:
        return False
    firsts = np.linspace(0, dataset.n_samples - 2, n_pairs).astype(np.int64)
    rows = dataset.read_rows(np.concatenate([firsts, firsts + 1]))
    numeric = [array.reshape(len(array), -1) for array in rows.values() if array.dtype.kind in "biuf"]
    return bool(numeric) and not any(_neighbours_are_alike(values) for values in numeric)


def _neighbours_are_alike(values: NDArray[Any]) -> bool:
    """Compare each row of the upper half with its row of the lower half, and with random rows of it."""
    n_pairs, step = len(values) // 2, -(-values.shape[1] // MOST_COLUMNS)
    columns = np.nan_to_num(values[:, ::step].astype(np.float64), posinf=0.0, neginf=0.0)
    columns -= columns.mean(axis=0)
    scale = columns.std(axis=0)
    columns = columns[:, scale > 0] / scale[scale > 0]
    products = columns[:n_pairs] @ columns[n_pairs:].T
    rng, places = np.random.default_rng(0), np.arange(n_pairs)
    by_chance = [products[places, rng.permutation(n_pairs)].sum() for _ in range(PERMUTATIONS)]
    return bool(np.trace(products) > np.mean(by_chance) + DEVIATIONS * np.std(by_chance))
