"""What tests of plans draw without a session."""

from __future__ import annotations

import numpy as np

from dshuffle.planning.assignment import Draw
from dshuffle.planning.caching import Uniform
from dshuffle.planning.epoch_plan import missing_samples
from dshuffle.planning.types import as_instance


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
