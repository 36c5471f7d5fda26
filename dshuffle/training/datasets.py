"""Synthetic regression data that are sorted by a key: the case where shuffling decides."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter

# Rows are drawn in blocks of this many, each from its own seed: the data do not depend on how they are
# chunked, and a block of a few hundred features is a few tens of MB.
BLOCK_ROWS = 16384


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
    for name, value, least in (("n_samples", n_samples, 1), ("n_keys", n_keys, 1), ("n_dense", n_dense, 0)):
        if value < least:
            raise InvalidParameter.of(name, value, f"an integer >= {least}")
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
