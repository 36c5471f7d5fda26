"""What tests of plans draw without a session."""

from __future__ import annotations

import numba
import numpy as np

from dshuffle.errors import PlanError
from dshuffle.planning import STORE, delivery, name_of
from dshuffle.planning.assignment import Draw
from dshuffle.planning.caching import Uniform
from dshuffle.planning.types import missing_samples


def as_instance(holders, destinations, n_workers):
    """Where samples are and where they must go, as ``(q, words)`` uint64 and ``(q,)`` int32."""
    masks = np.ascontiguousarray(holders, np.uint64).reshape(-1, -(-n_workers // 64))
    return masks, np.ascontiguousarray(destinations, np.int32)


def plan_delivery(name, holders, destinations, n_workers, **options):
    """The packets of a delivery."""
    return delivery.plan_delivery(name, *as_instance(holders, destinations, n_workers), n_workers, **options)


def check_plan(plan, holders, destinations, n_workers):
    """Raise an error unless a plan delivers every needed sample exactly once, and workers can decode all of it."""
    # A component may also deliver a sample to a worker that does not train on it, but only if the worker needs the
    # sample to decode another packet. Leftover coding decodes in two such steps (Attia and Tandon, 2016).
    holders, ranks = as_instance(holders, destinations, n_workers)
    fault, packet, entry = _find_fault(
        plan.offsets, plan.samples, plan.destinations, plan.senders, holders, ranks, n_workers
    )
    if fault == MISSING:
        raise PlanError(f"sample {entry} is not delivered to worker {ranks[entry]}, which needs it")
    if fault >= 0:
        sender, sample, worker = name_of(plan.senders[packet]), plan.samples[entry], plan.destinations[entry]
        raise PlanError(f"packet {packet} from {sender}, sample {sample} for worker {worker}: {_FAULTS[fault]}")


_FAULTS = (
    "there is no such sender, sample or worker",
    "the sender does not hold the sample, or sends it to itself",
    "the worker already holds the sample",
    "another packet delivers the same sample to this worker",
    "the worker cannot decode the sample: it lacks another one of the packet",
    "the worker neither trains on the sample nor needs it to decode another one",
)
SOUND, MISSING = -1, len(_FAULTS)


@numba.njit(cache=True)
def _find_fault(offsets, samples, destinations, senders, holders, wanted, n_workers):
    """Return the first fault as (number, packet, component); of a sample that is missing, the sample."""
    q, n_entries = wanted.size, samples.size
    # The components of a sample form a linked list for looking up (sample, worker) pairs.
    last = np.full(q, -1, np.int64)
    before = np.empty(n_entries, np.int64)
    packet_of = np.empty(n_entries, np.int64)
    for p in range(senders.size):
        sender = senders[p]
        for e in range(offsets[p], offsets[p + 1]):
            j, d = samples[e], destinations[e]
            if not (STORE <= sender < n_workers and 0 <= j < q and 0 <= d < n_workers):
                return 0, p, e
            if d == sender or (sender >= 0 and not _holds(holders, j, sender)):
                return 1, p, e
            if _holds(holders, j, d):
                return 2, p, e
            if _entry(j, d, last, before, destinations) >= 0:
                return 3, p, e
            packet_of[e], before[e], last[j] = p, last[j], e

    # A component is decoded once its destination has all other samples of the packet.
    decoded = np.zeros(n_entries, np.bool_)
    helps = np.zeros(n_entries, np.bool_)
    waiting = np.arange(n_entries)
    n_waiting = n_entries
    while n_waiting > 0:
        still = 0
        for w in range(n_waiting):
            e = waiting[w]
            p, d = packet_of[e], destinations[e]
            ready = True
            for i in range(offsets[p], offsets[p + 1]):
                if i != e and not _holds(holders, samples[i], d):
                    source = _entry(samples[i], d, last, before, destinations)
                    ready = ready and source >= 0 and decoded[source]
                    if source >= 0:
                        helps[source] = True
            decoded[e] = ready
            if not ready:
                waiting[still] = e
                still += 1
        if still == n_waiting:
            return 4, packet_of[waiting[0]], waiting[0]
        n_waiting = still

    for e in range(n_entries):
        if destinations[e] != wanted[samples[e]] and not helps[e]:
            return 5, packet_of[e], e
    for j in range(q):
        if not _holds(holders, j, wanted[j]) and _entry(j, wanted[j], last, before, destinations) < 0:
            return MISSING, 0, j
    return SOUND, 0, 0


@numba.njit
def _entry(sample, worker, last, before, destinations):
    """Return the component that delivers ``sample`` to ``worker``, or -1."""
    e = last[sample]
    while e >= 0 and destinations[e] != worker:
        e = before[e]
    return e


@numba.njit
def _holds(holders, sample, worker):
    return (holders[sample, worker >> 6] >> np.uint64(worker & 63)) & np.uint64(1) != 0


def next_ranks(assignment, previous, n_workers, *, seed, epoch, holders=None, classes=None):
    """The ranks of an epoch, from those of the one before; the samples of each worker fill its slots in order."""
    ranks = np.ascontiguousarray(previous, np.int32)
    before = None if assignment.forgets else ranks
    masks = None if holders is None else as_instance(holders, ranks, n_workers)[0]
    return assignment.draw(Draw(len(ranks), n_workers, seed, epoch, before, masks, classes)).ranks


def first_holders(assignment, n_workers, capacity, *, seed):
    """Each worker's share, and random excess."""
    return Uniform(n_workers, capacity, seed).first(np.ascontiguousarray(assignment, np.int32))


def missing(holders, destinations, n_workers):
    """The samples that their destination does not hold."""
    return missing_samples(*as_instance(holders, destinations, n_workers))


def average_lower_bound(holders, destinations, n_workers):
    """The mean over all orders of the workers of what ``lower_bound`` maximizes: 1 / (h + 1) for h holders of each."""
    masks, ranks = as_instance(holders, destinations, n_workers)
    h = [sum(int(word).bit_count() for word in masks[sample]) for sample in missing_samples(masks, ranks)]
    return float(np.sum(1 / (np.array(h) + 1.0)))
