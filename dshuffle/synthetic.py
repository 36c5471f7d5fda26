"""Synthetic datasets, generated block by block. Rows are sorted by default, where shuffling matters most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Rows per block. Each block has its own seed, so the data do not depend on the chunks. A block with a few hundred
# features takes a few tens of MB.
BLOCK_ROWS = 16384
# Rows per block of wide data, for the same reason.
WIDE_BLOCK_ROWS = 1024
# Part of the squared norm of a wide row that is not the code of its key.
OWN_PART = 0.1


def keyed_regression(
    n_samples: int, n_keys: int = 60, n_dense: int = 40, seed: int = 0, sort: bool = True, noise: float = 0.0
) -> dict[str, Any]:
    """Linear regression on a one-hot key and dense features: float32 Dask arrays ``x`` and ``y = x @ weights + noise``.

    With contiguous shards of sorted rows, each worker sees only some of the keys, and averaging the models dilutes what
    it learned about them. Shuffling therefore matters. It does not for rows in random order (``sort=False``).
    """
    return _by_block(_keyed_block, n_samples, BLOCK_ROWS, n_keys + n_dense, "f4", n_keys, seed, sort, noise)


def keyed_weights(n_keys: int = 60, n_dense: int = 40, seed: int = 0) -> NDArray[np.float64]:
    """Return the true weights of :func:`keyed_regression`: ``(n_keys + n_dense,)`` standard normal numbers."""
    return np.random.default_rng([seed, 0]).standard_normal(n_keys + n_dense)


def rare_keys_regression(n_samples: int, n_keys: int, seed: int = 0, noise: float = 0.0) -> dict[str, Any]:
    """Linear regression on as many features as there are keys, with few rows of each key, stored side by side.

    An example is measurements that are stored sensor by sensor: rows that belong together are stored together, and a
    model learns about a key from a handful of rows. While one worker has all of them, averaging the models dilutes what
    it learned. A random assignment spreads the rows of most keys, but not of all. The keys that it leaves on one or two
    workers are learned slowly, unless every epoch has a new assignment. So reshuffling pays here, in contrast to
    :func:`keyed_regression`, where one shuffle spreads all keys. The weights are ``keyed_weights(n_keys, 0, seed)``.
    """
    return _by_block(_rare_keys_block, n_samples, WIDE_BLOCK_ROWS, n_keys, "f4", seed, noise)


def gaussian_blobs(
    n_samples: int,
    n_features: int = 100,
    n_classes: int = 10,
    seed: int = 0,
    separation: float = 4.0,
    sort: bool = True,
) -> dict[str, Any]:
    """Classification in which each class is a Gaussian blob of variance 1 around its own centre: float32 and int64."""
    return _by_block(_blob_block, n_samples, BLOCK_ROWS, n_features, "i8", n_classes, seed, separation, sort)


def _by_block(
    make: Callable[..., Any], n_samples: int, step: int, width: int, dtype: str, *options: Any
) -> dict[str, Any]:
    """Dask arrays ``x`` and ``y`` of what ``make(start, rows, n_samples, width, *options)`` returns."""
    block, x, y = delayed(make, nout=2, pure=True), [], []
    for start in range(0, n_samples, step):
        rows = min(step, n_samples - start)
        features, targets = block(start, rows, n_samples, width, *options)
        x.append(da.from_delayed(features, (rows, width), np.float32))
        y.append(da.from_delayed(targets, (rows,), np.dtype(dtype)))
    return {"x": da.concatenate(x), "y": da.concatenate(y)}


def _keyed_block(
    start: int, rows: int, n_samples: int, width: int, n_keys: int, seed: int, sort: bool, noise: float
) -> tuple[Floats, Floats]:
    n_dense = width - n_keys
    rng = np.random.default_rng([seed, 1, start])
    keys = _groups(start, rows, n_samples, n_keys) if sort else rng.integers(n_keys, size=rows)
    x = np.zeros((rows, width), dtype=np.float32)
    x[np.arange(rows), keys] = np.sqrt(0.5)
    if n_dense:
        x[:, n_keys:] = rng.standard_normal((rows, n_dense), dtype=np.float32) * np.float32(np.sqrt(0.5 / n_dense))
    return x, _targets(x, keyed_weights(n_keys, n_dense, seed), noise, rng)


def _rare_keys_block(
    start: int, rows: int, n_samples: int, n_keys: int, seed: int, noise: float
) -> tuple[Floats, Floats]:
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


def _targets(x: Floats, weights: NDArray[np.float64], noise: float, rng: np.random.Generator) -> Floats:
    y = x @ weights
    if noise:
        y += noise * rng.standard_normal(len(y))
    return y.astype(np.float32)


def _blob_block(
    start: int, rows: int, n_samples: int, n_features: int, n_classes: int, seed: int, separation: float, sort: bool
) -> tuple[Floats, NDArray[np.int64]]:
    # The squared distance of two centres has an expectation of 2 * n_features * scale**2.
    scale = separation / np.sqrt(2 * n_features)
    centres = np.random.default_rng([seed, 0]).standard_normal((n_classes, n_features), np.float32) * np.float32(scale)
    rng = np.random.default_rng([seed, 1, start])
    y = _groups(start, rows, n_samples, n_classes) if sort else rng.integers(n_classes, size=rows)
    return centres[y] + rng.standard_normal((rows, n_features), np.float32), y.astype(np.int64)
