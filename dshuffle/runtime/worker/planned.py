"""An epoch's plan as one worker process needs it: what comes in, what goes out, and in which messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.endpoints import RowSink, RowSource
from dshuffle.exchange.messages import MIB, Flow, flows_of_samples, rows_per_message
from dshuffle.exchange.packet_flows import CodedPart, PacketDecoder, PacketStore
from dshuffle.exchange.row_flows import ArrivingRows, LeavingRows
from dshuffle.planning import SERVER, STORE, EpochPlan, EpochPlanner, Hops, WorkerPlan, packets_per_batch, route
from dshuffle.rows import RowLayout
from dshuffle.runtime.session_spec import Settings
from dshuffle.runtime.worker.server_rows import EncodedPackets, ServerRows

SHORT_MESSAGE_BYTES = 2 * MIB
"""Of shorter messages no more are asked for at once than of full ones: TCP does not find its rate within them, so many
together overflow a link's queue, and what is lost waits for a timer (7 of 0.2 MB took 15 % longer than 4)."""

Listed = tuple[NDArray[np.int64], dict[int, Flow]]
ReadStore = Callable[[NDArray[np.int64], NDArray[np.int64]], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """The parts of an epoch's plan that concern this process, and what to say of the whole.

    Parameters
    ----------
    plan, hops
        The plan, and how its packets travel if it is coded.
    parts
        Participant of this process -> its part.
    sends, receives
        Participant of this process -> the items that it sends and receives, and the flows that they make. The items are
        samples; of a coded plan packets that are sent, and components that are received.
    at_most, asked, answered
        Items in a message, and messages that a participant has asked for, and is answering, at once: at most. (A
        server of packets answers fewer.)
    summary
        What all participants must agree on, and what they are to report.
    seconds
        What planning took.
    """

    plan: EpochPlan
    hops: Hops | None
    parts: dict[int, WorkerPlan]
    sends: dict[int, Listed]
    receives: dict[int, Listed]
    at_most: int
    asked: int
    answered: int
    summary: dict[str, int]
    seconds: float

    @classmethod
    def make(
        cls,
        planner: EpochPlanner,
        epoch: int,
        participants: Sequence[int],
        layout: RowLayout,
        settings: Settings,
        delivery: str,
    ) -> Planned:
        """Plan an epoch: the planner's next one, or the one that it has planned already."""
        started = time.perf_counter()
        made = planner.current or planner.load()
        if made.epoch < epoch:  # else what came after planning failed the last time
            made = planner.advance(delivery)
        plan = made.plan
        hops = None
        n_workers = planner.spec.n_workers
        at_most = rows_per_message(layout.nbytes, settings.message_bytes)
        fitting = rows_per_message(layout.nbytes, settings.window_bytes)
        if plan.coded:
            at_most = packets_per_batch(
                plan.n_packets,
                n_workers,
                layout.nbytes,
                message_bytes=settings.message_bytes,
                window_bytes=settings.window_bytes,
            )
            # Every other participant is asked for one message at least at any time (see Inbox), and for a few if
            # that fits the window.
            asked = max(n_workers, min(fitting // at_most, 3 * n_workers))
            answered = max(settings.window, min(asked, 2 * n_workers))  # a relay has two for each
            hops = route(planner.spec.relay, plan, n_workers, at_most)
        summary = {
            "packets": plan.n_packets,
            "coded": plan.coded,
            "needed": made.n_needed,
            "expected": plan.n_components,
            "digest": made.digest(),
        }
        parts = {who: made.for_worker(who) for who in participants}
        sends: dict[int, Listed] = {}
        receives: dict[int, Listed] = {}
        for who, part in parts.items():
            if hops is None:
                sends[who] = flows_of_samples(part.sends, at_most=at_most)
                receives[who] = flows_of_samples(part.receives, at_most=at_most, whole=STORE)
            else:
                coded = CodedPart.of(plan, hops, who, at_most=at_most)
                sends[who] = coded.leaving, coded.outgoing
                receives[who] = coded.arriving, coded.incoming
        if hops is None:  # as many messages as fit the window
            longest = _longest(receives)
            short = longest * layout.nbytes < SHORT_MESSAGE_BYTES
            asked = settings.window if short else max(1, fitting // longest)
            answered = max(1, fitting // _longest(sends))
        seconds = time.perf_counter() - started
        return cls(made, hops, parts, sends, receives, at_most, asked, answered, summary, seconds)

    def answered_by(self, who: int, settings: Settings) -> int:
        """Messages that a participant has under way to others at once.

        A server of packets answers a few, in the order in which it was asked: were it to answer all, those whose
        connections happen to be fast would be done early, and what the others relay would come late.
        """
        return settings.window if who == SERVER and self.hops is not None else self.answered

    def outgoing(self, who: int) -> dict[int, Flow]:
        """The flows that a participant of this process sends, by destination."""
        return self.sends[who][1]

    def incoming(self, rank: int) -> dict[int, Flow]:
        """The flows that the rank of this process receives, by sender."""
        return self.receives[rank][1]

    def source(self, who: int, holder: CachePartition | ServerRows) -> RowSource:
        """Where the items of a participant's flows come from."""
        leaving = self.sends[who][0]
        if self.hops is None:
            return LeavingRows(holder, leaving)
        if isinstance(holder, ServerRows):
            return EncodedPackets(holder, self.plan.plan, leaving)
        return PacketStore(holder.layout, leaving)

    def sink(self, rank: int, cache: CachePartition, source: RowSource, read_store: ReadStore) -> RowSink:
        """Where the items of the rank's flows go; ``source`` is what it sends from."""
        arriving, plan = self.receives[rank][0], self.plan.plan
        if self.hops is None:
            return ArrivingRows(cache, arriving, cache.reserve(arriving), read_store)
        assert isinstance(source, PacketStore)
        samples = plan.samples[arriving]
        wanted = self.plan.assignment[samples] == rank
        return PacketDecoder(cache, plan, self.hops.packets, arriving, wanted, cache.reserve(samples[wanted]), source)


def _longest(lists: Mapping[int, Listed]) -> int:
    return max([1, *(flow.longest for _, flows in lists.values() for flow in flows.values())])
