"""Whole chunks to workers: how many rows each gets, and which.

Workers get equally many whole chunks, or one more; the short chunk at the end of the dataset, where there is one, goes
to a worker that has the fewest of them. So partition sizes differ by at most one chunk's rows.
"""

from __future__ import annotations

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.planning.randomness import permutation, shuffle
from dshuffle.planning.types import Ranks


def check_chunks(n_samples: int, n_workers: int, chunk_rows: int) -> None:
    """Refuse chunks of which there are fewer than workers.

    Raises
    ------
    InvalidParameter
        Saying how large chunks may be.
    """
    n_chunks = -(-n_samples // chunk_rows)
    if n_chunks < n_workers:
        raise InvalidParameter.of(
            "chunk_rows",
            chunk_rows,
            f"at most {(n_samples - 1) // (n_workers - 1)}, for {n_samples} samples and {n_workers} workers",
            f"Of such chunks there {'is 1' if n_chunks == 1 else f'are {n_chunks}'}, and with the assignment "
            "'chunks' a worker without one would have nothing to train on. Create the dataset with smaller chunks, or "
            "use the assignment 'global', or fewer workers.",
        )


def slice_chunks(n_samples: int, n_workers: int, chunk_rows: int) -> Ranks:
    """``(n_samples,)`` ranks: consecutive chunks to each worker, in rank order.

    Examples
    --------
    >>> slice_chunks(9, 2, 2)
    array([0, 0, 0, 0, 1, 1, 1, 1, 1], dtype=int32)
    """
    return _of_rows(_whole_chunks(n_samples, n_workers, chunk_rows), n_workers - 1, n_samples, chunk_rows)


def deal_chunks(n_samples: int, n_workers: int, chunk_rows: int) -> Ranks:
    """``(n_samples,)`` ranks: consecutive chunks to one worker after the other, in turn.

    Examples
    --------
    >>> deal_chunks(9, 2, 2)
    array([0, 0, 1, 1, 0, 0, 1, 1, 0], dtype=int32)
    """
    turns = np.arange(-(-n_samples // chunk_rows)) % n_workers
    return np.repeat(turns.astype(np.int32), chunk_rows)[:n_samples]


def draw_chunks(n_samples: int, n_workers: int, chunk_rows: int, *path: int | str) -> Ranks:
    """``(n_samples,)`` ranks: every chunk to a uniformly random worker, as balanced as chunks allow.

    Parameters
    ----------
    path
        Names the random numbers, as in :func:`~dshuffle.planning.random_words`.
    """
    # Random names, as always the same workers would otherwise get the chunks left over and be slower in every epoch.
    names = permutation(n_workers, "names", *path).astype(np.int32)
    ranks = names[_whole_chunks(n_samples, n_workers, chunk_rows)]
    shuffle(ranks, *path)
    return _of_rows(ranks, int(names[-1]), n_samples, chunk_rows)


def _whole_chunks(n_samples: int, n_workers: int, chunk_rows: int) -> Ranks:
    """The ranks of all chunks but a short one; the last worker has the fewest."""
    each, extra = divmod(n_samples // chunk_rows, n_workers)
    counts = np.full(n_workers, each)
    counts[:extra] += 1
    return np.repeat(np.arange(n_workers, dtype=np.int32), counts)


def _of_rows(whole: Ranks, short: int, n_samples: int, chunk_rows: int) -> Ranks:
    ranks = np.full(n_samples, short, dtype=np.int32)
    ranks[: len(whole) * chunk_rows] = np.repeat(whole, chunk_rows)
    return ranks
