"""A ``Sampler`` for map-style training scripts: the ids that a rank trains on. Needs neither Dask nor PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning import (
    Aligned,
    Assignment,
    Classes,
    ShufflePlanSpec,
    epoch_order,
    next_assignment,
    parse_assignment,
)
from dshuffle.planning.batching import DROP, MODES, PAD
from dshuffle.planning.types import Samples


class ExchangeSampler:
    """What ``torch.utils.data.DistributedSampler`` is to global shuffling, for every assignment of dshuffle.

    Every rank computes the assignment by itself, from the seed alone. Where samples are kept on the ranks,
    :attr:`arrived` and :attr:`departed` say what to fetch before an epoch and what may be deleted.

    Parameters
    ----------
    n_samples
        Samples of the whole dataset, which every rank indexes by the same ids.
    rank, world_size
        This process, from 0, and the number of processes.
    assignment
        ``"partial:Q"``, ``"global"``, ``"local"`` or ``"chunks:ROWS"``.
    seed
        Any integer, the same on all ranks.
    sharding
        The first assignment: ``"random"``, ``"contiguous"`` or ``"round-robin"``.
    balance
        ``(n_samples,)`` integers, the class of each sample, the same on all ranks: every epoch keeps the classes in
        equal parts, to within one sample on every rank. For ``"partial:Q"``, ``"global"`` and ``"local"``.
    mode
        Where shares differ, how all ranks get equally many ids: ``"pad"`` repeats a rank's first ones,
        ``"drop"`` leaves out its last ones, ``"uneven"`` lets them differ.

    Raises
    ------
    InvalidParameter
        Naming the parameter, its value and what is allowed.

    References
    ----------
    Paper 004, Fig. 3 and Algorithm 1.

    Examples
    --------
    >>> sampler = ExchangeSampler(8, rank=0, world_size=2, assignment="partial:0.5", sharding="contiguous")
    >>> list(sampler)
    [3, 1, 0, 2]
    >>> sampler.set_epoch(1)
    >>> list(sampler), sampler.arrived, sampler.departed
    ([0, 6, 1, 4], array([4, 6]), array([2, 3]))
    """

    def __init__(
        self,
        n_samples: int,
        *,
        rank: int,
        world_size: int,
        assignment: str | Assignment = "partial:0.1",
        seed: int = 0,
        sharding: str = "random",
        balance: ArrayLike | None = None,
        mode: str = PAD,
    ) -> None:
        self._n_workers = as_integer("world_size", world_size, 1)
        n_samples = as_integer("n_samples", n_samples, self._n_workers, "There are fewer samples than ranks.")
        self._rank = as_integer("rank", rank, 0)
        if self._rank >= self._n_workers:
            raise InvalidParameter.of("rank", rank, f"in [0, {self._n_workers}), the world size")
        if mode not in MODES:
            raise InvalidParameter.of("mode", mode, f"one of {list(MODES)}")
        self._mode = mode
        parsed = parse_assignment(assignment)
        if isinstance(parsed, Aligned):
            allowed = "'partial:Q', 'global', 'local' or 'chunks:ROWS'"
            raise InvalidParameter.of("assignment", str(parsed), allowed, "Nothing is coded here.")
        classes = None if balance is None else Classes.of("given", balance, n_samples)
        self._spec = ShufflePlanSpec(
            n_samples, self._n_workers, as_integer("seed", seed), parsed, "peer", sharding, balance=classes
        )
        self._first = self._spec.first_assignment()
        self._ranks, self._before, self._epoch = self._first, self._first, 0

    def __len__(self) -> int:
        """Ids that this rank gets in the present epoch."""
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        """The ids of the present epoch, in an order that changes from epoch to epoch."""
        own = np.flatnonzero(self._ranks == self._rank)
        order = epoch_order(own, seed=self._spec.seed, epoch=self._epoch, rank=self._rank)
        return iter(order[self._positions()].tolist())

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, from 0; back as well. It is made from the one before it, so skipping many takes time."""
        epoch = as_integer("epoch", epoch, 0)
        if epoch < self._epoch:
            self._ranks, self._before, self._epoch = self._first, self._first, 0
        while self._epoch < epoch:
            self._epoch += 1
            self._before = self._ranks
            self._ranks = next_assignment(
                self._spec.assignment,
                self._before,
                self._n_workers,
                seed=self._spec.seed,
                epoch=self._epoch,
                classes=self._spec.balance,
            )

    @property
    def arrived(self) -> Samples:
        """Ascending int64, the ids of this epoch that the rank did not have in the one before; all in epoch 0."""
        own = self._ranks == self._rank
        return np.flatnonzero(own if self._epoch == 0 else own & (self._before != self._rank))

    @property
    def departed(self) -> Samples:
        """Ascending int64, the ids of the epoch before that are another rank's now."""
        return np.flatnonzero((self._before == self._rank) & (self._ranks != self._rank))

    def _positions(self) -> Samples:
        counts = np.bincount(self._ranks, minlength=self._n_workers)
        n_own = int(counts[self._rank])
        total = {PAD: int(counts.max()), DROP: int(counts.min())}.get(self._mode, n_own)
        return np.arange(total) % n_own
