"""``server``: one worker that can read every sample sends each to the worker that needs it."""

from __future__ import annotations

import numpy as np

from dshuffle.planning.plan import SERVER, Plan, missing_samples
from dshuffle.planning.values import Holders, Ranks


def plan_server(holders: Holders, destinations: Ranks, n_workers: int, *, seed: int) -> Plan:
    """One packet from the server for every needed sample, by ascending sample.

    In this order a server whose memory is smaller than the dataset streams through the store once.

    References
    ----------
    The uncoded scheme that papers 000 and 001 compare with.
    """
    samples = missing_samples(holders, destinations)
    return Plan.uncoded(samples, destinations[samples], np.full(len(samples), SERVER))
