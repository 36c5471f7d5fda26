"""Loads counted in a real plan, which is computed as in a session."""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np

from dshuffle.planning.cost.cluster import ClusterRates
from dshuffle.planning.cost.job import Work
from dshuffle.planning.cost.loads_expected import demand_of
from dshuffle.planning.delivery.definition import Loads
from dshuffle.planning.delivery.storage import STORAGE
from dshuffle.planning.epoch_plan import Packets
from dshuffle.planning.planner import EpochPlanner
from dshuffle.planning.shuffle_spec import Choices, ShuffleSpec

FIRST_EPOCH = 3
"""First epoch that may be planned. By then the caches hold what eviction has left, not what was loaded."""
LEAST_CHUNKS = 4
"""Least number of chunks per worker for a real plan. With fewer, the loads of one plan depend too much on chance."""
FEW_UNITS = 10_000
"""Samples, or chunks that move as a whole, below which the loads differ much between epochs."""
EPOCHS_OF_FEW = 9
"""Number of epochs among which a typical one is chosen if there are so few."""
SEED = 0


def counted_loads(work: Work, cluster: ClusterRates, *, at_most: int) -> Loads:
    """Count the loads of every part of the cluster in the plan of an epoch; if few samples move, in a typical one.

    Parameters
    ----------
    at_most
        Maximum number of samples to plan for. For a larger job, a plan of this many samples is made, and its loads are
        scaled by the ratio of the expected loads.
    """
    n = cluster.n_workers
    n_planned = min(work.n_samples, max(at_most, n))
    plan, needed = _planned(work, n_planned, n)
    growth = work.n_samples / n_planned
    if not plan.n_components:
        return Loads.none(n, cluster.n_racks, exact=True, needed=needed * growth, packets=plan.n_packets * growth)
    loads = work.delivery.counted_loads(demand_of(work, cluster), plan, n_planned)
    return dataclasses.replace(loads, needed=needed * growth)


def _planned(work: Work, n_samples: int, n_workers: int) -> tuple[Packets, int]:
    """Return the plan of an epoch and the number of samples that it delivers."""
    choices = _countable_choices(work)
    # The previous epoch is the same for all deliveries and relays.
    planner = copy.deepcopy(_epoch_before(n_samples, n_workers, dataclasses.replace(choices, delivery=STORAGE.name)))
    planner.spec.with_choices(delivery=work.delivery.name)  # raises if it is not allowed
    epoch = planner.advance(work.delivery.name)
    return epoch.packets, epoch.n_needed


@functools.lru_cache(maxsize=6)
def _epoch_before(n_samples: int, n_workers: int, choices: Choices) -> EpochPlanner:
    """Return a planner at the epoch before the one to plan; if there are few samples, before a typical one."""
    planner = EpochPlanner(ShuffleSpec(n_samples, n_workers, choices), checks=False)
    planner.load()
    for _ in range(1, FIRST_EPOCH):
        planner.advance()
    assignment = choices.assignment
    if n_samples < FEW_UNITS * ((assignment.in_chunks and assignment.unit) or 1):
        for _ in range(_typical_epoch(copy.deepcopy(planner))):
            planner.advance()
    return planner


def _typical_epoch(planner: EpochPlanner) -> int:
    """Return which of the next epochs is typical in two numbers: samples that are needed, and that one worker lacks."""
    lacking = []
    for _ in range(EPOCHS_OF_FEW):
        epoch = planner.advance()
        lacking.append([epoch.n_needed, int(np.bincount(epoch.packets.destinations).max(initial=0))])
    middle = np.maximum(1, np.median(lacking, axis=0))
    return int(np.abs(np.array(lacking) / middle - 1).sum(axis=1).argmin())


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
