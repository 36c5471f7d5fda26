"""The transport ``bundles``: rows in two hops. A forwarder sorts the bundles of several senders by destination."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dshuffle.exchange.bundles import BundledRows, Bundles, ForwardedRows, Routes, forwarded
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.endpoints import RowSource
from dshuffle.exchange.messages import Items
from dshuffle.exchange.row_transport import RowTransport
from dshuffle.exchange.transport import ItemsInFlows, Transport
from dshuffle.planning import WorkerPart
from dshuffle.planning.delivery.grid import WorkerGrid


@dataclass(frozen=True)
class BundleTransport(RowTransport):
    """Rows in two hops. A subclass with other ``routes`` has other forwarders.

    Attributes
    ----------
    routes
        Number of workers -> the forwarders between them.

    Parameters
    ----------
    bundles
        Rank -> the bundles that it sends.
    """

    name: ClassVar[str] = "bundles"
    forwards: ClassVar[bool] = True
    routes: ClassVar[Callable[[int], Routes]] = WorkerGrid

    bundles: Mapping[int, Bundles] = field(default_factory=dict)

    def for_disk(self, n_free: int) -> Transport:
        """The same exchange: bundles are sorted by destination."""
        return self

    def with_messages(self, rate: float | None) -> Transport:
        """The same exchange with bundles in one message each; with single rows if those are better here."""
        plan, routes = self.plan, self._routes
        if not 0 < plan.most_rows * plan.layout.nbytes <= routes.n_columns * plan.limits.window_bytes:
            # A header does not fit into rows without bytes. Bundles beyond the window are slower than direct messages.
            return RowTransport(plan).with_messages(rate)
        bundles = {
            participant: Bundles.of(part.sends, routes, participant, plan.layout.nbytes)
            for participant, part in plan.parts.items()
            if participant >= 0
        }
        return RowTransport.with_messages(dataclasses.replace(self, bundles=bundles), rate)

    def sent_by(self, participant: int, part: WorkerPart, at_most: int) -> ItemsInFlows:
        """The bundles of a rank."""
        if (bundles := self.bundles.get(participant)) is None:
            return RowTransport.sent_by(self, participant, part, at_most)
        return bundles.items, bundles.flows

    def received_by(self, participant: int, part: WorkerPart) -> Mapping[int, Items]:
        """Forwarder -> the samples that a participant receives from it."""
        return forwarded(part.receives, self._routes, participant)

    def reuses_buffers(self, participant: int) -> bool:
        """Forwarders keep the buffers of bundles."""
        return participant not in self.bundles

    def source(self, rank: int, cache: CachePartition) -> RowSource:
        """Bundles of rows of the cache."""
        return BundledRows(cache, self.bundles[rank])

    def forwarded(self, rank: int) -> ForwardedRows | None:
        """Make what the rank keeps of bundles."""
        return ForwardedRows(self._routes, rank, self.plan.layout)

    @property
    def _routes(self) -> Routes:
        return type(self).routes(self.plan.spec.n_workers)
