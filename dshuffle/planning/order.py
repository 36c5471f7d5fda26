"""The order in which a worker trains on its samples, drawn again for every epoch under every assignment."""

from __future__ import annotations

import numpy as np

from dshuffle.checks import as_integer
from dshuffle.planning.randomness import permutation, random_words, words_at
from dshuffle.planning.types import Samples


def epoch_order(sample_ids: Samples, *, seed: int, epoch: int, rank: int) -> Samples:
    """Order a worker's samples for training in an epoch.

    The order depends only on the seed, the epoch, the rank and the set of samples.

    Examples
    --------
    >>> epoch_order(np.array([30, 10, 20]), seed=0, epoch=1, rank=0)
    array([30, 10, 20])
    """
    return sample_ids[epoch_permutation(sample_ids, seed=seed, epoch=epoch, rank=rank)]


def epoch_permutation(sample_ids: Samples, *, seed: int, epoch: int, rank: int) -> Samples:
    """The order of :func:`epoch_order` as ``(k,)`` int64 positions in ``sample_ids``.

    Samples are sorted by words drawn for each of them, no two of which are equal. So the order of any subset
    can be computed without the other samples. A worker that receives rows knows in which order their sender trains.
    """
    return np.argsort(words_at(random_words(1, "order", seed, epoch, rank)[0], sample_ids))


def row_permutation(n_rows: int, seed: int = 0) -> Samples:
    """Permutation that :func:`dshuffle.permute` applies.

    Row k of the permuted dataset is row ``row_permutation(...)[k]`` of the original one.

    Parameters
    ----------
    n_rows
        Number of rows, at least 0 and below 2**32.
    seed
        Any integer.

    Returns
    -------
    (n_rows,) int64
        The original row at each position.

    Raises
    ------
    InvalidParameter
        If a parameter is not an integer, or ``n_rows`` is out of range.

    Examples
    --------
    >>> row_permutation(5, seed=1)
    array([2, 0, 1, 3, 4])
    """
    return permutation(as_integer("n_rows", n_rows, 0), "permute", as_integer("seed", seed))
