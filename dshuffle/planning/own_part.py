"""A worker's part of an epoch, planned by that worker alone.

Where ranks are functions, and caches hold nothing but shares, a worker can find out what it receives and sends without
planning for the others: it looks up where its next samples are now, and where its present samples go. The functions are
in :mod:`dshuffle.planning.assignment.slots` and :mod:`dshuffle.planning.assignment.slots`. Time and memory are
O(q / n). With slots, time also grows with the number of epochs before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.assignment.slots import Blocks, Slots
from dshuffle.planning.delivery import get_delivery
from dshuffle.planning.delivery.storage import STORAGE
from dshuffle.planning.epoch_plan import WorkerPart
from dshuffle.planning.moves import Moves
from dshuffle.planning.shuffle_spec import ShuffleSpec
from dshuffle.planning.types import Samples


def plans_own_parts(spec: ShuffleSpec, delivery: str) -> bool:
    """Whether every worker can plan its own part of each epoch."""
    if spec.has_excess or not get_delivery(delivery).plans_own_parts:
        return False
    first_exchange = spec.choices.every
    return spec.slots() is not None or (spec.blocks(0) is not None and spec.blocks(first_exchange) is not None)


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """A worker's part of an epoch, and the sizes of the smallest and the largest share.

    Parameters
    ----------
    part
        What the worker trains on, receives and sends.
    shares
        Smallest and largest number of samples that a worker trains on.
    """

    part: WorkerPart
    shares: tuple[int, int]

    @property
    def n_received(self) -> int:
        """Samples that the worker receives or reads."""
        return sum(map(len, self.part.receives.values()))

    @property
    def n_sent(self) -> int:
        """Samples that the worker sends."""
        return sum(map(len, self.part.sends.values()))


class OwnPlanner:
    """Plan the parts of one worker, for any epochs; :func:`plans_own_parts` says whether that is possible.

    With ``partial``, the epoch after the last one takes less time than others.

    Parameters
    ----------
    spec, rank
        Specification of the shuffle, and the worker.
    """

    def __init__(self, spec: ShuffleSpec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        self._slots = spec.slots()
        self._in_slots: dict[int, Samples] = {}  # epoch -> samples by slot

    def plan(self, epoch: int, delivery: str) -> OwnPart:
        """Plan an epoch."""
        spec, rank, moves = self.spec, self.rank, self.moves(epoch)
        chosen = STORAGE if epoch == spec.first_epoch else get_delivery(delivery)
        receives, sends = chosen.own_part(moves, spec.n_workers)
        order = spec.choices.exchange_epochs.permutation(moves.own, seed=spec.choices.seed, epoch=epoch, rank=rank)
        part = WorkerPart(rank, epoch, moves.own, order, moves.own, receives, sends)
        return OwnPart(part, self.shares(epoch))

    def moves(self, epoch: int) -> Moves:
        """What comes and goes for an epoch; in the first one everything comes from the store."""
        if epoch == self.spec.first_epoch:
            return Moves.loading(self._own(epoch))
        if not self.spec.choices.has_exchange(epoch):
            return Moves.none(self._own(epoch))
        return self._moves_of_blocks(epoch) if self._slots is None else self._moves_of_slots(self._slots, epoch)

    def shares(self, epoch: int) -> tuple[int, int]:
        """Smallest and largest number of samples that a worker trains on."""
        return self._blocks(epoch).shares if self._slots is None else self._slots.shares

    def _own(self, epoch: int) -> Samples:
        if self._slots is None:
            return self._blocks(epoch).samples_of(self.rank)
        stays = epoch - 1 in self._in_slots and not self.spec.choices.has_exchange(epoch)
        self._in_slots = {epoch: self._samples_in(self._slots, epoch - 1 if stays else epoch)}
        return np.sort(self._in_slots[epoch])

    def _blocks(self, epoch: int) -> Blocks:
        blocks = self.spec.blocks(epoch)
        assert blocks is not None
        return blocks

    def _moves_of_blocks(self, epoch: int) -> Moves:
        before, after = self._blocks(epoch - 1), self._blocks(epoch)
        own, held = after.samples_of(self.rank), before.samples_of(self.rank)
        return Moves.of(self.rank, own, before.ranks_of(own), held, after.ranks_of(held))

    def _moves_of_slots(self, slots: Slots, epoch: int) -> Moves:
        rank, before = self.rank, self._samples_in(slots, epoch - 1)
        exchange, rounds = slots.exchange(epoch), np.arange(slots.last.count)
        own_ranks = np.full(len(rounds), rank)
        emptied = exchange.emptied(own_ranks, rounds)
        sources, destinations = exchange.sources(own_ranks, rounds), exchange.destinations(own_ranks, rounds)
        arriving = slots.samples_at(sources, exchange.emptied(sources, rounds), epoch - 1)
        leaving, after = before[emptied], before.copy()
        after[emptied] = arriving
        self._in_slots = {epoch - 1: before, epoch: after}
        received, sent = _ascending(arriving, sources != rank), _ascending(leaving, destinations != rank)
        senders, receivers = sources[received].astype(np.int32), destinations[sent].astype(np.int32)
        return Moves(np.sort(after), arriving[received], senders, leaving[sent], receivers)

    def _samples_in(self, slots: Slots, epoch: int) -> Samples:
        samples = self._in_slots.get(epoch)
        return slots.samples_of(self.rank, epoch) if samples is None else samples


def _ascending(samples: Samples, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Indices of the chosen samples, in ascending order of the samples."""
    indices = np.flatnonzero(chosen)
    return indices[np.argsort(samples[indices])]
