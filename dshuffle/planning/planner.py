"""Plans of all epochs, and how much memory they take."""

from __future__ import annotations

import dataclasses

from dshuffle.errors import PlanError
from dshuffle.planning.assignment import EpochDraw
from dshuffle.planning.assignment.initial import GivenSharding
from dshuffle.planning.delivery import get_delivery, plan_delivery
from dshuffle.planning.epoch_plan import EpochPlan, Packets, check_plan, loading, missing_samples
from dshuffle.planning.own_part import plans_own_parts
from dshuffle.planning.randomness import random_words
from dshuffle.planning.shuffle_spec import ShuffleSpec
from dshuffle.planning.types import Holders

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
    """Make the plans of a shuffle, epoch by epoch.

    Planners with the same specification make the same plans.

    Parameters
    ----------
    checks
        Whether to check every plan. If several processes make the same plan (see :meth:`EpochPlan.digest`), it is
        enough that one of them checks it.
    """

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
        """Plan the first epoch: every worker reads its share and its excess from the store, in ascending order.

        If ranks depend on earlier epochs of the same workers, these are drawn first.
        """
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
