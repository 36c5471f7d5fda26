"""Loads of an epoch's exchange, counted in a real plan.

A plan has at most a million samples and 64 workers. From there on loads are extrapolated. With more samples, a worker
gets so many times more of everything, and coded packets combine a little more. With more workers, each of them does
what one of 64 does in a job with the same share and the same excess of each worker.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.planning.bounds import coded_rate
from dshuffle.planning.cost.cluster import ClusterRates
from dshuffle.planning.cost.job import Work
from dshuffle.planning.delivery import check_delivery
from dshuffle.planning.delivery.definition import CHECKSUM_NBYTES, Demand, Loads
from dshuffle.planning.delivery.storage import STORAGE
from dshuffle.planning.epoch_plan import Packets
from dshuffle.planning.planner import EpochPlanner
from dshuffle.planning.shuffle_spec import Choices, ShuffleSpec
from dshuffle.planning.types import Amounts

MOST_WORKERS = 64
MOST_SAMPLES = 1_000_000
LEAST_CHUNKS = 4
"""Chunks of each worker in a plan, if the job has so many. With fewer, loads depend too much on chance."""
FIRST_EPOCH = 3
"""First epoch that may be planned. By then the caches hold what eviction has left, not what was loaded."""
FEW_UNITS = 10_000
"""Samples, or chunks that move as a whole, below which the loads differ much between epochs."""
EPOCHS_OF_FEW = 9
"""Number of epochs among which a typical one is chosen if there are so few."""
STEP = 4
"""How many times fewer samples a second plan has, which shows how packets depend on the number of samples."""


def loads_of(cluster: ClusterRates, work: Work, *, most_samples: int = MOST_SAMPLES) -> Loads:
    """Count the loads for :func:`~dshuffle.planning.cost.predict`. They do not depend on the rates of the cluster."""
    n, q = cluster.n_workers, work.n_samples
    if q < n:
        raise InvalidParameter.of("n_samples", q, f"an integer >= {n}", "There are fewer samples than workers.")
    rows = _lacking(work, n)
    if not work.choices.assignment.moves or not rows:
        return Loads.none(n)
    excess, delivery = work.excess(n), work.delivery
    check_delivery(delivery.name, n, excess=excess > 0)
    delivery.check_storage(cluster.storage)
    counted = min(n, MOST_WORKERS)
    like, small = q, work
    if n > counted:
        # The same share of each worker; where workers code in pairs, the same number of rows for each pair.
        like = math.ceil(q * (counted / n) ** (2 if delivery.coded and not excess else 1))
        fraction = None if not excess else 1 / counted + excess * (1 - 1 / counted)
        small = work.with_choices(cache_fraction=fraction)
    least = LEAST_CHUNKS * counted * work.group_rows if work.in_chunks else 1
    planned = min(max(like, counted), max(most_samples, least))
    small = dataclasses.replace(small, n_samples=planned)
    plan, needed = _planned(small, counted)
    if excess and delivery.coded and plan.n_packets > needed / 2:  # too few samples to see how many a packet combines
        small = dataclasses.replace(small, n_samples=(planned := max(planned, min(like, MOST_SAMPLES))))
        plan, needed = _planned(small, counted)
    growth = q / planned if n == counted else rows / n / (_lacking(small, counted) / counted)
    more, times = n / counted, growth * n / counted
    if not plan.n_components:
        return dataclasses.replace(Loads.none(n, packets=plan.n_packets * times), needed=needed * times)
    fewer = _fewer(small, counted, like, plan.n_packets / needed) if delivery.coded and planned < like else 1.0
    facts = (q, work.row_nbytes, work.chunk_rows, work.choices.relay, work.in_chunks, planned)
    loads = delivery.counted_loads(Demand(counted, *facts, growth, fewer), plan)
    totals = ("packets", "server_out", "encoded", "needed_nbytes")
    changes: dict[str, float | Amounts] = {name: getattr(loads, name) * more for name in totals}
    hops = delivery.hops(n) / delivery.hops(counted)
    for name in ("worker_out", "worker_in", "decoded", "read", "requests"):
        each = getattr(loads, name)
        # By chance, workers differ the less the more samples or chunks they get.
        each = each.mean() + (each - each.mean()) / math.sqrt(max(1.0, growth))
        changes[name] = np.resize(each * (hops if name.startswith("worker") else 1.0), n)
    return dataclasses.replace(loads, needed=needed * times, **changes)  # type: ignore[arg-type]


def first_load(work: Work, cluster: ClusterRates) -> Loads:
    """Loads of loading the first partitions: every chunk is read once, and its rows go to the workers that hold them.

    Nothing is sent if all rows of a chunk go to one worker.
    """
    n, row_nbytes = cluster.n_workers, work.row_nbytes
    whole = work.in_chunks or work.choices.sharding == "contiguous" or work.chunk_rows == 1
    sent = 0.0
    if work.excess(n) > 0 or not whole:
        sent = work.alpha(n) * work.n_samples * (1 - 1 / n) * (row_nbytes + CHECKSUM_NBYTES)
    moved, each = np.full(n, sent), np.full(n, work.n_samples * row_nbytes / n)
    requests = np.full(n, math.ceil(work.n_samples / min(work.chunk_rows, work.n_samples)) / n)
    loads = dataclasses.replace(Loads.none(n), needed=work.n_samples, worker_out=moved, worker_in=moved)
    return dataclasses.replace(loads, read=each, requests=requests, needed_nbytes=float(each.sum()))


def _lacking(work: Work, n_workers: int) -> float:
    """Expected number of samples that workers are to train on and do not hold, all together.

    References
    ----------
    Chung et al. (2017), Theorem 1 (equation 1), for ``global``; Nguyen et al. (2022), Algorithm 1, for ``partial:Q``,
    here without fixed points. See docs/papers.md.
    """
    alpha = work.alpha(n_workers)
    if n_workers == 1:
        return 0.0
    return work.n_samples * work.choices.assignment.missing_fraction(alpha, work.excess(n_workers))


def _fewer(work: Work, n_workers: int, n_samples: int, per_sample: float) -> float:
    """Packets for each sample of a job of ``n_samples``, divided by those of the plan of ``work``.

    What is above the bound of Chung et al. (2017), Theorem 2, falls with each factor of :data:`STEP` as it fell from a
    plan of fewer samples.
    """
    fewest = work.n_samples // STEP
    plan, needed = _planned(dataclasses.replace(work, n_samples=fewest), n_workers)
    alpha = work.alpha(n_workers)
    bound = coded_rate(work.n_samples, n_workers, max(-(-work.n_samples // n_workers), int(alpha * work.n_samples)))
    least = bound / (work.n_samples * (1 - alpha))
    before, above = plan.n_packets / max(1, needed) - least, per_sample - least
    if not before > above > 0:
        return 1.0
    steps = math.log(n_samples / work.n_samples, STEP)
    return float(least + above * (above / before) ** steps) / per_sample


@functools.lru_cache(maxsize=4)  # relays and rates do not change it
def _packets_of(n_samples: int, n_workers: int, choices: Choices) -> tuple[Packets, int]:
    # The previous epoch is the same for all deliveries.
    before = _epoch_before(n_samples, n_workers, dataclasses.replace(choices, delivery=STORAGE.name))
    planner = copy.deepcopy(before)
    planner.spec.with_choices(delivery=choices.delivery)  # raises if it is not allowed
    epoch = planner.advance(choices.delivery)
    return epoch.packets, epoch.n_needed


def _planned(work: Work, n_workers: int) -> tuple[Packets, int]:
    """The plan of an epoch, and the number of samples that it delivers."""
    assignment, chosen = work.choices.assignment.with_unit(work.group_rows), work.choices
    choices = Choices(assignment, chosen.delivery, chosen.caching, chosen.cache_fraction)
    return _packets_of(work.n_samples, n_workers, choices)


@functools.lru_cache(maxsize=6)
def _epoch_before(n_samples: int, n_workers: int, choices: Choices) -> EpochPlanner:
    """A planner at the epoch before the one to plan; if there are few samples, before a typical one."""
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
    """Which of the next epochs is typical in two numbers: samples that are needed, and that one worker lacks."""
    lacking = []
    for _ in range(EPOCHS_OF_FEW):
        epoch = planner.advance()
        lacking.append([epoch.n_needed, int(np.bincount(epoch.packets.destinations).max(initial=0))])
    middle = np.maximum(1, np.median(lacking, axis=0))
    return int(np.abs(np.array(lacking) / middle - 1).sum(axis=1).argmin())
