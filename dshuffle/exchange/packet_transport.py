"""The transport ``packets``: packets that combine rows, from a server through relays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.endpoints import RowSink, RowSource
from dshuffle.exchange.messages import rows_per_message
from dshuffle.exchange.packet_flows import CodedPart, PacketDecoder, PacketStore
from dshuffle.exchange.row_flows import Bring
from dshuffle.exchange.row_transport import RowTransport
from dshuffle.exchange.transport import Flows, ProcessPlan, ServerHolder, Transport
from dshuffle.planning import SERVER, EpochPlan
from dshuffle.planning.delivery.relay import Hops, packets_per_batch, route


@dataclass(frozen=True, kw_only=True)
class PacketTransport(Transport):
    """Packets. Their messages follow from the plan alone.

    Parameters
    ----------
    epoch_plan
        The plan of the epoch.
    hops
        The routes of its packets.
    """

    name: ClassVar[str] = "packets"
    encodes: ClassVar[bool] = True
    readable: ClassVar[bool] = False
    kernels: ClassVar[tuple[str, ...]] = (
        *Transport.kernels,
        "coding",
        "exchange.packet_flows",
        "planning.delivery.relay",
    )

    epoch_plan: EpochPlan
    hops: Hops

    @classmethod
    def of(cls, plan: ProcessPlan) -> Transport:
        """Route the packets, and cut their hops into messages. Without packets of several rows, rows travel alone."""
        assert plan.epoch_plan is not None
        packets, limits, n_workers = plan.epoch_plan.packets, plan.limits, plan.spec.n_workers
        if not packets.coded:
            return RowTransport(plan)
        fitting = rows_per_message(plan.layout.nbytes, limits.window_bytes)
        at_most = packets_per_batch(
            packets.n_packets,
            n_workers,
            plan.layout.nbytes,
            message_bytes=limits.message_bytes,
            window_bytes=limits.window_bytes,
        )
        # At any time at least one message is requested from every other participant (see Inbox), or a few if they fit
        # the window.
        requests = max(n_workers, min(fitting // at_most, 3 * n_workers))
        answers = max(limits.window, min(requests, 2 * n_workers))  # a relay answers two per worker
        hops = route(plan.spec.choices.relay, packets, n_workers, at_most)
        coded = {participant: CodedPart.of(packets, hops, participant, at_most=at_most) for participant in plan.parts}
        sends = {participant: (part.leaving, part.outgoing) for participant, part in coded.items()}
        receives = {participant: (part.arriving, part.incoming) for participant, part in coded.items()}
        flows = Flows(sends, receives, at_most, requests, answers)
        return cls(plan, flows, epoch_plan=plan.epoch_plan, hops=hops)

    def with_messages(self, rate: float | None) -> Transport:
        """The same exchange."""
        return self

    def answered_by(self, participant: int) -> int:
        """Number of messages that a participant sends at once.

        A server answers only a few requests at a time. If it answered all at once, workers with fast connections would
        be done early, and the packets that the others relay would be late.
        """
        return self.plan.limits.window if participant == SERVER else self.messages.answers

    def answered_to_one_by(self, participant: int) -> int | None:
        """An equal part of the server's window, if workers pass on packets while others come.

        They then have something to pass on at about the same time. With other relays it would only add pauses.
        """
        if participant != SERVER or self.plan.spec.choices.relay != "pipelined":
            return None
        return max(1, self.plan.limits.window // self.plan.spec.n_workers)

    def source(self, rank: int, cache: CachePartition) -> RowSource:
        """Packets that the rank passes on."""
        return PacketStore(cache.layout, self.messages.sends[rank][0])

    def served(self, server: ServerHolder) -> RowSource:
        """Packets that the server encodes."""
        return server.encoded(self.epoch_plan.packets, self.messages.sends[SERVER][0])

    def sink(
        self,
        rank: int,
        cache: CachePartition,
        source: RowSource,
        bring: Bring,
    ) -> RowSink:
        """Packets that are decoded into free slots of the cache, and passed on."""
        assert isinstance(source, PacketStore)
        arriving, packets = self.messages.receives[rank][0], self.epoch_plan.packets
        samples = packets.samples[arriving]
        is_kept = self.epoch_plan.ranks[samples] == rank
        return PacketDecoder(
            cache, packets, self.hops.packets, arriving, is_kept, cache.reserve(samples[is_kept]), source
        )
