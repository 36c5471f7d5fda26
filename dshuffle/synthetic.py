"""Synthetic datasets of any size, generated block by block. Rows are sorted by default, where shuffling matters most.

References
----------
Chung et al. (2017), section 5.1, for :func:`low_rank_entries`; see docs/papers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel

# Rows per block. Each block has its own seed, so the data do not depend on the chunks. A block with a few hundred
# features takes a few tens of MB.
BLOCK_ROWS = 16384
# Rows per block of wide data, for the same reason.
WIDE_BLOCK_ROWS = 1024
# Part of the squared norm of a wide row that is not the code of its key.
OWN_PART = 0.1
# Matrix entries per block, which take 12 MB.
BLOCK_ENTRIES = 1 << 20


def keyed_regression(
    n_samples: int, n_keys: int = 60, n_dense: int = 40, seed: int = 0, sort: bool = True, noise: float = 0.0
) -> dict[str, Any]:
    """Linear regression on a one-hot key and dense features.

    With contiguous shards of sorted rows, each worker sees only some of the keys, and averaging the models dilutes what
    it learned about them. Shuffling therefore matters. It does not for rows in random order (``sort=False``).

    Returns
    -------
    dict
        Dask arrays ``x``, float32, ``(n_samples, n_keys + n_dense)``, and ``y = x @ weights + noise``, float32,
        ``(n_samples,)``, with the weights of :func:`keyed_weights`. Each block is computed in bounded memory.
    """
    _check(noise, n_samples=n_samples, n_keys=n_keys, n_dense=n_dense)
    columns = {"x": (np.float32, n_keys + n_dense), "y": (np.float32,)}
    return _by_block(columns, n_samples, BLOCK_ROWS, _block, n_samples, n_keys, n_dense, seed, sort, noise)


def keyed_weights(n_keys: int = 60, n_dense: int = 40, seed: int = 0) -> NDArray[np.float64]:
    """Return the true weights of :func:`keyed_regression`: ``(n_keys + n_dense,)`` standard normal numbers."""
    return np.random.default_rng([seed, 0]).standard_normal(n_keys + n_dense)


def rare_keys_regression(n_samples: int, n_keys: int, seed: int = 0, noise: float = 0.0) -> dict[str, Any]:
    """Linear regression on as many features as there are keys, with few rows of each key, stored side by side.

    An example is measurements that are stored sensor by sensor: rows that belong together are stored together, and a
    model learns about a key from a handful of rows. While one worker has all of them, averaging the models dilutes what
    it learned. A random assignment spreads the rows of most keys, but not of all. The keys that it leaves on one or two
    workers are learned slowly, unless every epoch has a new assignment. So reshuffling pays here, in contrast to
    :func:`keyed_regression`, where one shuffle spreads all keys.

    Returns
    -------
    dict
        Dask arrays ``x``, float32, ``(n_samples, n_keys)``, sorted by key, and ``y = x @ weights + noise``, float32,
        ``(n_samples,)``, with the weights ``keyed_weights(n_keys, 0, seed)``. Each block is computed in bounded memory.
    """
    _check(noise, n_samples=n_samples, n_keys=n_keys)
    columns = {"x": (np.float32, n_keys), "y": (np.float32,)}
    return _by_block(columns, n_samples, WIDE_BLOCK_ROWS, _rare_keys_block, n_samples, n_keys, seed, noise)


def gaussian_blobs(
    n_samples: int,
    n_features: int = 100,
    n_classes: int = 10,
    seed: int = 0,
    separation: float = 4.0,
    sort: bool = True,
) -> dict[str, Any]:
    """Classification in which each class is a Gaussian blob of variance 1 around its own centre.

    Returns
    -------
    dict
        Dask arrays ``x``, float32, ``(n_samples, n_features)``, and ``y``, the class in ``[0, n_classes)``,
        int64, ``(n_samples,)``. Each block is computed in bounded memory.
    """
    _check(n_samples=n_samples, n_features=n_features, n_classes=n_classes)
    if not 0 < separation < np.inf:
        raise InvalidParameter.of("separation", separation, "a number > 0")
    columns = {"x": (np.float32, n_features), "y": (np.int64,)}
    options = n_samples, n_features, n_classes, seed, separation, sort
    return _by_block(columns, n_samples, BLOCK_ROWS, _blob_block, *options)


def low_rank_entries(
    n_rows: int, n_columns: int, per_row: int = 68, rank: int = 10, noise: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """Matrix completion: some entries of each row of a low-rank matrix, one entry per sample.

    The matrix is ``L @ R.T / sqrt(rank)``, where L and R have independent standard normal entries
    (see :func:`low_rank_factors`), so its entries have variance 1. Chung et al. (2017) scale their matrix to norm 1.
    The relative error that they report does not depend on the scale.

    Returns
    -------
    dict
        Dask arrays ``row`` and ``column``, int32, and ``value``, float32, each ``(n_rows * per_row,)``,
        sorted by row and column. They are computed block by block.
    """
    _check_matrix(n_rows, n_columns, per_row, rank, noise)
    right = delayed(_right_factor, pure=True)(n_columns, rank, seed)
    columns = {"row": (np.int32,), "column": (np.int32,), "value": (np.float32,)}
    step = max(1, BLOCK_ENTRIES // per_row)
    return _by_block(columns, n_rows, step, _entry_block, right, per_row, noise, seed, per_row=per_row)


def low_rank_factors(
    n_rows: int, n_columns: int, per_row: int = 68, rank: int = 10, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return both factors of :func:`low_rank_entries` as arrays in memory.

    Returns
    -------
    tuple
        Float32 ``(n_rows, rank)`` and ``(n_columns, rank)``; the matrix is ``left @ right.T``.
    """
    _check_matrix(n_rows, n_columns, per_row, rank)
    rows = max(1, BLOCK_ENTRIES // per_row)
    left = [_left_factor(start, min(rows, n_rows - start), rank, seed) for start in range(0, n_rows, rows)]
    return np.concatenate(left), _right_factor(n_columns, rank, seed)


def _by_block(
    columns: Mapping[str, tuple[Any, ...]],
    n_rows: int,
    step: int,
    make: Callable[..., Any],
    *arguments: Any,
    per_row: int = 1,
) -> dict[str, Any]:
    """Dask arrays of the parts of all columns (dtype and width) that ``make(start, rows, *arguments)`` returns."""
    block, parts = delayed(make, nout=len(columns), pure=True), {name: list[Any]() for name in columns}
    for start in range(0, n_rows, step):
        rows = min(step, n_rows - start)
        for (name, (dtype, *width)), values in zip(columns.items(), block(start, rows, *arguments), strict=True):
            parts[name].append(da.from_delayed(values, (rows * per_row, *width), dtype))
    return {name: da.concatenate(blocks) for name, blocks in parts.items()}


def _check(noise: float = 0.0, **counts: int) -> None:
    for name, value in counts.items():
        if value < (least := name != "n_dense"):
            raise InvalidParameter.of(name, value, f"an integer >= {int(least)}")
    if not 0 <= noise < np.inf:
        raise InvalidParameter.of("noise", noise, "a number >= 0")


def _check_matrix(n_rows: int, n_columns: int, per_row: int, rank: int, noise: float = 0.0) -> None:
    _check(noise, n_rows=n_rows, n_columns=n_columns, per_row=per_row, rank=rank)
    if per_row > n_columns:
        hint = "A row has one entry per column."
        raise InvalidParameter.of("per_row", per_row, f"at most n_columns ({n_columns})", hint)
    if (most := max(n_rows, n_columns)) > 2**31:
        name = "n_rows" if n_rows == most else "n_columns"
        raise InvalidParameter.of(name, most, "at most 2**31", "Indices are int32.")


def _block(
    start: int, rows: int, n_samples: int, n_keys: int, n_dense: int, seed: int, sort: bool, noise: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng([seed, 1, start])
    keys = _groups(start, rows, n_samples, n_keys) if sort else rng.integers(n_keys, size=rows)
    x = np.zeros((rows, n_keys + n_dense), dtype=np.float32)
    x[np.arange(rows), keys] = np.sqrt(0.5)
    if n_dense:
        x[:, n_keys:] = rng.standard_normal((rows, n_dense), dtype=np.float32) * np.float32(np.sqrt(0.5 / n_dense))
    return x, _targets(x, keyed_weights(n_keys, n_dense, seed), noise, rng)


def _rare_keys_block(
    start: int, rows: int, n_samples: int, n_keys: int, seed: int, noise: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng([seed, 1, start])
    own = rng.standard_normal((rows, n_keys)) * np.sqrt(OWN_PART / n_keys)
    # Rows of the orthonormal DCT-II matrix. Codes of one number each, as of one-hot keys, would be compressed to
    # nothing, and be read from a store in no time.
    keys = _groups(start, rows, n_samples, n_keys)
    codes = np.cos(np.outer(keys, np.pi / n_keys * (np.arange(n_keys) + 0.5)))
    codes *= np.sqrt(np.where(keys == 0, 1.0, 2.0) / n_keys).reshape(-1, 1)
    x = (np.sqrt(1 - OWN_PART) * codes + own).astype(np.float32)
    return x, _targets(x, keyed_weights(n_keys, 0, seed), noise, rng)


def _groups(start: int, rows: int, n_samples: int, n_groups: int) -> NDArray[np.int64]:
    """The keys or classes of rows that are sorted by them."""
    return np.arange(start, start + rows) * n_groups // n_samples


def _targets(
    x: NDArray[np.float32], weights: NDArray[np.float64], noise: float, rng: np.random.Generator
) -> NDArray[np.float32]:
    y = x @ weights
    if noise:
        y += noise * rng.standard_normal(len(y))
    return y.astype(np.float32)


def _blob_block(
    start: int, rows: int, n_samples: int, n_features: int, n_classes: int, seed: int, separation: float, sort: bool
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    # The squared distance of two centres has an expectation of 2 * n_features * scale**2.
    scale = separation / np.sqrt(2 * n_features)
    centres = np.random.default_rng([seed, 0]).standard_normal((n_classes, n_features), np.float32) * np.float32(scale)
    rng = np.random.default_rng([seed, 1, start])
    y = _groups(start, rows, n_samples, n_classes) if sort else rng.integers(n_classes, size=rows)
    return centres[y] + rng.standard_normal((rows, n_features), np.float32), y.astype(np.int64)


def _left_factor(start: int, rows: int, rank: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng([seed, 1, start]).standard_normal((rows, rank), np.float32)


def _right_factor(n_columns: int, rank: int, seed: int) -> NDArray[np.float32]:
    numbers = np.random.default_rng([seed, 0]).standard_normal((n_columns, rank), np.float32)
    return numbers / np.float32(np.sqrt(rank))


def _entry_block(
    start: int, rows: int, right: NDArray[np.float32], per_row: int, noise: float, seed: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    n_columns, rank = right.shape
    rng = np.random.default_rng([seed, 2, start])
    columns = _distinct(rng.random((rows, per_row)), n_columns)
    columns.sort(axis=1)
    left, values = _left_factor(start, rows, rank, seed), np.zeros(columns.shape, np.float32)
    for k in range(rank):
        values += left[:, k, np.newaxis] * right[columns, k]
    if noise:
        values += np.float32(noise) * rng.standard_normal(values.shape, np.float32)
    row = np.repeat(np.arange(start, start + rows, dtype=np.int32), per_row)
    return row, columns.reshape(-1), values.reshape(-1)


@kernel("(f8[:,::1], i8)")
def _distinct(chances: NDArray[np.float64], n_columns: int) -> NDArray[np.int32]:
    """Draw distinct column indices for each row of random numbers in [0, 1), all sets being equally likely."""
    rows, per_row = chances.shape
    # The first steps of a Fisher-Yates shuffle. Any initial order will do, so each row continues with the last one's.
    order = np.arange(n_columns).astype(np.int32)
    columns = np.empty((rows, per_row), np.int32)
    for row in range(rows):
        for k in range(per_row):
            other = k + int(chances[row, k] * (n_columns - k))
            columns[row, k] = order[other]
            order[other] = order[k]
            order[k] = columns[row, k]
    return columns
