"""Synthetic datasets in a sorted order: the case where shuffling decides. Drawn block by block, of any size."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numba
import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter

# Rows are drawn in blocks of this many, each from its own seed: the data do not depend on how they are
# chunked, and a block of a few hundred features is a few tens of MB.
BLOCK_ROWS = 16384
# Entries of a matrix in a block: 12 MB of them.
BLOCK_ENTRIES = 1 << 20


def keyed_regression(
    n_samples: int, n_keys: int = 60, n_dense: int = 40, seed: int = 0, sort: bool = True
) -> dict[str, Any]:
    """Noise-free linear regression on a one-hot key and dense features.

    On contiguous shards of sorted rows each worker sees only some of the keys, and averaging dilutes what it
    learnt about its own. That is what makes shuffling matter; on rows in random order (``sort=False``) it
    does not.

    Parameters
    ----------
    n_samples
        Rows.
    n_keys, n_dense
        One-hot and dense features. Key and dense part each have squared norm 1/2 in the mean, so that rows
        have squared norm 1 and a step of 1 is about the largest useful one.
    seed
        The same arguments give the same data, in every process.
    sort
        Rows sorted by key, every key equally often; otherwise each row's key is drawn at random.

    Returns
    -------
    dict
        Dask arrays ``x``, float32, ``(n_samples, n_keys + n_dense)``, and ``y = x @ weights``, float32,
        ``(n_samples,)``; the weights are :func:`keyed_weights`. Computed block by block, in bounded memory.

    Raises
    ------
    InvalidParameter
        A count is not positive.

    Examples
    --------
    >>> data = keyed_regression(1000, n_keys=6, n_dense=4)
    >>> data["x"].shape, data["y"].shape, data["x"].dtype
    ((1000, 10), (1000,), dtype('float32'))
    >>> bool(np.allclose(data["x"] @ keyed_weights(n_keys=6, n_dense=4), data["y"], atol=1e-6))
    True
    """
    _at_least(1, n_samples=n_samples, n_keys=n_keys)
    _at_least(0, n_dense=n_dense)
    xs, ys = [], []
    block = delayed(_block, nout=2, pure=True)
    for start in range(0, n_samples, BLOCK_ROWS):
        rows = min(BLOCK_ROWS, n_samples - start)
        x, y = block(start, rows, n_samples, n_keys, n_dense, seed, sort)
        xs.append(da.from_delayed(x, (rows, n_keys + n_dense), np.float32))
        ys.append(da.from_delayed(y, (rows,), np.float32))
    return {"x": da.concatenate(xs), "y": da.concatenate(ys)}


def keyed_weights(n_keys: int = 60, n_dense: int = 40, seed: int = 0) -> NDArray[np.float64]:
    """The true weights of :func:`keyed_regression`: ``(n_keys + n_dense,)`` standard normal numbers."""
    return np.random.default_rng([seed, 0]).standard_normal(n_keys + n_dense)


def gaussian_blobs(
    n_samples: int,
    n_features: int = 100,
    n_classes: int = 10,
    seed: int = 0,
    separation: float = 4.0,
    sort: bool = True,
) -> dict[str, Any]:
    """Classification: every class a Gaussian blob of variance 1 around a centre of its own.

    Parameters
    ----------
    n_samples, n_features, n_classes
        Rows, columns, blobs.
    seed
        The same arguments give the same data, in every process.
    separation
        Root mean square distance of two centres, in standard deviations of a blob.
    sort
        Rows sorted by class, every class equally often, so that a contiguous shard holds few classes;
        otherwise each row's class is drawn at random.

    Returns
    -------
    dict
        Dask arrays ``x``, float32, ``(n_samples, n_features)``, and ``y``, the class in ``[0, n_classes)``,
        int64, ``(n_samples,)``. Computed block by block, in bounded memory.

    Raises
    ------
    InvalidParameter
        A count or the separation is not positive.

    Examples
    --------
    >>> data = gaussian_blobs(1000, n_features=5, n_classes=4)
    >>> data["x"].shape, data["y"].dtype
    ((1000, 5), dtype('int64'))
    >>> np.bincount(data["y"].compute())
    array([250, 250, 250, 250])
    """
    _at_least(1, n_samples=n_samples, n_features=n_features, n_classes=n_classes)
    if not 0 < separation < np.inf:
        raise InvalidParameter.of("separation", separation, "a number > 0")
    xs, ys = [], []
    block = delayed(_blob_block, nout=2, pure=True)
    for start in range(0, n_samples, BLOCK_ROWS):
        rows = min(BLOCK_ROWS, n_samples - start)
        x, y = block(start, rows, n_samples, n_features, n_classes, seed, separation, sort)
        xs.append(da.from_delayed(x, (rows, n_features), np.float32))
        ys.append(da.from_delayed(y, (rows,), np.int64))
    return {"x": da.concatenate(xs), "y": da.concatenate(ys)}


def low_rank_entries(
    n_rows: int, n_columns: int, per_row: int = 68, rank: int = 10, noise: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """Matrix completion: some entries of each row of a low-rank matrix, one entry a sample.

    The matrix is ``L @ R.T / sqrt(rank)`` with factors of independent standard normal numbers
    (:func:`low_rank_factors`), so that its entries have variance 1. Chung et al. scale theirs to norm 1; the
    relative error that they report does not depend on it.

    Parameters
    ----------
    n_rows, n_columns
        Shape of the matrix; ``n_columns * rank`` numbers are held in memory.
    per_row
        Entries of each row, at distinct columns drawn at random.
    rank
        Columns of the factors.
    noise
        Standard deviation of the Gaussian noise added to each entry.
    seed
        The same arguments give the same data, in every process.

    Returns
    -------
    dict
        Dask arrays ``row`` and ``column``, int32, and ``value``, float32, each ``(n_rows * per_row,)``,
        sorted by row and column. Computed block by block.

    Raises
    ------
    InvalidParameter
        A count is not positive, ``per_row`` larger than ``n_columns``, the noise negative, or an index beyond
        int32.

    References
    ----------
    Chung et al. (2017), section 5.1.

    Examples
    --------
    >>> data = low_rank_entries(n_rows=50, n_columns=20, per_row=4, rank=2)
    >>> row, column, value = (data[name].compute() for name in ("row", "column", "value"))
    >>> left, right = low_rank_factors(n_rows=50, n_columns=20, per_row=4, rank=2)
    >>> bool(np.allclose((left @ right.T)[row, column], value, atol=1e-5))
    True
    """
    _check_matrix(n_rows, n_columns, per_row, rank)
    if not 0 <= noise < np.inf:
        raise InvalidParameter.of("noise", noise, "a number >= 0")
    right = delayed(_right_factor, pure=True)(n_columns, rank, seed)
    block = delayed(_entry_block, nout=3, pure=True)
    rows_a_block = max(1, BLOCK_ENTRIES // per_row)
    parts: dict[str, list[Any]] = {"row": [], "column": [], "value": []}
    for start in range(0, n_rows, rows_a_block):
        rows = min(rows_a_block, n_rows - start)
        for found, values, dtype in zip(
            parts.values(),
            block(start, rows, right, per_row, noise, seed),
            (np.int32, np.int32, np.float32),
            strict=True,
        ):
            found.append(da.from_delayed(values, (rows * per_row,), dtype))
    return {name: da.concatenate(found) for name, found in parts.items()}


def low_rank_factors(
    n_rows: int, n_columns: int, per_row: int = 68, rank: int = 10, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The factors of :func:`low_rank_entries`, which are all in memory then.

    Returns
    -------
    tuple
        Float32 ``(n_rows, rank)`` and ``(n_columns, rank)``; the matrix is ``left @ right.T``.
    """
    _check_matrix(n_rows, n_columns, per_row, rank)
    rows = max(1, BLOCK_ENTRIES // per_row)
    left = [_left_factor(start, min(rows, n_rows - start), rank, seed) for start in range(0, n_rows, rows)]
    return np.concatenate(left), _right_factor(n_columns, rank, seed)


def _at_least(least: int, **counts: int) -> None:
    for name, value in counts.items():
        if value < least:
            raise InvalidParameter.of(name, value, f"an integer >= {least}")


def _check_matrix(n_rows: int, n_columns: int, per_row: int, rank: int) -> None:
    _at_least(1, n_rows=n_rows, n_columns=n_columns, per_row=per_row, rank=rank)
    if per_row > n_columns:
        raise InvalidParameter.of("per_row", per_row, f"at most n_columns ({n_columns}): a row has no more entries")
    for name, value in (("n_rows", n_rows), ("n_columns", n_columns)):
        if value > 2**31:
            raise InvalidParameter.of(name, value, "at most 2**31: indices are int32")


def _block(
    start: int, rows: int, n_samples: int, n_keys: int, n_dense: int, seed: int, sort: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng([seed, 1, start])
    keys = np.arange(start, start + rows) * n_keys // n_samples if sort else rng.integers(n_keys, size=rows)
    x = np.zeros((rows, n_keys + n_dense), dtype=np.float32)
    x[np.arange(rows), keys] = np.sqrt(0.5)
    if n_dense:
        x[:, n_keys:] = rng.standard_normal((rows, n_dense), dtype=np.float32) * np.float32(np.sqrt(0.5 / n_dense))
    return x, (x @ keyed_weights(n_keys, n_dense, seed)).astype(np.float32)


def _blob_block(
    start: int, rows: int, n_samples: int, n_features: int, n_classes: int, seed: int, separation: float, sort: bool
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    # The difference of two centres has 2 n_features terms of this variance.
    scale = separation / np.sqrt(2 * n_features)
    centres = np.random.default_rng([seed, 0]).standard_normal((n_classes, n_features), np.float32) * np.float32(scale)
    rng = np.random.default_rng([seed, 1, start])
    y = np.arange(start, start + rows) * n_classes // n_samples if sort else rng.integers(n_classes, size=rows)
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
    values = _products(_left_factor(start, rows, rank, seed), right, columns)
    if noise:
        values += np.float32(noise) * rng.standard_normal(values.shape, np.float32)
    row = np.repeat(np.arange(start, start + rows, dtype=np.int32), per_row)
    return row, columns.reshape(-1), values.reshape(-1)


@numba.njit(nogil=True, cache=True)
def _distinct(chances: NDArray[np.float64], n_columns: int) -> NDArray[np.int32]:
    """As many distinct numbers below ``n_columns`` for each row of chances as it has, all sets equally likely."""
    rows, per_row = chances.shape
    # The first steps of Fisher and Yates' shuffle. It may begin with any order, so with that of the last row.
    order = np.arange(n_columns).astype(np.int32)
    columns = np.empty((rows, per_row), np.int32)
    for row in range(rows):
        for k in range(per_row):
            other = k + int(chances[row, k] * (n_columns - k))
            columns[row, k] = order[other]
            order[other] = order[k]
            order[k] = columns[row, k]
    return columns


@numba.njit(nogil=True, cache=True)
def _products(left: NDArray[np.float32], right: NDArray[np.float32], columns: NDArray[np.int32]) -> NDArray[np.float32]:
    """The entries of ``left @ right.T`` at some columns of each row."""
    values = np.empty(columns.shape, np.float32)
    for row in range(len(columns)):
        for k in range(columns.shape[1]):
            column = columns[row, k]
            total = np.float32(0)
            for r in range(left.shape[1]):
                total += left[row, r] * right[column, r]
            values[row, k] = total
    return values
