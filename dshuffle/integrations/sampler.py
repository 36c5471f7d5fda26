"""A sampler for map-style datasets: the sample ids that a rank trains on. Needs neither Dask nor PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.integrations.position import Position
from dshuffle.planning import Assignment, Choices, Classes, ShuffleSpec, parse_assignment
from dshuffle.planning.assignment import Drawn
from dshuffle.planning.batching import DROP, MODES, PAD
from dshuffle.planning.order import epoch_order
from dshuffle.planning.own_part import Moves, OwnPlanner, plans_own_parts
from dshuffle.planning.types import Samples


class ExchangeSampler:
    """A replacement for ``torch.utils.data.DistributedSampler`` that supports the uncoded assignments.

    Every rank computes the assignment from the seed, without communication. If samples are stored on the ranks, fetch
    the samples in :attr:`arrived` before an epoch; the samples in :attr:`departed` may be deleted.

    Parameters
    ----------
    n_samples
        Number of samples in the dataset. All ranks use the same sample ids.
    rank, world_size
        Rank of this process, from 0, and number of processes.
    assignment
        ``"partial:Q"``, ``"global"``, ``"local"`` or ``"chunks:ROWS"``.
    seed
        Any integer, the same on all ranks.
    sharding
        First assignment: ``"random"``, ``"contiguous"`` or ``"round-robin"``.
    balance
        ``(n_samples,)`` integer class of each sample, the same on all ranks. In every epoch, each class is divided
        equally among the ranks, to within one sample. For ``"partial:Q"``, ``"global"`` and ``"local"``.
    mode
        How to give all ranks the same number of ids if their shares differ: ``"pad"`` repeats the first ids of a rank,
        ``"drop"`` omits its last ids. ``"uneven"`` leaves the numbers different.

    Raises
    ------
    InvalidParameter
        If a parameter has a value that is not allowed.

    References
    ----------
    Nguyen et al. (2022), Fig. 3 and Algorithm 1; see docs/papers.md.

    Examples
    --------
    >>> sampler = ExchangeSampler(8, rank=0, world_size=2, assignment="partial:0.5", sharding="contiguous")
    >>> list(sampler)
    [1, 0, 2, 3]
    >>> sampler.set_epoch(1)
    >>> list(sampler), sampler.arrived, sampler.departed
    ([7, 0, 4, 2], array([4, 7]), array([1, 3]))
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
            raise InvalidParameter.of("rank", rank, f"in [0, {self._n_workers}), the range of ranks")
        if mode not in MODES:
            raise InvalidParameter.of("mode", mode, f"one of {list(MODES)}")
        self._mode = mode
        parsed = parse_assignment(assignment)
        if parsed.needs_holders:
            allowed = "'partial:Q', 'global', 'local' or 'chunks:ROWS'"
            raise InvalidParameter.of("assignment", str(parsed), allowed, "Coded deliveries are not supported.")
        classes = None if balance is None else Classes.of("given", balance, n_samples)
        self._spec = ShuffleSpec(
            n_samples,
            self._n_workers,
            Choices(
                assignment=parsed, delivery="peer", sharding=sharding, balance=classes, seed=as_integer("seed", seed)
            ),
        )
        self._planner = OwnPlanner(self._spec, self._rank) if plans_own_parts(self._spec, "peer") else None
        self._drawn: Drawn | None = None  # otherwise all ranks of the epoch
        self._position = Position(0)
        self.set_epoch(0)

    def __len__(self) -> int:
        """Number of ids of this rank in the current epoch."""
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids of the current epoch, in an order that changes every epoch."""
        order = epoch_order(self._moves.own, seed=self._spec.choices.seed, epoch=self._epoch, rank=self._rank)
        ids = order[self._positions()].tolist()
        yield from self._position.iterate(len(ids), ids.__getitem__)

    def state_dict(self) -> dict[str, int | str | None]:
        """The position for :meth:`load_state_dict`: the epoch, and how many of its ids the last iteration has given.

        At the end of an epoch, ``"yielded"`` is ``len(self)``.

        A ``DataLoader`` with workers asks for ids ahead of training. Set ``"yielded"`` to the number of ids that were
        trained on.
        """
        return {**self._fixed(), "epoch": self._position.epoch, "yielded": self._position.n_given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state. The next iteration gives the ids that are left of its epoch.

        :meth:`set_epoch` with this epoch keeps the position, so that a loop may call it as always. Nothing is left at
        the end of an epoch.

        Raises
        ------
        InvalidParameter
            If the state is one of another sampler, or of a release that draws other ids.
        """
        for name, value in self._fixed().items():
            if state.get(name) != value:
                raise InvalidParameter.of(f"state[{name!r}]", state.get(name), f"{value!r}, as this sampler has it")
        yielded = as_integer("state['yielded']", state.get("yielded"), 0)
        self.set_epoch(as_integer("state['epoch']", state.get("epoch"), 0))
        if yielded > len(self):
            raise InvalidParameter.of(
                "state['yielded']", yielded, f"at most {len(self)}, the ids of epoch {self._epoch}"
            )
        self._position.resume(self._epoch, yielded)

    def _fixed(self) -> dict[str, int | str | None]:
        """What a state and its sampler must have in common."""
        spec = self._spec
        return {
            "draw_version": spec.draw_version,
            "n_samples": spec.n_samples,
            "rank": self._rank,
            "world_size": self._n_workers,
            "assignment": str(spec.choices.assignment),
            "sharding": str(spec.choices.sharding),
            "balance_checksum": None if spec.choices.balance is None else spec.choices.balance.checksum,
            "seed": spec.choices.seed,
            "mode": self._mode,
        }

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, from 0, forward or back.

        A position in this epoch from :meth:`load_state_dict` stays, until an iteration has begun there.

        With ``balance``, and with the sharding ``"round-robin"``, each assignment is computed from the previous one, so
        that skipping many epochs takes time.
        """
        self._spec.check_epoch("epoch", epoch)
        if self._planner is not None:
            self._moves, self._shares = self._planner.moves(epoch), self._planner.shares(epoch)
        else:
            self._draw(epoch)
        self._epoch = epoch
        self._position.set_epoch(epoch)

    def _draw(self, epoch: int) -> None:
        """Draw the ranks of all samples up to an epoch."""
        if self._drawn is None or epoch < self._epoch:
            self._drawn, self._epoch = self._spec.draw_first(), 0
            own = np.flatnonzero(self._drawn.ranks == self._rank)
            self._moves = Moves.loading(own)
        while self._epoch < epoch:
            self._epoch += 1
            before, self._drawn = self._drawn, self._spec.draw(self._drawn, self._epoch)
            self._moves = Moves.between(before.ranks, self._drawn.ranks, self._rank)
        counts = np.bincount(self._drawn.ranks, minlength=self._n_workers)
        self._shares = int(counts.min()), int(counts.max())

    @property
    def arrived(self) -> Samples:
        """Ascending int64 ids that this rank has in this epoch but not in the previous one; all its ids in epoch 0."""
        return self._moves.arriving

    @property
    def departed(self) -> Samples:
        """Ascending int64 ids that this rank had in the previous epoch but not in this one."""
        return self._moves.leaving

    def _positions(self) -> Samples:
        n_own, (smallest, largest) = len(self._moves.own), self._shares
        total = {PAD: largest, DROP: smallest}.get(self._mode, n_own)
        return np.arange(total) % n_own
