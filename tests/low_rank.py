"""Entries of a matrix of low rank, for tests of matrix completion."""

from __future__ import annotations

import dask.array as da
import numpy as np


def low_rank_factors(n_rows, n_columns, per_row=68, rank=10, seed=0):
    """Both factors of a matrix of variance 1: ``left @ right.T``."""
    left = np.random.default_rng([seed, 1, 0]).standard_normal((n_rows, rank), np.float32)
    right = np.random.default_rng([seed, 0]).standard_normal((n_columns, rank), np.float32)
    return left, right / np.float32(np.sqrt(rank))


def low_rank_entries(n_rows, n_columns, per_row=68, rank=10, noise=0.0, seed=0):
    """Some entries of each row, sorted by row and column, as Dask arrays."""
    left, right = low_rank_factors(n_rows, n_columns, per_row, rank, seed)
    rng = np.random.default_rng([seed, 2, 0])
    order, columns = list(range(n_columns)), np.empty((n_rows, per_row), np.int32)
    for row, chances in enumerate(rng.random((n_rows, per_row)).tolist()):
        for k, chance in enumerate(chances):
            other = k + int(chance * (n_columns - k))
            order[k], order[other] = order[other], order[k]
        columns[row] = sorted(order[:per_row])
    values = np.zeros(columns.shape, np.float32)
    for k in range(rank):
        values += left[:, k, np.newaxis] * right[columns, k]
    if noise:
        values += np.float32(noise) * rng.standard_normal(values.shape, np.float32)
    rows = np.repeat(np.arange(n_rows, dtype=np.int32), per_row)
    entries = {"row": rows, "column": columns.ravel(), "value": values.ravel()}
    return {name: da.from_array(array) for name, array in entries.items()}
