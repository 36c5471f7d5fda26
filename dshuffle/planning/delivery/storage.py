"""``storage``: every worker reads the samples that it lacks from the store."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

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

    def expected_loads(self, demand: Demand) -> Loads:
        """Nothing but reads."""
        read = storage_loads(demand, demand.shares)
        return dataclasses.replace(demand.no_loads(exact=False, packets=demand.needed), **read)

    def counted_loads(self, demand: Demand, plan: Packets, n_planned: int) -> Loads:
        """Count the chunks in the plan, if it has all samples."""
        growth = demand.growth(n_planned)
        received = np.bincount(plan.destinations, minlength=demand.n_workers).astype(np.float64)
        read = storage_loads(demand, received * growth)
        if n_planned == demand.n_samples:
            read |= _chunks(demand, plan)
        return dataclasses.replace(demand.no_loads(exact=True, packets=plan.n_packets * growth), **read)

    def pair_count(self, n_workers: int, relay: str) -> int:
        """No rows come from other participants."""
        return 0

    def message_count(self, loads: Loads, row_nbytes: int, relay: str, rate: float) -> float:
        """No rows come from other participants."""
        return 0.0

    def headline(self, way: str, pace: str) -> str:
        """The sentence that recommends it, at a pace such as ``"2 s per epoch"``."""
        return f"Re-read from storage: {way} takes {pace}."

    def explain_ingress(self, nbytes: str, amplified: str, rate: str) -> str:
        """Say that reads pass the links into workers."""
        return f"every worker reads {nbytes}{amplified} over its link"


def chunks_hit(n_samples: int, chunk_rows: int, n_rows: float) -> float:
    """Expected number of distinct chunks that contain ``n_rows`` samples drawn at random without replacement.

    A chunk of c samples contains none of r samples out of q with probability of about ``(1 - r / q) ** c``.

    Examples
    --------
    >>> chunks_hit(6400, 64, 6400), round(chunks_hit(6400, 64, 100), 1), round(chunks_hit(6400, 1, 100), 1)
    (100.0, 63.5, 100.0)
    """
    part = n_rows / n_samples
    chunks = n_samples / chunk_rows if n_samples > chunk_rows else 1.0
    return float(chunks * -np.expm1(chunk_rows * np.log1p(-part))) if part < 1 else float(chunks)


def storage_loads(demand: Demand, share: Amounts) -> dict[str, Any]:
    """Compute bytes and requests to the storage for ``(n,)`` rows that workers lack.

    A worker reads each chunk once. With ``chunks`` it needs whole groups of rows, and skips a group only if it already
    holds all of its rows.
    """
    q, c, g = demand.n_samples, min(demand.chunk_rows, demand.n_samples), demand.group_rows
    if demand.groups is not None:
        part = demand.groups * (1 - demand.excess**g) * (g / q)
        of_chunk = (c + g - math.gcd(g, c)) / g  # groups with rows of a chunk: 1 if groups are chunks
        hit = q / c * (1 - (1 - np.minimum(1.0, part)) ** of_chunk)
    else:
        hit = np.array([chunks_hit(q, c, rows) for rows in share.tolist()])
    return {
        "requests": hit,
        "read": hit * c * demand.row_nbytes,
        "needed_nbytes": float(share.sum()) * demand.row_nbytes,
    }


def _chunks(demand: Demand, plan: Packets) -> dict[str, Any]:
    """Count the chunks that each worker reads; a worker reads each chunk once."""
    c, n = demand.chunk_rows, demand.n_workers
    n_chunks = -(-demand.n_samples // c)
    hit = np.unique(plan.destinations.astype(np.int64) * n_chunks + plan.samples // c)
    lengths = np.where(hit % n_chunks == n_chunks - 1, demand.n_samples - (n_chunks - 1) * c, c)
    return {
        "requests": np.bincount(hit // n_chunks, minlength=n).astype(np.float64),
        "read": np.bincount(hit // n_chunks, lengths, minlength=n) * demand.row_nbytes,
    }


STORAGE = RowsFromStore()
