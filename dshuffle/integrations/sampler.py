"""A sampler for map-style datasets: the sample ids that a rank trains on. Needs neither Dask nor PyTorch.

With PyTorch it is a ``torch.utils.data.DistributedSampler``, as libraries ask whether a sampler is one: Lightning
divides the ids of any other sampler between the ranks once more.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.integrations import process_group
from dshuffle.planning import Assignment, Choices, Classes, Remainder, ShuffleSpec, parse_assignment
from dshuffle.planning.assignment import EpochDraw
from dshuffle.planning.batching import DROP, MODES, PAD, UNEVEN, Position, Positioned
from dshuffle.planning.epoch_plan import Moves
from dshuffle.planning.exchange_epochs import EVERY_EPOCH
from dshuffle.planning.planner import OwnPlanner, plans_own_parts
from dshuffle.planning.randomness import random_words
from dshuffle.planning.types import Ranks, Samples

MOST_STEPS = 2 * 10**7
"""Samples of a rank times exchanges through which it follows them back, at most: one and a half seconds."""


def _base() -> Any:
    try:
        return importlib.import_module("torch.utils.data").DistributedSampler
    except ImportError:
        return object


class ExchangeSampler(Positioned[int], _base()):  # type: ignore[misc]
    """A replacement for ``torch.utils.data.DistributedSampler`` that supports the uncoded assignments.

    Every rank computes the assignment from the seed, without communication. If samples are stored on the ranks,
    :attr:`arrived`, :attr:`sources`, :attr:`departed` and :attr:`destinations` say what to move before an epoch.

    With ``"partial:Q"``, a rank follows its samples back from epoch to epoch. So that ``set_epoch`` takes two seconds
    at most, all ranks are drawn anew after some epochs: as many as a rank of m samples goes through with
    ``20_000_000 / m`` exchanges. With ``balance``, and with the sharding ``"round-robin"``, each assignment is computed
    from the previous one, and the time is proportional to the epoch. See docs/iterators.md.

    Parameters
    ----------
    dataset
        A dataset with a length, or the number of its samples. All ranks use the same sample ids.
    num_replicas, rank
        Number of processes, and rank of this one, from 0. By default those of ``torch.distributed`` if it has been
        initialized, otherwise the environment variables ``WORLD_SIZE`` and ``RANK``, which torchrun sets.
    shuffle
        If it is False, every rank has the same ids in every epoch, in ascending order, as for validation.
    seed
        Any integer, the same on all ranks.
    drop_last
        Short for ``mode="drop"``.
    assignment
        ``"partial:Q"``, ``"global"``, ``"local"`` or ``"chunks:ROWS"``; by default ``"partial:0.1"``, ``"global"`` with
        ``balance``, or ``"local"`` without ``shuffle``.
    sharding
        First assignment: ``"random"``, ``"contiguous"`` or ``"round-robin"``; by default ``"random"``, or
        ``"round-robin"`` without ``shuffle``.
    balance
        ``(n_samples,)`` integer class of each sample, the same on all ranks. In every epoch, each class is divided
        equally among the ranks, to within one sample. For ``"global"`` and ``"local"``.
    every, between
        K, and ``"redraw"`` or ``"reverse"``: only the epochs K, 2 K, ... exchange samples; between them, a rank goes
        through its ids in a new order, or in that of the epoch before, backwards. See docs/strategies.md.
    mode
        How to give all ranks the same number of ids if their shares differ: ``"pad"`` (the default) repeats the first
        ids of a rank, ``"drop"`` omits its last ids. ``"uneven"`` leaves the numbers different. Shares differ by one
        id, or with ``"chunks:ROWS"`` by up to a chunk: for two ranks and 103 samples in chunks of 8, ``"pad"`` repeats
        9 ids, and ``"drop"`` omits 9.
    world_size
        Another name of ``num_replicas``, as PyTorch itself calls it.

    Raises
    ------
    InvalidParameter
        If a parameter has a value that is not allowed, or the rank and the number of processes are unknown.

    References
    ----------
    Nguyen et al. (2022), Fig. 3 and Algorithm 1; see docs/papers.md.

    Examples
    --------
    >>> sampler = ExchangeSampler(8, 2, rank=0, assignment="partial:0.5", sharding="contiguous")
    >>> list(sampler)
    [1, 0, 2, 3]
    >>> sampler.set_epoch(1)
    >>> list(sampler), sampler.arrived, sampler.departed
    ([7, 0, 4, 2], array([4, 7]), array([1, 3]))
    >>> sampler.sources, sampler.destinations
    (array([1, 1], dtype=int32), array([1, 1], dtype=int32))
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        assignment: str | Assignment | None = None,
        sharding: str | None = None,
        balance: ArrayLike | None = None,
        every: int = 1,
        between: str = "redraw",
        mode: str | None = None,
        world_size: int | None = None,
    ) -> None:
        if world_size is not None and num_replicas is not None:
            raise InvalidParameter.of("world_size", world_size, f"left out with num_replicas={num_replicas!r}")
        name, size = ("num_replicas", num_replicas) if world_size is None else ("world_size", world_size)
        # The attributes of a DistributedSampler, for libraries that read them.
        self.dataset = dataset if isinstance(dataset, Sized) else range(as_integer("dataset", dataset, 0))
        self.num_replicas = as_integer(name, _launched(name, "WORLD_SIZE") if size is None else size, 1)
        self.rank = as_integer("rank", _launched("rank", "RANK") if rank is None else rank, 0)
        self.shuffle, self.seed, n_samples = bool(shuffle), as_integer("seed", seed), len(self.dataset)
        if self.rank >= self.num_replicas:
            raise InvalidParameter.of("rank", self.rank, f"in [0, {self.num_replicas}), the range of ranks")
        self._mode = (DROP if drop_last else PAD) if mode is None else mode
        self.drop_last = self._mode == DROP
        if self._mode not in MODES:
            raise InvalidParameter.of("mode", mode, f"one of {list(MODES)}")
        if drop_last and not self.drop_last:
            raise InvalidParameter.of("drop_last", drop_last, f"left out with mode={mode!r}")
        default = "local" if not self.shuffle else "partial:0.1" if balance is None else "global"
        rule = parse_assignment(assignment or default)
        if rule.needs_holders:
            allowed = "'partial:Q', 'global', 'local' or 'chunks:ROWS'"
            raise InvalidParameter.of("assignment", str(rule), allowed, "Coded deliveries are not supported.")
        if rule.moves and not self.shuffle:
            raise InvalidParameter.of("assignment", str(rule), "left out or 'local' with shuffle=False")
        choices = Choices(
            assignment=rule,
            delivery="peer",
            sharding=sharding or ("random" if self.shuffle else "round-robin"),
            balance=None if balance is None else Classes.of("given", balance, n_samples),
            every=every,
            between=between,
            seed=self.seed,
        )
        self._spec = ShuffleSpec(n_samples, self.num_replicas, choices)
        self._planner = OwnPlanner(self._spec, self.rank) if plans_own_parts(self._spec, "peer") else None
        self._drawn: tuple[int, EpochDraw] | None = None  # otherwise all ranks of an epoch
        self._moves: Moves | None = None  # until they are asked for, where that takes time
        self._remainder: Remainder | None = None  # what another number of ranks has left of the epoch
        self._position = Position()
        self._go_to(0)

    def __len__(self) -> int:
        """Number of ids that the next iteration gives."""
        return self._n_items - self._first

    def __repr__(self) -> str:
        rank, rule = f"rank {self.rank} of {self.num_replicas}", self._spec.choices.assignment
        return f"<ExchangeSampler of {len(self.dataset)} samples, {rank}, {rule}, epoch {self.epoch}>"

    @property
    def num_samples(self) -> int:
        """Number of ids of this rank in the current epoch."""
        return self._n_items

    @property
    def total_size(self) -> int:
        """Number of ids of all ranks, if they are equally many."""
        return self._n_items * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The position for :meth:`load_state_dict`: the epoch, and how many of its ids the last iteration has given.

        ``"yielded"`` equals ``"of"`` at the end of an epoch. A ``DataLoader`` with workers asks for ids ahead of
        training: set ``"yielded"`` to the number of ids that were trained on.
        """
        earlier = [] if self._remainder is None else [list(counts) for counts in self._remainder.trained]
        return {**super().state_dict(), "rank": self.rank, "world_size": self.num_replicas, "earlier": earlier}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state. The next iteration gives the ids that are left of its epoch.

        :meth:`set_epoch` with this epoch keeps the position. Nothing is left at the end of an epoch.

        The state may be one of any rank, except with the mode ``"uneven"``: all ranks give equally many ids. If there
        were more or fewer ranks, what they have left of the epoch is divided equally among the present ones. This takes
        time and memory for all samples, O(q).

        Raises
        ------
        InvalidParameter
            If the state is one of another sampler, or of a release that draws other ids.
        """
        epoch, given, n_ids = self._checked(state)
        n_before = as_integer("state['world_size']", state.get("world_size"), 1)
        trained, is_same = tuple(map(tuple, state.get("earlier", ()))), n_before == self.num_replicas
        if not is_same:  # these ranks go on where the earlier ones stopped
            trained = (*trained, (given,) * n_before) if given < n_ids else ()
        self._remainder, self._position = Remainder(epoch, trained) if trained else None, Position(resumed=True)
        if is_same:
            super().load_state_dict(state)
        else:
            self._go_to(epoch)
            self._position.given = 0 if given < n_ids else self._n_items

    def _identity(self) -> dict[str, Any]:
        spec, choices = self._spec, self._spec.choices.to_dict()
        own = {"rank": self.rank, "world_size": self.num_replicas} if self._mode == UNEVEN else {}
        return {
            **own,
            **{name: choices[name] for name in ("assignment", "sharding", "every", "between", "seed")},
            "draw_version": spec.draw_version,
            "n_samples": spec.n_samples,
            "balance_checksum": None if spec.choices.balance is None else spec.choices.balance.checksum,
            "mode": self._mode,
        }

    def _items(self) -> Callable[[int], int]:
        if len(self.dataset) != self._spec.n_samples:
            allowed = f"{self._spec.n_samples}, as before"
            raise InvalidParameter.of("len(dataset)", len(self.dataset), allowed, "Make a new sampler.")
        if self._remainder is not None and not self._position.resumed:  # it was given, and whole epochs follow
            self._go_to(self.epoch)
        order = self._order
        if order is None:
            order = self._held
            if self.shuffle:
                spec, number = self._in_run(self.epoch, self.num_replicas)
                epochs, seed = spec.choices.exchange_epochs, spec.choices.seed
                order = epochs.order(order, seed=seed, epoch=number, rank=self.rank)
        ids: list[int] = order[np.arange(self._n_items) % max(1, len(order))].tolist()  # padded, or without the last
        return ids.__getitem__

    def _go_to(self, epoch: int) -> None:
        """Compute this rank's part of an epoch."""
        self._spec.check_epoch("epoch", epoch)
        remainder = self._remainder if self._position.resumed else None
        self._remainder = remainder = None if remainder is None or remainder.epoch != epoch else remainder
        self._order: Samples | None = None  # of what is left of an epoch
        if remainder is not None:
            self._take_remainder(remainder)
        elif self._planner is not None:
            self._plan(self._planner, epoch)
        else:
            self._draw(epoch)
        self.epoch = epoch
        smallest, largest = self._shares
        self._n_items = {PAD: largest, DROP: smallest}.get(self._mode, len(self._held))

    def _plan(self, planner: OwnPlanner, epoch: int) -> None:
        """Plan an epoch without the other ranks."""
        spec, number = self._in_run(epoch, self.num_replicas)
        if spec.choices.seed != planner.spec.choices.seed:
            self._planner = planner = OwnPlanner(spec, self.rank)
        moves, self._shares = planner.moves(number), planner.shares(number)
        self._held = moves.own
        self._moves = None if epoch and not number else moves

    def _in_run(self, epoch: int, n_ranks: int) -> tuple[ShuffleSpec, int]:
        """The specification of the run of epochs that an epoch belongs to, and the epoch's number in the run.

        A rank follows samples back to the beginning of a run, where all are drawn anew. The first run is that of a
        session with this seed. Only partial exchanges need several runs.
        """
        spec = self._spec if n_ranks == self.num_replicas else self._spec.with_workers(n_ranks)
        if not spec.choices.assignment.moves or spec.slots() is None:
            return spec, epoch
        length = spec.choices.every * max(1, MOST_STEPS * n_ranks // spec.n_samples)
        run, number = divmod(epoch, length)
        if run:
            spec = spec.with_choices(seed=int(random_words(1, "run", self.seed, run)[0]))
        return spec, number

    def _take_remainder(self, remainder: Remainder) -> None:
        """Take this rank's part of the samples that other numbers of ranks have left of an epoch."""
        (begun, *later), n_ranks = remainder.trained, self.num_replicas

        def dealt(left: Samples, n_ranks: int) -> list[Samples]:
            order = EVERY_EPOCH.order(left, seed=self.seed, epoch=remainder.epoch, rank=0)
            return [order[rank::n_ranks] for rank in range(n_ranks)]

        spec, number = self._in_run(remainder.epoch, len(begun))
        left = np.flatnonzero(Remainder(number, (begun,)).left_samples(spec))
        for counts in later:
            parts = [part[count:] for part, count in zip(dealt(left, len(counts)), counts, strict=True)]
            left = np.sort(np.concatenate(parts))
        own = dealt(left, n_ranks)[self.rank]
        self._order = own if own.size else left[:1]
        self._shares, self._held = (len(left) // n_ranks, -(-len(left) // n_ranks)), np.sort(own)
        self._moves, self._drawn = Moves.loading(self._held), None

    def _draw(self, epoch: int) -> None:
        """Draw the ranks of all samples up to an epoch."""
        if self._drawn is None or epoch < self._drawn[0]:
            self._drawn = 0, self._spec.draw_first()
            self._moves = Moves.loading(np.flatnonzero(self._drawn[1].ranks == self.rank))
        reached, drawn = self._drawn
        for number in range(reached + 1, epoch + 1):
            before = drawn
            if self._spec.choices.has_exchange(number):
                drawn = self._spec.draw(before, number)
            self._moves = Moves.between(before.ranks, drawn.ranks, self.rank)
        self._drawn = epoch, drawn
        counts = np.bincount(drawn.ranks, minlength=self.num_replicas)
        self._held, self._shares = self._moved().own, (int(counts.min()), int(counts.max()))

    @property
    def held(self) -> Samples:
        """Ascending int64 ids that this rank has in this epoch, also those that the mode ``"drop"`` leaves out."""
        return self._held

    def _moved(self) -> Moves:
        """What comes and goes for the epoch."""
        if self._moves is None:  # the first epoch of a run after the first one
            before, last = self._in_run(self.epoch - 1, self.num_replicas)
            now, first = self._in_run(self.epoch, self.num_replicas)
            ranks_before, ranks_now = before.ranks_at(last), now.ranks_at(first)
            assert ranks_before is not None
            assert ranks_now is not None
            held = OwnPlanner(before, self.rank).moves(last).own
            self._moves = Moves.of(self.rank, self._held, ranks_before(self._held), held, ranks_now(held))
        return self._moves

    @property
    def arrived(self) -> Samples:
        """Ascending int64 ids that this rank has in this epoch but not in the previous one; all its ids in epoch 0."""
        return self._moved().arriving

    @property
    def sources(self) -> Ranks:
        """Rank that had each sample of :attr:`arrived` in the previous epoch, int32; -1: it comes from the storage."""
        return np.maximum(self._moved().senders, -1)

    @property
    def departed(self) -> Samples:
        """Ascending int64 ids that this rank had in the previous epoch but not in this one."""
        return self._moved().leaving

    @property
    def destinations(self) -> Ranks:
        """Rank that has each sample of :attr:`departed` in this epoch, int32."""
        return self._moved().receivers


def _launched(name: str, variable: str) -> int:
    """The rank or the number of ranks, from ``torch.distributed`` or from the environment."""
    if (group := process_group()) is not None:
        return int(group.get_rank() if variable == "RANK" else group.get_world_size())
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        allowed = f"an integer, as torch.distributed is not initialized and the variable {variable} is not set"
        raise InvalidParameter.of(name, None, allowed)
    return int(text)
