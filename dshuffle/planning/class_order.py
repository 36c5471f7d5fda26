"""A random order of samples in which every class is spread evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.planning.randomness import permutation, random_words
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
        path
            Names the random draw.

        Examples
        --------
        >>> order = ClassOrder.of([0] * 6 + [1] * 3, "example")
        >>> np.repeat([0, 1], [6, 3])[order.samples].reshape(3, 3).sum(axis=1)
        array([1, 1, 1])
        >>> order.forward(order.inverse(np.arange(9)))
        array([0, 1, 2, 3, 4, 5, 6, 7, 8])
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
