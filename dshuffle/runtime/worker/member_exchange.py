"""The plan of an epoch as one worker process uses it: what it receives and sends, and in which messages."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import PlanError
from dshuffle.exchange.messages import Flow
from dshuffle.exchange.row_transport import RowTransport
from dshuffle.exchange.transport import MessageLimits, ProcessPlan, Transport
from dshuffle.exchange.transports import transport_of
from dshuffle.planning import STORE, EpochPlanner, WorkerPart
from dshuffle.planning.bijection import DRAW_VERSION
from dshuffle.planning.own_part import OwnPlanner
from dshuffle.rows import RowLayout


@dataclass(frozen=True, slots=True)
class MemberExchange:
    """The parts of an epoch's plan that concern this process, and a summary of the plan.

    Parameters
    ----------
    transport
        What the participants of this process send and receive, and how.
    summary
        Values that participants report in their votes. The digest must be the same for all of them.
    seconds
        Duration of planning.
    shares
        Smallest and largest number of samples that a worker trains on.
    broadcast
        The samples that all workers train on.
    """

    transport: Transport
    summary: dict[str, int]
    seconds: float
    shares: tuple[int, int]
    broadcast: NDArray[np.int64]

    @classmethod
    def alone(
        cls, planner: OwnPlanner, epoch: int, layout: RowLayout, limits: MessageLimits, delivery: str
    ) -> MemberExchange:
        """Plan this rank's part of an epoch, and nothing else."""
        started = time.perf_counter()
        spec, own = planner.spec, planner.plan(epoch, delivery)
        rank = planner.rank
        expected = own.n_received
        summary = {
            "packets": expected,
            "needed": expected,
            "expected": expected,
            "arriving": expected - len(own.part.receives.get(STORE, ())),
            "leaving": own.n_sent,
            "digest": zlib.crc32(f"{DRAW_VERSION} {spec.n_samples} {spec.history} {spec.choices} {epoch}".encode()),
        }
        seconds = time.perf_counter() - started
        plan = ProcessPlan(spec, {rank: own.part}, None, own.shares[1], layout, limits)
        return cls(_transport(plan, epoch, delivery), summary, seconds, own.shares, own.part.own[:0])

    @classmethod
    def restoring(
        cls, planner: OwnPlanner | EpochPlanner, epoch: int, rank: int, layout: RowLayout, limits: MessageLimits
    ) -> MemberExchange:
        """Plan to read all that a rank holds in an epoch from the store."""
        if isinstance(planner, OwnPlanner):
            spec = dataclasses.replace(planner.spec, first_epoch=epoch)
            return cls.alone(OwnPlanner(spec, rank), epoch, layout, limits, spec.choices.delivery)
        started = time.perf_counter()
        made = planner.load(epoch)
        plan = ProcessPlan(planner.spec, {rank: made.for_worker(rank)}, made, made.shares[1], layout, limits)
        seconds = time.perf_counter() - started
        return cls(RowTransport(plan), {}, seconds, made.shares, made.broadcast)

    @classmethod
    def make(
        cls,
        planner: EpochPlanner,
        epoch: int,
        participants: Sequence[int],
        layout: RowLayout,
        limits: MessageLimits,
        delivery: str,
    ) -> MemberExchange:
        """Plan the given epoch: the planner's next one, or one that it has just planned."""
        started = time.perf_counter()
        made = planner.current or planner.load()
        if made.epoch < epoch:
            made = planner.advance(delivery)
        elif epoch > planner.spec.first_epoch:  # an earlier call planned this epoch, perhaps for another delivery
            made = planner.again(epoch, delivery)
        if made.epoch != epoch:
            raise PlanError(f"epoch {epoch} was to be planned, but the planner is at epoch {made.epoch}")
        packets = made.packets
        parts = {participant: made.for_worker(participant) for participant in participants}
        plan = ProcessPlan(planner.spec, parts, made, made.shares[1], layout, limits)
        transport = _transport(plan, epoch, delivery)
        summary = {
            "packets": packets.n_packets,
            "needed": made.n_needed,
            "expected": packets.n_components,
            "digest": made.digest(),
        }
        return cls(transport, summary, time.perf_counter() - started, made.shares, made.broadcast)

    @property
    def parts(self) -> Mapping[int, WorkerPart]:
        """Participant of this process -> its part of the plan."""
        return self.transport.plan.parts

    def for_disk(self, n_free: int) -> MemberExchange:
        """The same exchange with rows in the order in which disks read them (:mod:`dshuffle.planning.disk_order`).

        ``n_free`` is the number of free slots of this worker.
        """
        return dataclasses.replace(self, transport=self.transport.for_disk(n_free))

    def with_messages(self, rate: float | None) -> MemberExchange:
        """The same exchange with its rows cut into messages, for links of a rate (bytes per second into a worker)."""
        return dataclasses.replace(self, transport=self.transport.with_messages(rate))

    def outgoing(self, participant: int) -> dict[int, Flow]:
        """Flows that a participant of this process sends, by destination."""
        return self.transport.messages.sends[participant][1]

    def incoming(self, rank: int) -> dict[int, Flow]:
        """Flows that the rank of this process receives, by sender."""
        return self.transport.messages.receives[rank][1]


def _transport(plan: ProcessPlan, epoch: int, delivery: str) -> Transport:
    """The transport of an epoch. All workers agree on it."""
    moves = epoch > plan.spec.first_epoch and plan.spec.choices.has_exchange(epoch)
    return (transport_of(delivery) if moves else RowTransport).of(plan)
