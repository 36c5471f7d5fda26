"""The transport ``rows``: single rows, straight from their sender to their destination."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.endpoints import RowSink, RowSource
from dshuffle.exchange.messages import MIB, Items, flows_of_samples, rows_per_message
from dshuffle.exchange.row_flows import ArrivingRows, Bring, LeavingRows
from dshuffle.exchange.transport import (
    Flows,
    ItemsInFlows,
    ServerHolder,
    Transport,
)
from dshuffle.planning import SERVER, STORE, WorkerPart
from dshuffle.planning.disk_order import in_disk_order
from dshuffle.planning.pacing import Pacing

UNACKNOWLEDGED_BYTES = MIB // 4
"""Messages up to this length are not acknowledged. An acknowledgement costs nearly as much as a short message."""

SHORT_ROW = 16 * 2**10
"""Rows on a disk up to this length move to the order of the next epoch. Random reads of longer ones are fast."""


@dataclass(frozen=True)
class RowTransport(Transport):
    """Single rows. They are cut into messages only when the exchange begins, and the rates of links are known."""

    name: ClassVar[str] = "rows"

    def for_disk(self, n_free: int) -> Transport:
        """The same exchange with rows in the order in which disks read them (:mod:`dshuffle.planning.disk_order`)."""
        plan = self.plan
        seed, first = plan.spec.choices.seed, plan.spec.first_epoch
        short = plan.layout.nbytes <= SHORT_ROW

        def stored(epoch: int) -> int | None:
            last = plan.spec.choices.exchange_epochs.last(epoch - 1)
            return last if last > first else None

        parts = {
            participant: in_disk_order(
                part, seed=seed, stored=stored(part.epoch), moves_within=short and len(part.own) <= n_free
            )
            for participant, part in plan.parts.items()
            if participant >= 0
        }
        return dataclasses.replace(self, plan=dataclasses.replace(plan, parts={**plan.parts, **parts}))

    def with_messages(self, rate: float | None) -> Transport:
        """The same exchange with its rows cut into messages."""
        parts, limits, nbytes = self.plan.parts, self.plan.limits, self.plan.layout.nbytes
        pacing = Pacing.of(rate, message_bytes=limits.message_bytes, window_bytes=limits.window_bytes)
        served = any(SERVER in part.receives for part in parts.values()) or (
            SERVER in parts and bool(parts[SERVER].sends)
        )
        if served:  # one long message for each worker in turn, so that all move through the dataset together
            pacing = Pacing(limits.message_bytes, limits.window_bytes)
        at_most = rows_per_message(nbytes, pacing.message_nbytes)
        sends = {participant: self.sent_by(participant, part, at_most) for participant, part in parts.items()}
        receives = {
            participant: flows_of_samples(self.received_by(participant, part), at_most=at_most)
            for participant, part in parts.items()
        }
        leaving = _longest(sends) * nbytes
        answers = max(1, limits.window_bytes // max(1, leaving))
        requests = pacing.asked(_longest(receives) * nbytes)
        # Nothing but the requests limits what unacknowledged messages take, so all of them together must fit the
        # window.
        total = sum(len(items) for items, _ in sends.values()) * nbytes
        acknowledged = served or leaving > UNACKNOWLEDGED_BYTES or total > limits.window_bytes
        fitting = max(1, limits.window_bytes // (at_most * max(1, nbytes)))
        return self._cut(Flows(sends, receives, at_most, requests, answers, acknowledged, answers, fitting))

    def sent_by(self, participant: int, part: WorkerPart, at_most: int) -> ItemsInFlows:
        """The samples that a participant sends, in messages of at most ``at_most`` rows."""
        return flows_of_samples(part.sends, at_most=at_most)

    def received_by(self, participant: int, part: WorkerPart) -> Mapping[int, Items]:
        """Sender -> the samples that a participant receives from it."""
        return part.receives

    def source(self, rank: int, cache: CachePartition) -> RowSource:
        """Rows of the cache."""
        return LeavingRows(cache, self.messages.sends[rank][0])

    def served(self, server: ServerHolder) -> RowSource:
        """Rows of the dataset."""
        return LeavingRows(server, self.messages.sends[SERVER][0])

    def sink(
        self,
        rank: int,
        cache: CachePartition,
        source: RowSource,
        bring: Bring,
    ) -> RowSink:
        """Rows that go to free slots of the cache."""
        arriving, part = self.messages.receives[rank][0], self.plan.parts[rank]
        # A disk reads rows faster in the order of their slots. Rows from the store keep its order instead: they are
        # written through the memory map, and pages beside each other share faults.
        sorts = cache.on_disk and STORE not in part.receives
        positions = part.positions_of(arriving) if sorts else None
        return ArrivingRows(cache, arriving, cache.reserve(arriving, positions), bring)

    def _cut(self, flows: Flows) -> Self:
        return dataclasses.replace(self, flows=flows)


def _longest(lists: Mapping[int, ItemsInFlows]) -> int:
    return max([1, *(flow.longest for _, flows in lists.values() for flow in flows.values())])
