"""The order in which a worker trains on its samples, drawn again for every epoch under every assignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.planning.randomness import permutation, random_words, words_at
from dshuffle.planning.types import Samples


@dataclass(frozen=True, slots=True, eq=False)
class ClassOrder:
    """A random order of samples in which every class is spread evenly, as a table.

    Parameters
    ----------
    samples
        Sample at each position: a permutation of 0 to q - 1, ``(q,)`` int64.
    positions
        Position of each sample: its inverse.

    Notes
    -----
    The members of a class are put in random order, and the order is divided into as many intervals of equal length as
    the class has members. Each member is at a random point of its own interval. So the number of members of a class
    among any successive samples stays within about two of its share. In a random order it deviates by about the square
    root of the share.
    """

    samples: Samples
    positions: Samples

    @classmethod
    def of(cls, labels: ArrayLike, *path: int | str) -> Self:
        """Draw an order.

        Parameters
        ----------
        labels
            ``(q,)`` values; equal values are a class.
        """
        _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        order = permutation(len(codes), "class order", *path)
        by_class = order[np.argsort(codes[order], kind="stable")]
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        point = (random_words(len(codes), "class order", "point", *path) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
        places = (np.arange(len(codes)) - firsts + point) / np.repeat(counts, counts)
        samples = by_class[np.argsort(places, kind="stable")]
        positions = np.empty_like(samples)
        positions[samples] = np.arange(len(samples))
        return cls(samples, positions)

    def forward(self, samples: NDArray[np.int64]) -> Samples:
        """Positions of samples."""
        return self.positions[samples]

    def inverse(self, positions: NDArray[np.int64]) -> Samples:
        """Samples at positions."""
        return self.samples[positions]


def epoch_order(sample_ids: Samples, *, seed: int, epoch: int, rank: int) -> Samples:
    """Order a worker's samples for training in an epoch.

    The order depends only on the seed, the epoch, the rank and the set of samples.
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
