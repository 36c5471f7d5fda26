"""How many samples go from each worker to each other one, when every worker holds just its share (paper 001,
section III).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning.values import as_integer, as_ranks

Matrix = NDArray[np.int64]


def shuffle_matrix(owners: ArrayLike, destinations: ArrayLike, n_workers: int) -> Matrix:
    """``(n, n)`` int64: entry (i, j) counts the samples that worker i has and worker j is to train on.

    Rows add up to the shares before the shuffle, columns to those after it. Where every worker's share is as large
    as before, as many samples leave it as come in.

    Parameters
    ----------
    owners, destinations
        ``(q,)`` integers, the worker of each sample before and after the shuffle.

    References
    ----------
    Paper 001, definitions 1 and 2.

    Examples
    --------
    >>> shuffle_matrix([0, 0, 1, 1], [0, 1, 1, 0], 2)
    array([[1, 1],
           [1, 1]])
    """
    n_workers = as_integer("n_workers", n_workers, 1)
    before = as_ranks("owners", owners, n_workers)
    after = as_ranks("destinations", destinations, n_workers)
    if len(before) != len(after):
        raise InvalidParameter.of("destinations.shape", after.shape, f"({len(before)},), as owners has")
    arcs = before.astype(np.int64) * n_workers + after
    return np.bincount(arcs, minlength=n_workers**2).reshape(n_workers, n_workers)


def leftover_matrix(shuffle: ArrayLike) -> Matrix:
    """What a shuffle matrix leaves once all that two workers have for each other is sent in pairs.

    References
    ----------
    Paper 001, definition 3.

    Examples
    --------
    >>> leftover_matrix([[2, 1, 2], [2, 1, 2], [1, 3, 1]])
    array([[0, 0, 1],
           [1, 0, 0],
           [0, 1, 0]])
    """
    matrix = as_matrix("shuffle", shuffle)
    return matrix - np.minimum(matrix, matrix.T)


def as_matrix(name: str, values: ArrayLike) -> Matrix:
    """A square int64 matrix of counts, or :class:`InvalidParameter`."""
    matrix = np.asarray(values)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise InvalidParameter.of(f"{name}.shape", matrix.shape, "(n_workers, n_workers)")
    if not np.issubdtype(matrix.dtype, np.integer):
        raise InvalidParameter.of(f"{name}.dtype", str(matrix.dtype), "an integer dtype")
    if (matrix < 0).any():
        raise InvalidParameter.of(name, int(matrix.min()), "counts of samples, none below 0")
    return matrix.astype(np.int64)
