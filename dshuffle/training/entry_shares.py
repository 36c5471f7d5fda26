"""Entries of a matrix divided between workers, if its rows have different numbers of entries."""

from __future__ import annotations

import heapq
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer, as_ratio
from dshuffle.errors import InvalidParameter

HELD_OUT = -1
"""Rank of entries that no worker trains on."""


def split_entries(row: ArrayLike, n_workers: int, *, held_out: float = 0.1, seed: int = 0) -> NDArray[np.int32]:
    """Give every worker whole rows of a matrix and equally many of their entries, and hold out the other entries.

    :func:`fit_matrix_completion` needs all training entries of a row on one worker, and a sharding needs equal shares.
    If rows have different numbers of entries, as users have of ratings, both are possible only without some entries.
    They become the test set.

    Parameters
    ----------
    row
        ``(entries,)`` integers, the row of each entry.
    n_workers
        Number of workers. There must be at least as many rows.
    held_out
        Smallest fraction of a worker's entries to hold out, in [0, 1). Workers that got more entries hold out more.
    seed
        Random seed of the entries that are held out.

    Returns
    -------
    (entries,) int32
        The worker of each entry, or -1 if it is held out. For a :class:`~dshuffle.Shuffler`, the ranks that are not -1
        are the ``sharding`` of the training entries, with the assignment ``"local"``.

    Raises
    ------
    InvalidParameter
        If ``row`` is not a 1-D array of integers, a number is out of range, or a worker would have no entries.

    Notes
    -----
    Rows go to the workers from the largest to the smallest, each to the worker with the fewest entries so far.

    Examples
    --------
    >>> rank = split_entries([7, 7, 7, 8, 8, 9, 9], n_workers=2, held_out=0)
    >>> rank[:3], np.bincount(rank[rank >= 0])
    (array([0, 0, 0], dtype=int32), array([3, 3]))
    """
    rows = np.asarray(row)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise InvalidParameter.because(
            "row", f"it is {rows.ndim}-D, {rows.dtype}", "It must be a 1-D array of integers."
        )
    ratio = as_ratio("held_out", held_out, Fraction(0))
    names, places, counts = np.unique(rows, return_inverse=True, return_counts=True)
    as_integer("n_workers", n_workers, 1)
    if len(names) < n_workers:
        raise InvalidParameter.of("n_workers", n_workers, f"at most {len(names)}, the number of rows with entries")
    loads = [(0, rank) for rank in range(n_workers)]
    owner = np.empty(len(names), np.int32)
    for place in np.argsort(-counts, kind="stable"):
        load, owner[place] = loads[0]
        heapq.heapreplace(loads, (load + int(counts[place]), int(owner[place])))
    share = int(loads[0][0] * (1 - ratio))
    if not share:
        raise InvalidParameter.of("held_out", held_out, "small enough to leave every worker an entry")
    candidates, ranks = owner[places], np.full(len(rows), HELD_OUT, np.int32)
    rng = np.random.default_rng(as_integer("seed", seed, 0))
    for rank in range(n_workers):
        ranks[rng.permutation(np.flatnonzero(candidates == rank))[:share]] = rank
    return ranks
