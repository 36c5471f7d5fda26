"""Pairs of rows that are neighbours in a dataset. If they are not alike, its stored order is a shuffle already."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

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
    return NeighbourPairs.of(dataset).look_random


@dataclass(frozen=True, eq=False)
class NeighbourPairs:
    """Evenly spaced pairs of neighbouring rows, as numbers.

    Parameters
    ----------
    sample_ids
        ``(2 p,)`` int64: the first rows of all pairs, then the second ones.
    arrays
        ``(2 p, ...)`` each: the rows of every array of numbers, by its name.
    n_samples
        Number of samples of the dataset.
    """

    sample_ids: NDArray[np.int64]
    arrays: Mapping[str, NDArray[Any]]
    n_samples: int

    @classmethod
    def of(cls, dataset: Dataset, names: Container[str] | None = None) -> Self:
        """Read at most 500 pairs; none of a dataset with fewer than 200 rows. ``names`` are those of arrays to keep."""
        n_pairs = min(PAIRS, dataset.n_samples // 2)
        if n_pairs < FEWEST_PAIRS:
            return cls(np.empty(0, np.int64), {}, dataset.n_samples)
        firsts = np.linspace(0, dataset.n_samples - 2, n_pairs).astype(np.int64)
        ids = np.concatenate([firsts, firsts + 1])
        rows = dataset.read_rows(ids)
        kept = {name: array for name, array in rows.items() if names is None or name in names}
        numeric = {name: array for name, array in kept.items() if array.dtype.kind in "biuf"}
        return cls(ids, numeric, dataset.n_samples)

    @cached_property
    def look_random(self) -> bool:
        """Whether neighbours are no more alike than random pairs. False if there are none."""
        return bool(self.arrays) and not any(
            _neighbours_are_alike(standardised(values)) for values in self.arrays.values()
        )


def standardised(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the columns that vary as ``(rows, columns)``, with mean 0 and variance 1; at most 2,000 of them."""
    flat = values.reshape(len(values), -1)
    step = max(1, -(-flat.shape[1] // MOST_COLUMNS))
    columns = np.nan_to_num(flat[:, ::step].astype(np.float64), posinf=0.0, neginf=0.0)
    largest = np.abs(columns).max(axis=0, initial=0.0)
    columns /= np.where(largest > 0, largest, 1)  # squares of the scaled columns do not overflow
    columns -= columns.mean(axis=0)
    scale = columns.std(axis=0)
    return np.asarray(columns[:, scale > 0] / scale[scale > 0])


def _neighbours_are_alike(columns: NDArray[np.float64]) -> bool:
    """Compare each row of the upper half with its row of the lower half, and with random rows of it."""
    n_pairs = len(columns) // 2
    products = columns[:n_pairs] @ columns[n_pairs:].T
    rng, places = np.random.default_rng(0), np.arange(n_pairs)
    by_chance = [products[places, rng.permutation(n_pairs)].sum() for _ in range(PERMUTATIONS)]
    return bool(np.trace(products) > np.mean(by_chance) + DEVIATIONS * np.std(by_chance))
