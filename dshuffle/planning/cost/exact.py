"""Loads counted in a real plan, made as the members of a session make it."""

from __future__ import annotations

import functools

import numpy as np

from dshuffle.planning.assignment import draw_assignment, first_assignment, parse_assignment
from dshuffle.planning.caching import CACHINGS
from dshuffle.planning.cost.cluster import Cluster
from dshuffle.planning.cost.expected import needed_rows, ring_bytes, storage_loads
from dshuffle.planning.cost.loads import CHECKSUM_NBYTES, Loads, nothing
from dshuffle.planning.cost.packets import HolderSets, expected_packets
from dshuffle.planning.cost.work import Work
from dshuffle.planning.delivery import plan_delivery
from dshuffle.planning.holders import cache_capacity
from dshuffle.planning.plan import SERVER, Plan, missing_samples
from dshuffle.planning.randomness import random_words
from dshuffle.planning.relay import route
from dshuffle.planning.values import Holders, Ranks

EPOCHS = 3
"""The epoch that is planned: caches are then what eviction leaves, not what was loaded."""
BATCH = 8192
"""Packets that a relay hands on together; it hardly changes who sends how much."""
SEED = 0


def counted_loads(work: Work, cluster: Cluster, *, at_most: int) -> Loads:
    """What the plan of an epoch asks of every part of the cluster.

    Parameters
    ----------
    at_most
        Samples to plan for, at most; a larger job's loads follow from those of one with so many, by the ratio of
        what is expected of both.
    """
    n = cluster.n_workers
    few = min(work.n_samples, max(at_most, n))
    holders, assignment, start = _instance(few, n, work.assignment, work.caching, work.cache_fraction)
    seed = int(random_words(1, "delivery", SEED, EPOCHS)[0])
    plan = plan_delivery(work.delivery, holders, assignment, n, seed=seed, start=start)
    rows = float(plan.n_components)  # more than are needed, where some only help to decode others
    loads = nothing(n, cluster.n_racks, exact=True)
    grown = work.n_samples / few
    loads["needed"], loads["packets"] = len(missing_samples(holders, assignment)) * grown, plan.n_packets * grown
    if not rows:
        return Loads(**loads)  # type: ignore[arg-type]
    received = np.bincount(plan.destinations, minlength=n).astype(np.float64)
    if work.delivery == "storage":
        read = storage_loads(work, n, received * grown)
        if few == work.n_samples:
            read |= _chunks(plan, work, n)
        return Loads(**loads | read)  # type: ignore[arg-type]
    if work.coded:
        hops = route(work.relay, plan, n, BATCH)
        senders, degrees = hops.senders, np.diff(plan.offsets)[hops.packets]
    else:
        senders, degrees = plan.senders, np.ones(len(plan.samples))
    # A larger job sends fewer packets a sample; what the server does not send, workers do.
    sent = float(np.count_nonzero(senders == SERVER))
    packets = float(plan.n_packets) * (_fewer(work, few, n) if work.coded else 1.0)
    if work.coded and work.relay != "unicast":
        sent *= packets / plan.n_packets
    row = (work.row_nbytes + CHECKSUM_NBYTES) * grown
    loads["packets"] = packets * grown
    loads["server_out"] = sent * row
    loads["worker_in"] = received * row
    away = np.bincount(senders[senders >= 0], minlength=n).astype(np.float64)
    factor = (rows - sent) / away.sum() if away.any() else 0.0
    loads["worker_out"] = away * (factor * row)
    racks = cluster.racks()
    each = sent / max(1, int(np.count_nonzero(senders < 0)))
    for name, ends in (("rack_out", senders), ("rack_in", plan.destinations)):
        # The server stands in no rack, so what it sends enters racks and leaves none.
        crossing = (senders < 0) | (racks[np.maximum(senders, 0)] != racks[plan.destinations])
        mine = crossing & (ends >= 0)
        weights = np.where(senders[mine] < 0, each, factor)
        loads[name] = np.bincount(racks[ends[mine]], weights, minlength=cluster.n_racks) * row
    if work.coded:
        loads["encoded"] = rows * grown * work.row_nbytes
        read_rows = np.bincount(plan.destinations, degrees, minlength=n) * (plan.n_packets / packets)
        loads["decoded"] = read_rows * grown * work.row_nbytes
        if work.relay == "ring":
            loads["passed_on"] = ring_bytes(rows, packets) * row
    return Loads(**loads)  # type: ignore[arg-type]


def _fewer(work: Work, few: int, n_workers: int) -> float:
    """By what factor a sample takes fewer packets in the whole job than in one of ``few`` samples."""
    if few == work.n_samples:
        return 1.0
    needed = needed_rows(work, n_workers)
    small = needed * few / work.n_samples
    if not small:
        return 1.0
    there = expected_packets(work.delivery, HolderSets.of(work, n_workers, needed)) / needed
    here = expected_packets(work.delivery, HolderSets.of(work, n_workers, small)) / small
    return there / here


def _chunks(plan: Plan, work: Work, n_workers: int) -> dict[str, object]:
    """Chunks that workers read, each once."""
    c = work.chunk_rows
    n_chunks = -(-work.n_samples // c)
    hit = np.unique(plan.destinations.astype(np.int64) * n_chunks + plan.samples // c)
    lengths = np.where(hit % n_chunks == n_chunks - 1, work.n_samples - (n_chunks - 1) * c, c)
    return {
        "requests": np.bincount(hit // n_chunks, minlength=n_workers).astype(np.float64),
        "read": np.bincount(hit // n_chunks, lengths, minlength=n_workers) * work.row_nbytes,
    }


@functools.lru_cache(maxsize=6)
def _instance(
    n_samples: int, n_workers: int, assignment: str, caching: str, cache_fraction: float | None
) -> tuple[Holders, Ranks, Plan | None]:
    """Who holds what and who is to train on what in an epoch; several deliveries are planned for it."""
    policy = CACHINGS[caching](n_workers, cache_capacity(cache_fraction, n_samples, n_workers), SEED)
    parsed = parse_assignment(assignment)
    ranks = first_assignment("random", n_samples, n_workers, seed=SEED)
    holders = policy.first(ranks)
    packets: Plan | None = None
    for epoch in range(1, EPOCHS + 1):
        if epoch > 1:
            holders = policy.evolve(holders, ranks, epoch - 1)
        ranks, packets = draw_assignment(parsed, ranks, n_workers, seed=SEED, epoch=epoch, holders=holders)
    return holders, ranks, packets


def is_countable(work: Work, n_workers: int, most_workers: int) -> bool:
    """Whether a real plan can be made."""
    if n_workers > most_workers or work.n_samples < n_workers:
        return False
    try:
        parse_assignment(work.assignment)
    except ValueError:  # an assignment that the model knows and the planner does not
        return False
    return True
