"""Loads counted in a real plan, made as the members of a session make it."""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment import Assignment, parse_assignment
from dshuffle.planning.cost.cluster import Cluster
from dshuffle.planning.cost.expected_packets import HolderSets, expected_packets
from dshuffle.planning.cost.job import CHUNKS, Work
from dshuffle.planning.cost.loads import CHECKSUM_NBYTES, Loads, nothing
from dshuffle.planning.cost.loads_expected import needed_rows, ring_bytes, storage_loads
from dshuffle.planning.delivery.relay import route
from dshuffle.planning.plan import SERVER, Plan
from dshuffle.planning.planner import EpochPlanner, ShufflePlanSpec

EPOCHS = 3
"""The epoch that is planned: caches are then what eviction leaves, not what was loaded."""
BATCH = 8192
"""Packets that a relay hands on together; it hardly changes who sends how much."""
LEAST_CHUNKS = 4
"""Chunks a worker: fewer say more about luck than about the way."""
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
    plan, needed = _planned(work, few, n)
    rows = float(plan.n_components)  # more than are needed, where some only help to decode others
    loads = nothing(n, cluster.n_racks, exact=True)
    grown = work.n_samples / few
    loads["needed"], loads["packets"] = needed * grown, plan.n_packets * grown
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
            loads["passed_on"] = ring_bytes(rows, packets, n) * row
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


def _planned(work: Work, n_samples: int, n_workers: int) -> tuple[Plan, int]:
    """The plan of an epoch, and the samples that it delivers."""
    key = n_samples, n_workers, _parsed(work), work.caching, work.cache_fraction
    planner = copy.deepcopy(_epoch_before(*key))
    dataclasses.replace(planner.spec, delivery=work.delivery, relay=work.relay)  # refuses what cannot be
    epoch = planner.advance(work.delivery)
    return epoch.plan, epoch.n_needed


@functools.lru_cache(maxsize=6)
def _epoch_before(
    n_samples: int, n_workers: int, assignment: Assignment, caching: str, cache_fraction: float | None
) -> EpochPlanner:
    """A planner on the epoch before, which is the same for all deliveries."""
    spec = ShufflePlanSpec(
        n_samples, n_workers, SEED, assignment, "storage", "random", caching=caching, cache_fraction=cache_fraction
    )
    planner = EpochPlanner(spec, checks=False)
    planner.load()
    for _ in range(1, EPOCHS):
        planner.advance()
    return planner


def _parsed(work: Work) -> Assignment:
    return parse_assignment(f"{CHUNKS}:{work.group_rows}" if work.kind == CHUNKS else work.assignment)


def is_countable(work: Work, n_workers: int, *, most_workers: int, most_samples: int) -> bool:
    """Whether a real plan can be made, of so many samples at most."""
    if n_workers > most_workers or work.n_samples < n_workers:
        return False
    if min(work.n_samples, most_samples) // work.group_rows < LEAST_CHUNKS * n_workers and work.kind == CHUNKS:
        return False
    try:
        _parsed(work)
    except InvalidParameter:  # an assignment that the model knows and the planner does not
        return False
    return True
