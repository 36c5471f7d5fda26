"""Measurements, as frozen records: one JSON line each."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTraffic:
    """What reading from a store cost.

    Parameters
    ----------
    requests
        Requests answered by the store (one a chunk, or a part of a chunk where the format allows).
    fetched_bytes
        Bytes that came from the store, as stored (compressed).
    delivered_bytes
        Bytes of rows handed to the caller.
    seconds
        Wall time of the reads; concurrent reads of one call count once.
    retries
        Requests that were sent again, after an error that might pass.
    cache_hits
        Requests that the chunk cache answered instead; they are not among ``requests``.
    """

    requests: int = 0
    fetched_bytes: int = 0
    delivered_bytes: int = 0
    seconds: float = 0.0
    retries: int = 0
    cache_hits: int = 0

    def __add__(self, other: StoreTraffic) -> StoreTraffic:
        return StoreTraffic(
            requests=self.requests + other.requests,
            fetched_bytes=self.fetched_bytes + other.fetched_bytes,
            delivered_bytes=self.delivered_bytes + other.delivered_bytes,
            seconds=self.seconds + other.seconds,
            retries=self.retries + other.retries,
            cache_hits=self.cache_hits + other.cache_hits,
        )

    def __sub__(self, other: StoreTraffic) -> StoreTraffic:
        return StoreTraffic(
            requests=self.requests - other.requests,
            fetched_bytes=self.fetched_bytes - other.fetched_bytes,
            delivered_bytes=self.delivered_bytes - other.delivered_bytes,
            seconds=self.seconds - other.seconds,
            retries=self.retries - other.retries,
            cache_hits=self.cache_hits - other.cache_hits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """What one epoch needed, moved and took.

    Seconds of a phase are those of the slowest worker; phases overlap, so they do not add up to
    ``exchange_seconds``, which is the time from the start of the exchange to the last worker being ready.

    Parameters
    ----------
    epoch, run_id
        Epoch (from 0) and the attempt that was committed.
    assignment, delivery, caching, sharding
        The ways chosen. Epoch 0 is loaded from the store and has the delivery ``"load"``.
    balance
        The labels whose classes were kept in equal parts; ``""`` if none were.
    broadcast_samples
        Samples, of ``n_samples``, that all workers held and trained on, and that no exchange moved.
    n_workers, n_samples, row_nbytes, cache_fraction
        The shape of the job.
    needed
        Samples that some worker had to train on and did not hold.
    packets
        Packets of the plan (samples, if uncoded).
    components
        Samples in all packets: those needed, and a few that only help to decode others.
    coded_load_bytes
        ``packets * row_nbytes``: what the papers count.
    relay
        How packets of several samples travelled; ``""`` if there were none.
    wire_sent_bytes, wire_received_bytes
        Bytes of messages that crossed the network, by rank (rows or packets, and their checksums): the workers' egress,
        without what the server beside a rank sends, and their ingress.
    server_sent_bytes
        Bytes that the server sent: its egress.
    metadata_bytes
        Bytes of messages that are no rows or packets: their checksums. Plans cost none, as every member makes them by
        itself.
    server
        ``""`` without one, ``"dedicated"``, or ``"beside rank K"`` when it serves beside training.
    store_requests, store_bytes, store_delivered_bytes
        Requests, bytes fetched and bytes of rows delivered by the store, over all workers and the server.
    store_retries, store_cache_hits
        Requests that were made again after an error that passed, and those answered from a chunk cache.
    plan_seconds, gather_seconds, transfer_seconds, scatter_seconds, store_seconds, commit_seconds
        Phases of the exchange: making the plan, packing outgoing rows, waiting for messages, unpacking and
        verifying them, reading from the store, swapping.
    encode_seconds, decode_seconds
        Of gathering and scattering, what the server took to encode packets and the slowest worker to decode them.
        Sums over the threads of a process.
    exchange_seconds
        From the start of the exchange to all workers being ready.
    training_seconds
        The longest sum of this epoch's task times on one worker.
    waited_seconds
        How long the pipeline stood still because this epoch's data were not there yet.
    cpu_idle
        Share of the processors' time that was idle during the exchange, in [0, 1], on the participants' busiest host.
        Time that other virtual machines took counts as busy.
    """

    epoch: int
    run_id: int
    assignment: str
    delivery: str
    caching: str
    sharding: str
    n_workers: int
    n_samples: int
    row_nbytes: int
    cache_fraction: float
    needed: int
    packets: int
    components: int
    coded_load_bytes: int
    relay: str
    wire_sent_bytes: tuple[int, ...]
    wire_received_bytes: tuple[int, ...]
    server_sent_bytes: int
    metadata_bytes: int
    server: str
    store_requests: int
    store_bytes: int
    store_delivered_bytes: int
    store_retries: int
    store_cache_hits: int
    plan_seconds: float
    gather_seconds: float
    transfer_seconds: float
    scatter_seconds: float
    encode_seconds: float
    decode_seconds: float
    store_seconds: float
    commit_seconds: float
    exchange_seconds: float
    training_seconds: float
    waited_seconds: float
    cpu_idle: float
    balance: str = ""
    broadcast_samples: int = 0

    @property
    def mean_degree(self) -> float:
        """Samples in a packet, on average; 0 without packets."""
        return self.components / self.packets if self.packets else 0.0

    @property
    def wire_bytes(self) -> int:
        """All bytes of messages that crossed the network in this epoch."""
        return sum(self.wire_received_bytes)

    @property
    def read_amplification(self) -> float | None:
        """Bytes fetched from the store for each byte of rows that was needed of it; None if nothing was read."""
        return self.store_bytes / self.store_delivered_bytes if self.store_delivered_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The record written by :meth:`to_json`."""
        fields = json.loads(line)
        for name in ("wire_sent_bytes", "wire_received_bytes"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
