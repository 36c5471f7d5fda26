"""Loads counted in a real plan, which is computed as in a session."""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np

from dshuffle.planning.choices import Choices
from dshuffle.planning.cost.cluster import ClusterRates
from dshuffle.planning.cost.expected_packets import HolderSets, expected_packets
from dshuffle.planning.cost.job import Work
from dshuffle.planning.cost.loads import CHECKSUM_NBYTES, Loads, nothing
from dshuffle.planning.cost.loads_expected import needed_rows, ring_bytes, storage_loads
from dshuffle.planning.delivery.grid import WorkerGrid
from dshuffle.planning.delivery.relay import route
from dshuffle.planning.packets import SERVER, Packets
from dshuffle.planning.planner import EpochPlanner
from dshuffle.planning.shuffle_spec import ShuffleSpec

EPOCHS = 3
"""Epoch that is planned. By then the caches hold what eviction has left, not what was loaded."""
BATCH = 8192
"""Packets that a relay forwards together. The number hardly affects how much each worker sends."""
LEAST_CHUNKS = 4
"""Least number of chunks per worker for a real plan. With fewer, the loads of one plan depend too much on chance."""
SEED = 0


def counted_loads(work: Work, cluster: ClusterRates, *, at_most: int) -> Loads:
    """Count the loads of every part of the cluster in the plan of an epoch.

    Parameters
    ----------
    at_most
        Maximum number of samples to plan for. For a larger job, a plan of this many samples is made, and its loads are
        scaled by the ratio of the expected loads.
    """
    n = cluster.n_workers
    few = min(work.n_samples, max(at_most, n))
    plan, needed = _planned(work, few, n)
    rows = float(plan.n_components)  # more than needed if some rows only help to decode others
    loads = nothing(n, cluster.n_racks, exact=True)
    grown = work.n_samples / few
    loads["needed"], loads["packets"] = needed * grown, plan.n_packets * grown
    if not rows:
        return Loads(**loads)  # type: ignore[arg-type]
    received = np.bincount(plan.destinations, minlength=n).astype(np.float64)
    if work.delivery.reads_store:
        read = storage_loads(work, n, received * grown)
        if few == work.n_samples:
            read |= _chunks(plan, work, n)
        return Loads(**loads | read)  # type: ignore[arg-type]
    if work.delivery.two_hops:
        row = (work.row_nbytes + CHECKSUM_NBYTES) * grown
        return Loads(**loads | _in_two_hops(plan, cluster, row))  # type: ignore[arg-type]
    if work.coded:
        hops = route(work.choices.relay, plan, n, BATCH)
        senders, degrees = hops.senders, np.diff(plan.offsets)[hops.packets]
    else:
        senders, degrees = plan.senders, np.ones(len(plan.samples))
    # A larger job sends fewer packets per sample. Workers send what the server does not.
    sent = float(np.count_nonzero(senders == SERVER))
    packets = float(plan.n_packets) * (_fewer(work, few, n) if work.coded else 1.0)
    if work.coded and work.choices.relay != "unicast":
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
        # The server is outside all racks, so its traffic only enters racks.
        crossing = (senders < 0) | (racks[np.maximum(senders, 0)] != racks[plan.destinations])
        mine = crossing & (ends >= 0)
        weights = np.where(senders[mine] < 0, each, factor)
        loads[name] = np.bincount(racks[ends[mine]], weights, minlength=cluster.n_racks) * row
    if work.coded:
        loads["encoded"] = rows * grown * work.row_nbytes
        read_rows = np.bincount(plan.destinations, degrees, minlength=n) * (plan.n_packets / packets)
        loads["decoded"] = read_rows * grown * work.row_nbytes
        if work.choices.relay == "ring":
            loads["passed_on"] = ring_bytes(rows, packets, n) * row
    return Loads(**loads)  # type: ignore[arg-type]


def _in_two_hops(plan: Packets, cluster: ClusterRates, row: float) -> dict[str, object]:
    """Count the bytes on every link if each row of a plan goes through a forwarder."""
    n, racks = cluster.n_workers, cluster.racks()
    through = WorkerGrid(n).forwarders(plan.senders, plan.destinations)
    starts, ends = np.concatenate([plan.senders, through]), np.concatenate([through, plan.destinations])
    starts, ends = starts[starts != ends], ends[starts != ends]
    crossing = racks[starts] != racks[ends]
    return {
        "worker_out": np.bincount(starts, minlength=n) * row,
        "worker_in": np.bincount(ends, minlength=n) * row,
        "rack_out": np.bincount(racks[starts[crossing]], minlength=cluster.n_racks) * row,
        "rack_in": np.bincount(racks[ends[crossing]], minlength=cluster.n_racks) * row,
    }


def _fewer(work: Work, few: int, n_workers: int) -> float:
    """Return packets per sample in the whole job, divided by packets per sample in a job of ``few`` samples."""
    if few == work.n_samples:
        return 1.0
    needed = needed_rows(work, n_workers)
    small = needed * few / work.n_samples
    if not small:
        return 1.0
    there = expected_packets(work.delivery.name, HolderSets.of(work, n_workers, needed)) / needed
    here = expected_packets(work.delivery.name, HolderSets.of(work, n_workers, small)) / small
    return there / here


def _chunks(plan: Packets, work: Work, n_workers: int) -> dict[str, object]:
    """Count the chunks that each worker reads; a worker reads each chunk once."""
    c = work.chunk_rows
    n_chunks = -(-work.n_samples // c)
    hit = np.unique(plan.destinations.astype(np.int64) * n_chunks + plan.samples // c)
    lengths = np.where(hit % n_chunks == n_chunks - 1, work.n_samples - (n_chunks - 1) * c, c)
    return {
        "requests": np.bincount(hit // n_chunks, minlength=n_workers).astype(np.float64),
        "read": np.bincount(hit // n_chunks, lengths, minlength=n_workers) * work.row_nbytes,
    }


def _planned(work: Work, n_samples: int, n_workers: int) -> tuple[Packets, int]:
    """Return the plan of an epoch and the number of samples that it delivers."""
    choices = _countable_choices(work)
    # The previous epoch is the same for all deliveries and relays.
    planner = copy.deepcopy(_epoch_before(n_samples, n_workers, dataclasses.replace(choices, delivery="storage")))
    planner.spec.with_choices(delivery=work.delivery.name)  # raises if it is not allowed
    epoch = planner.advance(work.delivery.name)
    return epoch.packets, epoch.n_needed


@functools.lru_cache(maxsize=6)
def _epoch_before(n_samples: int, n_workers: int, choices: Choices) -> EpochPlanner:
    """Return a planner at the previous epoch."""
    planner = EpochPlanner(ShuffleSpec(n_samples, n_workers, choices), checks=False)
    planner.load()
    for _ in range(1, EPOCHS):
        planner.advance()
    return planner


def _countable_choices(work: Work) -> Choices:
    """The choices that decide how many packets there are, the same for all jobs that differ otherwise."""
    assignment = work.choices.assignment.with_unit(work.group_rows)
    return Choices(assignment, caching=work.choices.caching, cache_fraction=work.choices.cache_fraction, seed=SEED)


def is_countable(work: Work, n_workers: int, *, most_workers: int, most_samples: int) -> bool:
    """Return whether a real plan can be made within the limits on workers and samples."""
    if n_workers > most_workers or work.n_samples < n_workers:
        return False
    if not work.in_chunks:
        return True
    return min(work.n_samples, most_samples) // work.group_rows >= LEAST_CHUNKS * n_workers
