"""The plans of one session on one worker, made in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dshuffle.exchange.transport import MessageLimits
from dshuffle.planning import EpochPlanner, ShuffleSpec
from dshuffle.planning.own_part import OwnPlanner, plans_own_parts
from dshuffle.rows import RowLayout
from dshuffle.runtime.worker.member_exchange import MemberExchange


class Plans:
    """Plans of coming epochs. Each is made once, even if its exchange is retried.

    Parameters
    ----------
    planner
        Plans the session.
    layout, limits
        Layout of a row, and limits of messages.
    participants
        All participants of this process.
    """

    def __init__(
        self,
        planner: OwnPlanner | EpochPlanner,
        layout: RowLayout,
        limits: MessageLimits,
        participants: Sequence[int],
    ) -> None:
        self._planner = planner
        self._layout = layout
        self._limits = limits
        self._participants = participants
        self._loop = asyncio.get_running_loop()
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="dshuffle-plan")
        self._plans: dict[tuple[int, str], asyncio.Future[MemberExchange]] = {}

    def plan(self, epoch: int, delivery: str) -> asyncio.Future[MemberExchange]:
        """The plan of an epoch. If planning failed, another call tries again."""
        plan = self._plans.get((epoch, delivery))
        if plan is None or (plan.done() and plan.exception() is not None):
            plan = self._loop.run_in_executor(self.executor, self._make, epoch, delivery)
            self._plans[epoch, delivery] = plan
        return plan

    def restoring(self, epoch: int, rank: int) -> asyncio.Future[MemberExchange]:
        """A plan to read all that a rank holds in an epoch from the store."""
        return self._loop.run_in_executor(
            self.executor, MemberExchange.restoring, self._planner, epoch, rank, self._layout, self._limits
        )

    def forget(self, epoch: int) -> None:
        """Drop the plans of an epoch and of those before."""
        self._plans = {of: plan for of, plan in self._plans.items() if of[0] > epoch}

    def close(self) -> None:
        """Cancel all plans that have not been made."""
        for plan in self._plans.values():
            plan.cancel()
        self._plans.clear()
        self.executor.shutdown(wait=False, cancel_futures=True)

    def _make(self, epoch: int, delivery: str) -> MemberExchange:
        planner = self._planner
        if isinstance(planner, OwnPlanner):
            return MemberExchange.alone(planner, epoch, self._layout, self._limits, delivery)
        return MemberExchange.make(planner, epoch, self._participants, self._layout, self._limits, delivery)


def planner_of(shuffle: ShuffleSpec, deliveries: Sequence[str], rank: int | None) -> OwnPlanner | EpochPlanner:
    """The planner of a worker with a rank, or of one that only serves (None)."""
    if rank is not None and all(plans_own_parts(shuffle, delivery) for delivery in deliveries):
        return OwnPlanner(shuffle, rank)
    # All members compare digests of their plans, so one check is enough.
    return EpochPlanner(shuffle, checks=rank == 0)
