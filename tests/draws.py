"""What tests of plans draw without a session."""

from __future__ import annotations

import itertools

import numpy as np

from dshuffle.planning import SERVER, STORE, get_delivery
from dshuffle.planning.assignment import Draw
from dshuffle.planning.caching import Uniform
from dshuffle.planning.delivery import PlanInput
from dshuffle.planning.types import held_by, missing_samples


def as_instance(holders, destinations, n_workers):
    """Where samples are and where they must go, as ``(q, words)`` uint64 and ``(q,)`` int32."""
    masks = np.ascontiguousarray(holders, np.uint64).reshape(-1, -(-n_workers // 64))
    return masks, np.ascontiguousarray(destinations, np.int32)


def plan_delivery(name, holders, destinations, n_workers, *, seed=0, depth=None, **fields):
    """The packets of a delivery."""
    plan_input = PlanInput(*as_instance(holders, destinations, n_workers), n_workers, seed, **fields)
    return get_delivery(name).plan(plan_input, **({} if depth is None else {"depth": depth}))


def check_plan(plan, holders, destinations, n_workers):
    """Check that a plan delivers every needed sample exactly once, and that workers can decode all of it."""
    masks, ranks = as_instance(holders, destinations, n_workers)
    known = [set(np.flatnonzero(held_by(masks, worker)).tolist()) for worker in range(n_workers)]
    pairs = list(zip(plan.samples.tolist(), plan.destinations.tolist(), strict=True))
    assert len(pairs) == len(set(pairs)), "a sample is delivered twice to a worker"
    arriving = [[] for _ in range(n_workers)]
    for sender, (begin, end) in zip(plan.senders.tolist(), itertools.pairwise(plan.offsets.tolist()), strict=True):
        samples = {sample for sample, _ in pairs[begin:end]}
        assert sender in (SERVER, STORE) or samples <= known[sender], "a sender lacks a sample"
        for sample, worker in pairs[begin:end]:
            assert sample not in known[worker], "a worker holds the sample already"
            arriving[worker].append(samples)
    # A component may also deliver a sample to a worker that does not train on it, but only if the worker needs the
    # sample to decode another packet. Leftover coding decodes in two such steps (Attia and Tandon, 2016).
    for sample, worker in pairs:
        uses = sum(sample in samples for samples in arriving[worker]) if ranks[sample] != worker else 2
        assert uses > 1, "a worker neither trains on a sample nor needs it to decode another one"
    for worker, waiting in enumerate(arriving):
        while waiting:
            later = []
            for samples in waiting:
                lacking = samples - known[worker]
                if len(lacking) > 1:
                    later.append(samples)
                known[worker] |= lacking if len(lacking) == 1 else set()
            assert len(later) < len(waiting), "a worker cannot decode a packet"
            waiting = later
    for sample, worker in enumerate(ranks.tolist()):
        assert sample in known[worker], f"sample {sample} is not delivered to worker {worker}"


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
