"""Caching policies: what a worker keeps beyond its share, and what it evicts to make room for a new share.

A policy object belongs to one shuffle and carries its state from epoch to epoch. After an exchange a worker may keep
any sample that it held before or has just received. It must keep its new share. The policy evicts other samples until
the worker is down to its capacity. Caches are filled in epoch 0, so every worker holds exactly ``capacity`` samples
from then on (with ``even``, occasionally a few less). If the capacity is no larger than the largest share, there is no
excess and every worker holds only its share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_ranks
from dshuffle.planning.even import Even
from dshuffle.planning.holders import add_holders, as_holders, has_excess, held_by, holders_of
from dshuffle.planning.randomness import choose, permutation
from dshuffle.planning.types import Holders, Ranks, Samples


class CachingPolicy(Protocol):
    """Protocol of the policies, which manage the caches of one shuffle."""

    def first(self, assignment: Ranks) -> Holders:
        """Return the holders of epoch 0."""
        ...

    def evolve(self, holders: Holders, assignment: Ranks, epoch: int) -> Holders:
        """Return the holders after the exchange for ``epoch``, as a new array.

        ``assignment`` is the assignment of ``epoch``. Every worker holds its new share, no sample that it neither held
        nor received, and no more samples than the capacity.
        """
        ...


def first_holders(assignment: ArrayLike, n_workers: int, capacity: int, *, seed: int) -> Holders:
    """Draw the holders of epoch 0: each worker's share, and random excess.

    The excess is uniformly random and fills every cache exactly to the capacity.

    Parameters
    ----------
    assignment
        ``(q,)`` integers, the worker that trains on each sample.
    capacity
        Number of samples that a worker may hold, at least the largest share. If it is no larger than that, there is no
        excess.

    Examples
    --------
    >>> holders = first_holders([0, 0, 1, 1], 2, 3, seed=0)
    >>> [int(held_by(holders, worker).sum()) for worker in range(2)]
    [3, 3]
    """
    ranks = as_ranks("assignment", assignment, n_workers)
    holders = holders_of(ranks, n_workers)
    if has_excess(len(ranks), n_workers, capacity):
        for worker in range(n_workers):
            foreign = np.flatnonzero(ranks != worker)
            room = capacity - (len(ranks) - len(foreign))
            chosen = choose(foreign, min(room, len(foreign)), "excess", seed, worker)
            holders[chosen, worker // 64] |= np.uint64(1 << worker % 64)
    return holders


@dataclass
class Uniform:
    """Evict uniformly at random among the samples outside the new share.

    References
    ----------
    Chung et al. (2017), section 2; see docs/papers.md. The paper lets a node cache up to ``s = floor(alpha q)`` data
    points and does not say which ones it evicts. Its rates assume caches of uniformly random content. With this policy,
    caches have such content at first. Over the epochs, numbers of holders become more even than random, because a
    sample that moves gains a holder.
    """

    n_workers: int
    capacity: int
    seed: int

    def first(self, assignment: Ranks) -> Holders:
        """See :class:`CachingPolicy`."""
        return first_holders(assignment, self.n_workers, self.capacity, seed=self.seed)

    def evolve(self, holders: Holders, assignment: Ranks, epoch: int) -> Holders:
        """See :class:`CachingPolicy`."""
        ranks = as_ranks("assignment", assignment, self.n_workers)
        if not has_excess(len(ranks), self.n_workers, self.capacity):
            return holders_of(ranks, self.n_workers)
        evolved = as_holders(holders, self.n_workers).copy()
        for worker in range(self.n_workers):
            own = ranks == worker
            excess = np.flatnonzero(held_by(evolved, worker) & ~own)
            n_evicted = len(excess) + int(own.sum()) - self.capacity
            if n_evicted > 0:
                evicted = self.evict(excess, n_evicted, worker, epoch)
                evolved[evicted, worker // 64] &= ~np.uint64(1 << worker % 64)
        add_holders(evolved, ranks)
        return evolved

    def evict(self, excess: Samples, count: int, worker: int, epoch: int) -> Samples:
        """Choose ``count`` samples to evict.

        ``excess`` are the samples that the worker holds outside its new share.
        """
        return choose(excess, count, "evict", self.seed, epoch, worker)


@dataclass
class Recent(Uniform):
    """Keep the samples that the worker trained on most recently; ties are random.

    Samples that many workers trained on recently stay cached by many workers, which helps coded deliveries: they need 4
    to 7 % fewer packets than with ``uniform`` at a million samples. The state is one byte per worker and sample: the
    number of epochs since the worker trained on the sample. It is at most 255, which also means never.
    """

    ages: NDArray[np.uint8] = field(init=False, repr=False)

    def first(self, assignment: Ranks) -> Holders:
        """See :class:`CachingPolicy`."""
        if has_excess(len(assignment), self.n_workers, self.capacity):
            self.ages = np.full((self.n_workers, len(assignment)), 255, dtype=np.uint8)
            self.ages[assignment, np.arange(len(assignment))] = 0
        return super().first(assignment)

    def evolve(self, holders: Holders, assignment: Ranks, epoch: int) -> Holders:
        """See :class:`CachingPolicy`."""
        if has_excess(len(assignment), self.n_workers, self.capacity):
            np.minimum(self.ages, 254, out=self.ages)
            self.ages += 1
            self.ages[assignment, np.arange(len(assignment))] = 0
        return super().evolve(holders, assignment, epoch)

    def evict(self, excess: Samples, count: int, worker: int, epoch: int) -> Samples:
        """Choose the ``count`` samples of the excess that the worker trained on least recently."""
        mixed = excess[permutation(len(excess), "evict", self.seed, epoch, worker)]
        youngest_first = mixed[np.argsort(self.ages[worker, mixed], kind="stable")]
        return youngest_first[len(excess) - count :]


@dataclass(frozen=True, slots=True)
class Shares:
    """Keep only the share, for caches without room for excess.

    The other policies cannot recognize this case by the capacity if shares differ in size, as with ``chunks``: a worker
    with a smaller share in this epoch has room left in its cache.
    """

    n_workers: int

    def first(self, assignment: Ranks) -> Holders:
        """See :class:`CachingPolicy`."""
        return holders_of(assignment, self.n_workers)

    def evolve(self, holders: Holders, assignment: Ranks, epoch: int) -> Holders:
        """See :class:`CachingPolicy`."""
        return holders_of(assignment, self.n_workers)


CACHINGS: dict[str, Callable[[int, int, int], CachingPolicy]] = {"uniform": Uniform, "recent": Recent, "even": Even}
"""Caching policies: name -> constructor, called with (n_workers, capacity, seed)."""
