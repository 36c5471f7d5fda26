"""``storage``: every worker reads what it lacks from the store again."""

from __future__ import annotations

import numpy as np

from dshuffle.planning.bits import group_by
from dshuffle.planning.plan import STORE, Plan, missing_samples
from dshuffle.planning.values import Holders, Ranks


def plan_storage(holders: Holders, destinations: Ranks, n_workers: int, *, seed: int) -> Plan:
    """One packet from the store for every needed sample, by destination and then by sample.

    A worker's samples ascend, so that those of one chunk stand together and the chunk is fetched once.
    """
    samples = missing_samples(holders, destinations)
    order, _ = group_by(destinations[samples], n_workers)
    samples = samples[order]
    return Plan.uncoded(samples, destinations[samples], np.full(len(samples), STORE))
