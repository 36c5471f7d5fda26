"""``storage``: every worker reads the samples that it lacks from the store."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dshuffle.planning.delivery.definition import Delivery, Demand, Loads, PartsByWorker, PlanInput
from dshuffle.planning.epoch_plan import STORE, Packets
from dshuffle.planning.moves import Moves
from dshuffle.planning.types import Amounts


def plan_storage(plan_input: PlanInput) -> Packets:
    """Plan one packet from the store for every needed sample, by ascending sample.

    A worker receives the samples of one chunk one after the other, so it fetches the chunk once.
    """
    samples = plan_input.missing_samples()
    return Packets.uncoded(samples, plan_input.destinations[samples], np.full(len(samples), STORE))


class RowsFromStore(Delivery):
    """Deliveries of single rows that workers read from the dataset again."""

    name = "storage"
    plan = staticmethod(plan_storage)
    reads_store: ClassVar[bool] = True
    plans_own_parts: ClassVar[bool] = True

    def connections(self, n_workers: int) -> int:
        """Nobody sends anything to anybody."""
        return 0

    def own_part(self, moves: Moves, n_workers: int) -> tuple[PartsByWorker, PartsByWorker]:
        """Receive all from the store, and send nothing."""
        return ({STORE: moves.arriving} if len(moves.arriving) else {}), {}

    def counted_loads(self, demand: Demand, plan: Packets) -> Loads:
        """Count the chunks in the plan. For single samples of a larger job, estimate them."""
        received = np.bincount(plan.destinations, minlength=demand.n_workers) * demand.growth
        hits, read = _chunks(demand, plan)
        if demand.n_planned < demand.n_samples and not demand.in_chunks:
            q, c = demand.n_samples, min(demand.chunk_rows, demand.n_samples)
            hits = np.array([chunks_hit(q, c, rows) for rows in received.tolist()])
            read = hits * c * demand.row_nbytes
        return dataclasses.replace(
            demand.no_loads(packets=plan.n_packets * demand.growth),
            requests=hits,
            read=read,
            needed_nbytes=float(received.sum()) * demand.row_nbytes,
        )

    def pair_count(self, n_workers: int, relay: str) -> int:
        """No rows come from other participants."""
        return 0

    def message_count(self, loads: Loads, row_nbytes: int, relay: str, rate: float) -> float:
        """No rows come from other participants."""
        return 0.0


def chunks_hit(n_samples: int, chunk_rows: int, n_rows: float) -> float:
    """Expected number of distinct chunks that contain ``n_rows`` samples drawn at random without replacement.

    A chunk of c samples contains none of r samples out of q with probability of about ``(1 - r / q) ** c``.
    """
    part = n_rows / n_samples
    chunks = n_samples / chunk_rows if n_samples > chunk_rows else 1.0
    return float(chunks * -np.expm1(chunk_rows * np.log1p(-part))) if part < 1 else float(chunks)


def _chunks(demand: Demand, plan: Packets) -> tuple[Amounts, Amounts]:
    """Count the chunks and the bytes that each worker reads, in the job; a worker reads each chunk once."""
    c, n, q = demand.chunk_rows, demand.n_workers, demand.n_planned
    n_chunks = -(-q // c)
    hit = np.unique(plan.destinations.astype(np.int64) * n_chunks + plan.samples // c)
    lengths = np.where(hit % n_chunks == n_chunks - 1, q - (n_chunks - 1) * c, c)
    rows = np.bincount(hit // n_chunks, lengths, minlength=n)
    hits = np.bincount(hit // n_chunks, minlength=n).astype(np.float64)
    return hits * demand.growth, rows * (demand.growth * demand.row_nbytes)


STORAGE = RowsFromStore()
