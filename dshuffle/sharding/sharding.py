"""The :class:`Sharding` type, and stratified sharding."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer, as_ranks
from dshuffle.errors import InvalidParameter, ShardingWarning
from dshuffle.planning.assignment.balance import deal_classes, label_codes
from dshuffle.planning.types import Ranks, Samples


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """A first assignment computed offline.

    Parameters
    ----------
    ranks
        ``(q,)`` int32: the worker of each sample. Partition sizes differ by at most one, with and without the
        broadcast samples.
    n_workers
        Number of workers.
    broadcast
        Ascending int64: the samples that every worker trains on. In a session (``Shuffler(sharding=...)`` with this
        object or with the name of a stored sharding) every worker holds them in every epoch. They are the only
        exception to training on each sample exactly once. Each of them has a rank as well; pass ``ranks`` alone to
        broadcast nothing.
    neighbourhoods
        ``(k,)`` int64, descending: number of samples in each neighbourhood, for a distribution-aware sharding.

    References
    ----------
    Provatas et al. (2021), section III-B, on broadcast samples; see docs/papers.md.

    Examples
    --------
    >>> sharding = Sharding(np.array([0, 1, 0], np.int32), 2, broadcast=np.array([2]))
    >>> sharding.sizes
    array([2, 2])
    """

    ranks: Ranks
    n_workers: int
    broadcast: Samples
    neighbourhoods: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        as_integer("n_workers", self.n_workers, 1)
        as_ranks("ranks", self.ranks, self.n_workers)
        if len(self.broadcast) and not 0 <= self.broadcast.min() <= self.broadcast.max() < len(self.ranks):
            raise InvalidParameter.of("broadcast", self.broadcast, f"samples in [0, {len(self.ranks)})")

    @property
    def sizes(self) -> NDArray[np.int64]:
        """``(n_workers,)``: number of samples in each shard, including broadcast samples."""
        own = np.bincount(self.ranks, minlength=self.n_workers)
        return own - np.bincount(self.ranks[self.broadcast], minlength=self.n_workers) + len(self.broadcast)

    def counts(self, labels: ArrayLike) -> NDArray[np.int64]:
        """``(classes, n_workers)``: number of samples of each class in each shard, including broadcast samples."""
        codes, classes = label_codes(labels, len(self.ranks))
        pairs = codes.astype(np.int64) * self.n_workers + self.ranks
        own = np.delete(pairs, self.broadcast)  # every shard has the others
        counts = np.bincount(own, minlength=len(classes) * self.n_workers).reshape(len(classes), self.n_workers)
        return counts + np.bincount(codes[self.broadcast], minlength=len(classes))[:, np.newaxis]


def stratified(labels: ArrayLike, n_workers: int, *, seed: int = 0) -> Ranks:
    """Deal the samples of each class to the workers in turn.

    Parameters
    ----------
    labels
        ``(q,)`` integers, the class of each sample.
    n_workers
        Number of workers, at most q.
    seed
        Seed of the random order, any integer.

    Returns
    -------
    (q,) int32
        The worker of each sample. The number of samples per worker differs by at most one, for each class and in
        total.

    Raises
    ------
    InvalidParameter
        If labels are not one-dimensional, not integers or all distinct, or if there are fewer samples than workers.

    Warns
    -----
    ShardingWarning
        If a class has fewer samples than there are workers, so that some workers do not get any of them.

    References
    ----------
    Provatas et al. (2021), section III-A and Fig. 4; see docs/papers.md.

    Examples
    --------
    >>> stratified([3, 3, 8, 8], 2)
    array([0, 1, 0, 1], dtype=int32)
    """
    codes, classes = label_codes(labels)
    ranks = deal_classes(codes, len(classes), n_workers, seed=seed)
    sizes = np.bincount(codes)
    small = np.flatnonzero(sizes < n_workers)
    if len(small):
        least = small[sizes[small].argmin()]
        warnings.warn(
            f"{len(small)} of {len(classes)} classes have fewer samples than there are workers ({n_workers}), so some "
            f"workers get no samples of them; the smallest is {classes[least]} with {sizes[least]} samples",
            ShardingWarning,
            stacklevel=2,
        )
    return ranks
