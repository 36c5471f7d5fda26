"""In which order a worker trains on its samples: mixed anew in every epoch, whatever the assignment."""

from __future__ import annotations

import numpy as np

from dshuffle.checks import as_integer
from dshuffle.planning.randomness import permutation
from dshuffle.planning.types import Samples


def epoch_order(sample_ids: Samples, *, seed: int, epoch: int, rank: int) -> Samples:
    """The order in which a worker trains on its samples: a function of (seed, epoch, rank) and their set.

    Examples
    --------
    >>> epoch_order(np.array([30, 10, 20]), seed=0, epoch=1, rank=0)
    array([10, 30, 20])
    """
    return np.sort(sample_ids)[epoch_permutation(len(sample_ids), seed=seed, epoch=epoch, rank=rank)]


def epoch_permutation(n_own: int, *, seed: int, epoch: int, rank: int) -> Samples:
    """:func:`epoch_order` as ``(n_own,)`` int64 positions within the ascending samples."""
    return permutation(n_own, "order", seed, epoch, rank)


def row_permutation(n_rows: int, seed: int = 0) -> Samples:
    """The permutation that :func:`dshuffle.permute` applies: row k of its result is row ``row_permutation(...)[k]``.

    Parameters
    ----------
    n_rows
        From 0, below 2**32.
    seed
        Any integer.

    Returns
    -------
    (n_rows,) int64

    Raises
    ------
    InvalidParameter
        If a parameter is no integer, or ``n_rows`` is out of range.

    Examples
    --------
    >>> row_permutation(5, seed=1)
    array([2, 0, 1, 3, 4])
    """
    return permutation(as_integer("n_rows", n_rows, 0), "permute", as_integer("seed", seed))
