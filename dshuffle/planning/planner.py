"""Plans of all epochs: by a worker for itself alone, or for all workers."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import PlanError
from dshuffle.planning.assignment import EpochDraw
from dshuffle.planning.assignment.initial import GivenSharding
from dshuffle.planning.assignment.slots import Blocks, Slots
from dshuffle.planning.delivery import get_delivery, plan_delivery
from dshuffle.planning.epoch_plan import (
    STORE,
    EpochPlan,
    Moves,
    Packets,
    WorkerPart,
    check_plan,
    loading,
    missing_samples,
    split_by_worker,
)
from dshuffle.planning.randomness import random_words
from dshuffle.planning.shuffle_spec import ShuffleSpec
from dshuffle.planning.types import Holders, Samples


def plans_own_parts(spec: ShuffleSpec, delivery: str) -> bool:
    """Whether every worker can plan its own part of each epoch."""
    if spec.has_excess or not get_delivery(delivery).plans_own_parts:
        return False
    first_exchange = spec.choices.every
    return spec.slots() is not None or (spec.blocks(0) is not None and spec.blocks(first_exchange) is not None)


class OwnPlanner:
    """Plan the parts of one worker, for any epochs; :func:`plans_own_parts` says whether that is possible."""

    # With ``partial``, the epoch after the last one takes less time than others.
    # spec, rank: specification of the shuffle, and the worker.

    def __init__(self, spec: ShuffleSpec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        self._slots = spec.slots()
        self._in_slots: dict[int, Samples] = {}  # epoch -> samples by slot

    def plan(self, epoch: int, delivery: str) -> WorkerPart:
        """Plan an epoch."""
        spec, rank, moves = self.spec, self.rank, self.moves(epoch)
        if epoch == spec.first_epoch or get_delivery(delivery).reads_store:
            receives, sends = ({STORE: moves.arriving} if len(moves.arriving) else {}), dict[int, Samples]()
        else:
            receives = split_by_worker(moves.arriving, moves.senders, spec.n_workers)
            sends = split_by_worker(moves.leaving, moves.receivers, spec.n_workers)
        order = spec.choices.exchange_epochs.permutation(moves.own, seed=spec.choices.seed, epoch=epoch, rank=rank)
        return WorkerPart(rank, epoch, moves.own, order, moves.own, receives, sends)

    def shares(self, epoch: int) -> tuple[int, int]:
        """Smallest and largest number of samples that a worker trains on."""
        return self._blocks(epoch).shares if self._slots is None else self._slots.shares

    def moves(self, epoch: int) -> Moves:
        """What comes and goes for an epoch; in the first one everything comes from the store."""
        if epoch == self.spec.first_epoch:
            return Moves.loading(self._own(epoch))
        if not self.spec.choices.has_exchange(epoch):
            return Moves.none(self._own(epoch))
        return self._moves_of_blocks(epoch) if self._slots is None else self._moves_of_slots(self._slots, epoch)

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
        exchange, rounds = slots.exchange(slots.last, epoch), np.arange(slots.last.count)
        own_ranks = np.full(len(rounds), rank)
        emptied = exchange.emptied(own_ranks, rounds)
        sources, destinations = (exchange.shifted(own_ranks, rounds, sign) for sign in (-1, 1))
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


OWN_NBYTES = 90
"""Bytes for each sample of a share that a worker plans alone."""

ALL_NBYTES = 110
"""Bytes for each sample of a plan for all workers, measured as a peak."""

HELD_NBYTES = 25
"""Bytes for each copy of a sample that such a plan loads first if workers hold excess, measured as a peak."""


def plan_nbytes(spec: ShuffleSpec) -> int:
    """Bytes that planning takes at most on every worker, and on the server."""
    if plans_own_parts(spec, spec.choices.delivery):
        return OWN_NBYTES * spec.largest_share
    held = spec.capacity * spec.n_workers if spec.has_excess else 0
    masks = 8 * ((spec.n_workers - 1) // 64)  # beyond the first word of the holder masks
    return (ALL_NBYTES + masks) * spec.n_samples + HELD_NBYTES * held


class EpochPlanner:
    """Make the plans of a shuffle, epoch by epoch."""

    # Planners with the same specification make the same plans.
    # checks: whether to check every plan. If several processes make the same plan (see :meth:`EpochPlan.digest`), it is
    # enough that one of them checks it.

    def __init__(self, spec: ShuffleSpec, *, checks: bool = True) -> None:
        self.spec = spec
        self.checks = checks
        self.current: EpochPlan | None = None
        # Broadcast samples never move, so the other samples are planned alone.
        self._dealt = spec.of_dealt()
        self._last: EpochPlan | None = None
        self._drawn: EpochDraw | None = None
        # Epochs whose server may fail, so that they are planned again: who held what before, what was drawn, the plan.
        self._served: dict[int, tuple[Holders, EpochDraw, EpochPlan]] = {}
        self._policy = self._dealt.policy()

    def load(self, epoch: int | None = None) -> EpochPlan:
        """Plan the first epoch: every worker reads its share and its excess from the store, in ascending order."""
        # If ranks depend on earlier epochs of the same workers, these are drawn first.
        spec, first, assignment = self._dealt, self._dealt.first_epoch, self._dealt.choices.assignment
        exchanges = spec.choices.exchange_epochs
        draw = spec.draw_first()
        if exchanges.last(first) and assignment.forgets:
            draw = spec.draw(draw, exchanges.last(first))
        holders = self._policy.first(draw.ranks)
        if assignment.moves and not assignment.forgets:
            for earlier in exchanges.after(spec.history.epoch, first):
                draw = spec.draw(draw, earlier, holders)
                holders = self._policy.evolve(holders, draw.ranks, earlier)
        epoch = first if epoch is None else epoch
        if assignment.moves or spec.has_excess:
            for later in exchanges.after(first, epoch):
                draw = spec.draw(draw, later, holders)
                holders = self._policy.evolve(holders, draw.ranks, later)
        packets = loading(holders, spec.n_workers)
        plan = EpochPlan(
            epoch, spec.choices.seed, spec.n_workers, draw.ranks, holders, packets, spec.n_samples, epochs=exchanges
        )
        return self._found(plan, draw, loads=True)

    def advance(self, delivery: str | None = None) -> EpochPlan:
        """Plan the next epoch: the exchange from the current partitions to the next assignment."""
        spec, last, before = self._dealt, self._last, self._drawn
        choices = spec.choices
        if last is None or before is None:
            raise PlanError("advance() was called before load(). Call load() first.")
        epoch = last.epoch + 1
        exchanges = choices.exchange_epochs
        if not exchanges.has_exchange(epoch) or (not choices.assignment.moves and not spec.has_excess):
            # Only the order changes, and planning would take cores from the training that it goes on beside.
            same = dataclasses.replace(last, epoch=epoch, packets=Packets.uncoded([], [], []), n_needed=0)
            return self._found(same, before)
        draw = spec.draw(before, epoch, last.holders)
        name = delivery or choices.delivery
        packets = self._packets(epoch, last.holders, draw, name)
        holders = self._policy.evolve(last.holders, draw.ranks, epoch)
        n_needed = len(missing_samples(last.holders, draw.ranks))
        plan = EpochPlan(epoch, choices.seed, spec.n_workers, draw.ranks, holders, packets, n_needed, epochs=exchanges)
        self._served = {number: served for number, served in self._served.items() if number == epoch - 1}
        if get_delivery(name).without_server != name:
            self._served[epoch] = last.holders, draw, plan
        return self._found(plan, draw)

    def again(self, epoch: int, delivery: str | None = None) -> EpochPlan:
        """The plan of the current epoch. It may have another delivery if that of the first plan needs a server."""
        if epoch in self._served:
            before, draw, plan = self._served[epoch]
            # Not the holders: a policy may remember which epochs it has seen.
            packets = self._packets(epoch, before, draw, delivery or self.spec.choices.delivery)
            return self._with_broadcast(dataclasses.replace(plan, packets=packets))
        if self.current is None or self.current.epoch != epoch:
            raise PlanError(f"epoch {epoch} cannot be planned again: it is not the current one")
        return self.current

    def _packets(self, epoch: int, before: Holders, draw: EpochDraw, delivery: str) -> Packets:
        spec, n = self._dealt, self._dealt.n_workers
        seed = int(random_words(1, "delivery", spec.choices.seed, epoch)[0])
        packets = plan_delivery(
            delivery, before, draw.ranks, n, seed=seed, start=draw.packets, hosts=spec.hosts, weights=spec.weights
        )
        if self.checks:
            check_plan(packets, before, draw.ranks, n, capacity=spec.capacity)
        return packets

    def _found(self, plan: EpochPlan, draw: EpochDraw, *, loads: bool = False) -> EpochPlan:
        self._last, self._drawn = plan, draw
        self.current = self._with_broadcast(plan, loads=loads)
        return self.current

    def _with_broadcast(self, plan: EpochPlan, *, loads: bool = False) -> EpochPlan:
        sharding = self.spec.choices.sharding
        if isinstance(sharding, GivenSharding) and sharding.broadcast is not None and len(sharding.broadcast):
            return plan.with_broadcast(sharding.broadcast, sharding.others(), loads=loads)
        return plan
