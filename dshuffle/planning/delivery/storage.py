"""``storage``: every worker reads what it lacks from the store again."""

from __future__ import annotations

import numpy as np

from dshuffle.planning.plan import STORE, Plan, missing_samples
from dshuffle.planning.values import Holders, Ranks


def plan_storage(holders: Holders, destinations: Ranks, n_workers: int, *, seed: int) -> Plan:
    """One packet from the store for every needed sample, by ascending sample.

    So those of one chunk stand together in what a worker receives, and the chunk is fetched once.
    """
    samples = missing_samples(holders, destinations)
    return Plan.uncoded(samples, destinations[samples], np.full(len(samples), STORE))
