"""Ranks as a function: which worker trains on a sample, and on which samples a worker trains, point by point.

A bijection maps samples, or whole chunks, to positions. Positions are cut into one block for each worker. Sizes of
blocks differ by at most one, or are in proportion to weights. So nobody needs the ranks of the other samples, or those
of the epochs before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.bijection import Bijection
from dshuffle.planning.randomness import permutation
from dshuffle.planning.share_sizes import Weights, share_sizes
from dshuffle.planning.types import Ranks, Samples


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The ranks of one epoch.

    Parameters
    ----------
    n_samples, n_workers
        Numbers of samples and workers; no fewer units than workers.
    unit
        Samples that stay together: 1, or the rows of a chunk. A short chunk at the end goes to the last block, which is
        never larger than the others if there are no weights.
    names
        ``(n_workers,)`` int32, the worker of each block.
    bijection
        From units to positions; None leaves them in order.
    weights
        Relative size of each worker's block; none for equal sizes.

    Examples
    --------
    >>> blocks = Blocks.drawn(10, 3, 1, "example", 7)
    >>> blocks.samples_of(0)
    array([1, 4, 8])
    >>> blocks.ranks_of(np.array([0, 1, 3, 4]))
    array([2, 0, 1, 0], dtype=int32)
    """

    n_samples: int
    n_workers: int
    unit: int
    names: Ranks
    bijection: Bijection | None
    weights: Weights = ()

    @classmethod
    def drawn(cls, n_samples: int, n_workers: int, unit: int, *path: int | str, weights: Weights = ()) -> Blocks:
        """Draw uniform ranks.

        Parameters
        ----------
        path
            Names the random numbers, as in :func:`~dshuffle.planning.randomness.random_words`.
        weights
            Relative size of each worker's block; none for equal sizes.
        """
        # Without random names, the same workers would get the larger blocks, and be slower, in every epoch.
        names = permutation(n_workers, "names", *path).astype(np.int32)
        n_units = n_samples // unit  # none if a worker has a single chunk that is short
        bijection = Bijection.of(n_units, *path) if n_units else None
        return cls(n_samples, n_workers, unit, names, bijection, weights)

    @classmethod
    def contiguous(cls, n_samples: int, n_workers: int, unit: int = 1, weights: Weights = ()) -> Blocks:
        """Give consecutive units to each worker, in rank order."""
        return cls(n_samples, n_workers, unit, np.arange(n_workers, dtype=np.int32), None, weights)

    @property
    def n_units(self) -> int:
        """Number of whole units."""
        return self.n_samples // self.unit

    def ranks_of(self, samples: NDArray[np.int64]) -> Ranks:
        """``(k,)`` int32, the workers that train on the given ``(k,)`` samples."""
        units = samples // self.unit if self.unit > 1 else samples
        whole = units < self.n_units
        positions = units if self.bijection is None else self.bijection.forward(np.where(whole, units, 0))
        return self.names[np.where(whole, self._blocks_at(positions), self.n_workers - 1)]

    def samples_of(self, rank: int) -> Samples:
        """Ascending int64, the samples on which a worker trains."""
        block = int(np.flatnonzero(self.names == rank)[0])
        positions = np.arange(self._start_of(block), self._start_of(block + 1))
        units = positions if self.bijection is None else np.sort(self.bijection.inverse(positions))
        if self.unit == 1:
            return units
        samples = (units[:, np.newaxis] * self.unit + np.arange(self.unit)).ravel()
        if block == self.n_workers - 1:
            samples = np.concatenate([samples, np.arange(self.n_units * self.unit, self.n_samples)])
        return samples

    @property
    def sizes(self) -> NDArray[np.int64]:
        """``(n_workers,)`` int64, the units of each worker."""
        if self.weights:
            return share_sizes(self.n_units, self.weights)
        each, extra = divmod(self.n_units, self.n_workers)
        sizes = np.empty(self.n_workers, np.int64)
        sizes[self.names] = each + (np.arange(self.n_workers) < extra)
        return sizes

    def samples_at(self, workers: NDArray[np.int64], places: NDArray[np.int64]) -> Samples:
        """``(k,)`` int64, the samples at the given ``(k,)`` places of the workers' blocks, if units are samples."""
        positions = self._starts[workers] + places
        return positions if self.bijection is None else self.bijection.inverse(positions)

    def places_of(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Workers and places of the given ``(k,)`` samples, ``(k,)`` int64 each, if units are samples."""
        positions = samples if self.bijection is None else self.bijection.forward(samples)
        workers = self.ranks_of(samples).astype(np.int64)
        return workers, positions - self._starts[workers]

    def _start_of(self, block: int) -> int:
        """Position at which a block begins."""
        if self.weights:
            return int(self.sizes[self.names[:block]].sum())
        each, extra = divmod(self.n_units, self.n_workers)
        return block * each + min(block, extra)

    def _blocks_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """``(k,)`` int64, the blocks of the ``(k,)`` positions."""
        if self.weights:
            return np.searchsorted(np.cumsum(self.sizes[self.names]), positions, side="right")
        each, extra = divmod(self.n_units, self.n_workers)
        first = extra * (each + 1)  # positions in the larger blocks
        return np.where(positions < first, positions // (each + 1), extra + (positions - first) // max(each, 1))

    @property
    def _starts(self) -> NDArray[np.int64]:
        """``(n_workers,)`` int64, the position at which each worker's block begins."""
        starts = np.empty(self.n_workers, np.int64)
        starts[self.names] = np.cumsum(self.sizes[self.names]) - self.sizes[self.names]
        return starts

    def all_ranks(self) -> Ranks:
        """``(n_samples,)`` int32, the worker of every sample."""
        return self.ranks_of(np.arange(self.n_samples))

    @property
    def shares(self) -> tuple[int, int]:
        """Smallest and largest number of samples that a worker trains on."""
        if self.weights:
            samples = self.sizes * self.unit
            samples[self.names[-1]] += self.n_samples % self.unit
            return int(samples.min()), int(samples.max())
        each, extra = divmod(self.n_units, self.n_workers)
        sizes = [each * self.unit + self.n_samples % self.unit]  # the last block
        if extra:
            sizes.append((each + 1) * self.unit)
        if self.n_workers - extra > 1:
            sizes.append(each * self.unit)
        return min(sizes), max(sizes)
