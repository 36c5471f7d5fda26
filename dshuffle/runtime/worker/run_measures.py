"""What an attempt at an exchange has taken on one worker."""

from __future__ import annotations

import time

from dshuffle.planning import SERVER
from dshuffle.planning.packets import FORWARDER, forwarder_of
from dshuffle.records import Measures
from dshuffle.runtime.processors import ProcessorTimes
from dshuffle.runtime.worker.member_exchange import MemberExchange
from dshuffle.runtime.worker.member_parts import MemberParts

MOST_LINKS = 64
"""With more workers, they do not tell the scheduler what came from whom."""


class RunMeasures:
    """Measures an attempt from now on.

    Parameters
    ----------
    parts
        Parts of the session.
    """

    def __init__(self, parts: MemberParts) -> None:
        self._parts = parts
        self._traffic = parts.dataset.traffic
        self._loaded = parts.reader.sent_bytes, parts.loader.received_bytes  # before
        self._processors = ProcessorTimes.now()
        self._started = time.perf_counter()
        self._cpu_idle = 0.0
        self._watched_seconds = 0.0

    def end(self) -> None:
        """Note that the vote is known: what comes later is not part of the exchange."""
        self._cpu_idle = ProcessorTimes.now().idle_since(self._processors)
        self._watched_seconds = time.perf_counter() - self._started

    def of(self, exchange: MemberExchange, commit_seconds: float, mended_rows: int) -> Measures:
        """What an exchange took, with its commit and the rows that were read again."""
        parts = self._parts
        traffic = parts.dataset.traffic - self._traffic
        sent = {participant: sender.meter for participant, sender in parts.senders.items()}
        meter = None if parts.training is None else parts.training.receiver.meter
        coded = exchange.transport.encodes
        into = [] if parts.training is None else parts.training.meters
        out = [sender.sent_bytes for participant, sender in sent.items() if participant != SERVER]
        read, loaded = parts.reader.sent_bytes - self._loaded[0], parts.loader.received_bytes - self._loaded[1]
        return Measures(
            wire_sent_bytes=(sum(out) + read,) if into else (),
            wire_received_bytes=(sum(receiver.received_bytes for receiver in into) + loaded,) if into else (),
            server_sent_bytes=(sent[SERVER].sent_bytes if SERVER in sent else 0) + (0 if into else read),
            metadata_bytes=sum(sender.sent_checksum_bytes for sender in sent.values()),
            shared_memory_bytes=sum(sender.shared_bytes for sender in sent.values()),
            recovered_rows=mended_rows + (meter.recovered_rows if meter else 0),
            store_requests=traffic.requests,
            store_bytes=traffic.fetched_bytes,
            store_delivered_bytes=traffic.delivered_bytes,
            store_retries=traffic.retries,
            plan_seconds=exchange.seconds,
            gather_seconds=sum(sender.gather_seconds for sender in sent.values()),
            transfer_seconds=meter.transfer_seconds if meter else 0.0,
            scatter_seconds=meter.scatter_seconds if meter else 0.0,
            store_seconds=traffic.seconds,
            commit_seconds=commit_seconds,
            encode_seconds=sent[SERVER].gather_seconds if coded and SERVER in sent else 0.0,
            decode_seconds=meter.scatter_seconds if coded and meter else 0.0,
            watched_seconds=self._watched_seconds,
            cpu_idle=self._cpu_idle,
        )

    def links(self) -> dict[int, tuple[int, float]]:
        """Sender -> bytes that came from it over the network, and seconds in which they came."""
        training = self._parts.training
        if training is None or self._parts.shuffle.n_workers > MOST_LINKS:
            return {}
        links: dict[int, tuple[int, float]] = {}
        for meter in training.meters:
            for participant, link in meter.links.items():
                rank = participant if participant > FORWARDER else forwarder_of(participant)
                nbytes, seconds = links.get(rank, (0, 0.0))  # bundles and rows may come from the same worker
                links[rank] = nbytes + link.nbytes, seconds + link.ended - link.begun
        return links
