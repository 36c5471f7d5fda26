"""Expected loads from formulas, which are fast for any number of samples and workers."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from dshuffle.planning.cost.cluster import ClusterRates
from dshuffle.planning.cost.job import Work
from dshuffle.planning.delivery.definition import CHECKSUM_NBYTES, Demand, Loads, across_racks
from dshuffle.planning.types import Amounts

MANY_TRIALS = 10_000
"""Number of groups per worker above which the maximum over workers is close to the mean."""


def needed_rows(work: Work, n_workers: int) -> float:
    """Expected number of samples that a worker is to train on and does not hold (U in docs/design.md, "Predicting").

    A new ``global`` assignment needs ``q - s`` samples whatever the excess, since a worker holds any sample with
    probability s/q. ``partial:Q`` sends ``Q q`` samples to other workers than their owners. These workers hold each of
    the samples with the probability of the excess.

    References
    ----------
    Chung et al. (2017), Theorem 1 (equation 1), for ``global``; Nguyen et al. (2022), Algorithm 1, for ``partial:Q``,
    here without fixed points. See docs/papers.md.

    Examples
    --------
    >>> from dshuffle.planning import Choices
    >>> needed_rows(Work(1000, 8, Choices(cache_fraction=0.5)), 10)
    500.0
    >>> needed_rows(Work(1000, 8, Choices("partial:0.1")), 10)
    100.0
    """
    if n_workers == 1:
        return 0.0
    return work.n_samples * work.choices.assignment.missing_fraction(work.alpha(n_workers), work.excess(n_workers))


def first_load(work: Work, cluster: ClusterRates) -> Loads:
    """Loads of loading the first partitions: every chunk is read once, and its rows go to the workers that hold them.

    Nothing is sent if all rows of a chunk go to one worker.

    Examples
    --------
    >>> from dshuffle.planning import Choices
    >>> cluster, work = ClusterRates(4, 1e8, 1e8), Work(6400, 100, chunk_rows=64)
    >>> [float(bytes_.sum()) for loads in [first_load(work, cluster)] for bytes_ in (loads.read, loads.worker_in)]
    [640000.0, 499200.0]
    >>> float(first_load(work.with_choices(sharding="contiguous"), cluster).worker_in.sum())
    0.0
    """
    n, row_nbytes = cluster.n_workers, work.row_nbytes
    whole = work.in_chunks or work.choices.sharding == "contiguous" or work.chunk_rows == 1
    sent = 0.0
    if work.excess(n) > 0 or not whole:
        sent = work.alpha(n) * work.n_samples * (1 - 1 / n) * (row_nbytes + CHECKSUM_NBYTES)
    moved, each = np.full(n, sent), np.full(n, work.n_samples * row_nbytes / n)
    requests = np.full(n, math.ceil(work.n_samples / min(work.chunk_rows, work.n_samples)) / n)
    crossing = across_racks(np.bincount(cluster.racks()), sent)
    return dataclasses.replace(
        Loads.none(n, cluster.n_racks, exact=False, needed=work.n_samples),
        worker_out=moved,
        worker_in=moved,
        read=each,
        requests=requests,
        needed_nbytes=float(each.sum()),
        rack_out=crossing["rack_out"],
        rack_in=crossing["rack_in"],
    )


def demand_of(work: Work, cluster: ClusterRates) -> Demand:
    """What an epoch of a job asks of its delivery, on the workers of a cluster. It has at least two workers."""
    n = cluster.n_workers
    needed = needed_rows(work, n)
    return Demand(
        n_samples=work.n_samples,
        row_nbytes=work.row_nbytes,
        chunk_rows=work.chunk_rows,
        group_rows=work.group_rows,
        relay=work.choices.relay,
        needed=needed,
        shares=_shares(work, n, needed),
        groups=_groups(work, n) if work.in_chunks else None,
        excess=work.excess(n),
        sets_of=functools.partial(work.holder_sets, n),
        racks=cluster.racks(),
        n_racks=cluster.n_racks,
    )


def expected_loads(work: Work, cluster: ClusterRates) -> Loads:
    """Compute the expected loads of every part of the cluster.

    These are the bytes behind each line of the table of times in docs/design.md, "Predicting". All workers have the
    same load, except with ``chunks``, where one worker lacks the most groups.
    """
    if not needed_rows(work, cluster.n_workers):
        return Loads.none(cluster.n_workers, cluster.n_racks, exact=False)
    return work.delivery.expected_loads(demand_of(work, cluster))


def _shares(work: Work, n_workers: int, rows: float) -> Amounts:
    """Return the expected number of rows that each worker lacks."""
    if not work.in_chunks:
        return np.full(n_workers, rows / n_workers)
    groups = _groups(work, n_workers)
    shares: Amounts = groups * (rows / float(groups.sum()))
    return shares


def _groups(work: Work, n_workers: int) -> Amounts:
    """Return the expected number of groups that each worker is assigned and that were not in its share before."""
    groups = work.n_samples / work.group_rows
    absent = 1 - 1 / n_workers
    most = math.ceil(math.ceil(groups) / n_workers)
    busiest = math.ceil(groups) - (most - 1) * n_workers  # number of workers with the most groups
    lacks = (most - (np.arange(n_workers) >= busiest)) * (groups / math.ceil(groups) * absent)
    # The exchange waits for the worker that lacks the most groups. The others share the rest.
    total, rest = float(lacks.sum()), float(lacks[1:].sum())
    largest = min(_largest(most, absent, busiest), total)
    lacks[1:] *= (total - largest) / rest if rest else 1.0
    lacks[0] = largest
    return lacks.astype(np.float64)


def _largest(trials: int, chance: float, workers: int) -> float:
    """Expected maximum of ``workers`` binomial variables; their mean if there are many trials, where it is close."""
    if trials > MANY_TRIALS:
        return trials * chance
    if not chance:
        return 0.0
    counts = np.arange(trials)
    # Logarithms of the binomial coefficients.
    choices = np.concatenate([[0.0], np.log((trials - counts[:-1]) / (counts[:-1] + 1)).cumsum()])
    at_most = np.exp(choices + counts * math.log(chance) + (trials - counts) * math.log1p(-chance)).cumsum()
    return float((1 - np.minimum(1.0, at_most) ** workers).sum())
