"""Comparing ways by the cost model: which one to take, why, and what would change that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.planning.cost.cluster import SCALABLE, Cluster
from dshuffle.planning.cost.explain import EQUALLY, Advice, explain
from dshuffle.planning.cost.job import CHUNKS, Work
from dshuffle.planning.cost.loads import Loads
from dshuffle.planning.cost.loads_expected import expected_loads
from dshuffle.planning.cost.prediction import Prediction, loads_of, timed
from dshuffle.planning.delivery import MOST_FOR_TABLES

GLOBAL = ("global", "aligned")
"""Assignments that draw anew over all samples, row by row."""
ASSIGNMENTS = ("local", "partial:0.1", "global", "aligned", CHUNKS)
SAMPLES = 100_000
"""Samples of the plans that are made to compare ways: a coarser count than :func:`predict`'s, but many of them."""
FACTORS = np.geomspace(1 / 256, 256, 17)
"""By how much a rate may change to change the answer."""


@dataclass(frozen=True, slots=True)
class Change:
    """Another cluster on which another way would be the fastest.

    Parameters
    ----------
    what
        A key of :data:`~dshuffle.planning.cost.cluster.SCALABLE`.
    factor
        That rate over the present one.
    winner
        The prediction of the way that is then the fastest, on that cluster.
    """

    what: str
    factor: float
    winner: Prediction


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do.

    Parameters
    ----------
    best
        The fastest way to shuffle globally.
    instead
        A way that shuffles less and fits beside training, where the best does not; None where it fits, or where
        training's time is not known.
    whole_chunks
        Moving whole chunks, where that is faster still; None where it is not.
    verdict, reason
        A sentence each.
    notes
        More sentences: what else matters.
    changes
        The nearest changes of the cluster that would make another way the fastest, slower and faster.
    """

    best: Prediction
    instead: Prediction | None
    whole_chunks: Prediction | None
    verdict: str
    reason: str
    notes: tuple[str, ...]
    changes: tuple[Change, ...]


def all_ways(
    cluster: Cluster, work: Work, *, assignments: Sequence[str] = ASSIGNMENTS, server: bool = True
) -> tuple[Work, ...]:
    """The work done in every way that this cluster and these caches allow.

    Parameters
    ----------
    work
        Its assignment, delivery, relay and caching are passed over.
    server
        Whether any worker may serve the others.

    Examples
    --------
    >>> cluster = Cluster(4, link_up=1e9, link_down=1e9)
    >>> [way.way for way in all_ways(cluster, Work(1000, 64), assignments=["local", "partial:0.1"])][:4]
    ['local', 'partial:0.1 + peer', 'partial:0.1 + server', 'partial:0.1 + leftover, pipelined']
    """
    ways: list[Work] = []
    excess = work.excess(cluster.n_workers) > 0
    coded = ["clique"] if excess else ["leftover"]
    if excess and cluster.n_workers <= MOST_FOR_TABLES:
        coded += ["ubershuffle", "coded"]
    for assignment in assignments:
        base = dataclasses.replace(work, assignment=assignment, delivery="peer", relay="pipelined")
        if base.kind == "local":
            ways.append(base)
            continue
        if base.kind == "aligned":
            if not (excess and server):  # to uncoded deliveries it is what 'global', or 'partial', is
                continue
            base = dataclasses.replace(base, caching="even")
        else:
            ways.append(base)
            if server:
                ways.append(dataclasses.replace(base, delivery="server"))
            if cluster.storage is not None:
                ways.append(dataclasses.replace(base, delivery="storage"))
        if server and base.kind != CHUNKS:
            for delivery in coded:
                relays = ("pipelined", "ring", "unicast") if delivery in ("clique", "leftover") else ("pipelined",)
                ways += [dataclasses.replace(base, delivery=delivery, relay=relay) for relay in relays]
    return tuple(ways)


def compare_costs(
    cluster: Cluster, ways: Sequence[Work], *, precision: str = "auto", most_samples: int = SAMPLES
) -> list[Prediction]:
    """Predict several ways on one cluster, in the order given; see :func:`predict` for the parameters.

    Examples
    --------
    >>> cluster = Cluster(8, link_up=12.5e6, link_down=12.5e6)
    >>> ways = all_ways(cluster, Work(100_000, 1024), assignments=["global"])
    >>> best = min(compare_costs(cluster, ways, precision="closed"), key=lambda p: p.exchange_seconds)
    >>> best.work.way
    'global + peer'
    """
    return [timed(cluster, way, loads) for way, loads in _loads(cluster, ways, precision, most_samples)]


def _loads(cluster: Cluster, ways: Sequence[Work], precision: str, most_samples: int) -> list[tuple[Work, Loads]]:
    return [(way, loads_of(cluster, way, precision=precision, most_samples=most_samples)) for way in ways]


def recommend(
    cluster: Cluster, ways: Sequence[Work], *, precision: str = "auto", most_samples: int = SAMPLES
) -> Recommendation:
    """The fastest way to shuffle globally, why it is that, and what would change it.

    Parameters
    ----------
    ways
        Candidates, one job's (see :func:`all_ways`), at least one of which shuffles globally. Others (``local``,
        ``partial:Q``, ``chunks``) are weighed against the best of those.

    Raises
    ------
    InvalidParameter
        If no way shuffles globally.

    Examples
    --------
    >>> cluster = Cluster(8, link_up=12.5e6, link_down=12.5e6, storage=50e6, storage_over_links=False)
    >>> advice = recommend(cluster, all_ways(cluster, Work(100_000, 1024)), precision="closed")
    >>> advice.verdict, [(change.what, change.winner.work.delivery) for change in advice.changes]
    ('Take global + peer: 941 ms an epoch.', [('links', 'storage'), ('storage', 'storage')])
    """
    candidates = _loads(cluster, ways, precision, most_samples)
    shuffling = [(way, loads) for way, loads in candidates if way.assignment in GLOBAL]
    if not shuffling:
        raise InvalidParameter.of("ways", [way.way for way in ways], "at least one with the assignment 'global'")
    predictions = [timed(cluster, *candidate) for candidate in candidates]
    best = _fastest(cluster, shuffling)
    instead = _less(best, predictions)
    chunks = [p for p in predictions if p.work.kind == CHUNKS]
    whole = min(chunks, key=_seconds, default=None)
    if whole is not None and _seconds(whole) * (1 + EQUALLY) > _seconds(best):
        whole = None
    advice: Advice = explain(cluster, best, instead, whole, _single(cluster, predictions), predictions)
    return Recommendation(
        best, instead, whole, advice.verdict, advice.reason, advice.notes, _changes(cluster, shuffling, best)
    )


def _single(cluster: Cluster, predictions: Sequence[Prediction]) -> Prediction | None:
    """Re-reading of a dataset that had one sample in a chunk, where chunks make workers read more than they need."""
    for p in predictions:
        if p.work.assignment == "global" and p.work.delivery == "storage" and p.read_amplification > 1 + EQUALLY:
            work = dataclasses.replace(p.work, chunk_rows=1)
            return timed(cluster, work, expected_loads(work, cluster))
    return None


def _seconds(prediction: Prediction) -> float:
    return prediction.exchange_seconds


def _fastest(cluster: Cluster, candidates: Sequence[tuple[Work, Loads]]) -> Prediction:
    """The fastest, and of those that are as good as equally fast the first: the simplest stand first."""
    predictions = [timed(cluster, way, loads) for way, loads in candidates]
    least = min(map(_seconds, predictions))
    return next(p for p in predictions if _seconds(p) <= least * (1 + EQUALLY))


def _less(best: Prediction, predictions: Sequence[Prediction]) -> Prediction | None:
    """What shuffles the most and still fits beside training, if the best global way does not."""
    training = best.work.training_seconds
    if training is None or best.exchange_seconds <= training:
        return None
    fits = [p for p in predictions if p.work.kind in ("local", "partial") and p.exchange_seconds <= training]
    return min(fits, key=lambda p: (-p.work.fraction, p.exchange_seconds), default=None)


def _changes(cluster: Cluster, candidates: Sequence[tuple[Work, Loads]], best: Prediction) -> tuple[Change, ...]:
    """For everything that can be bought, the nearest factors below and above 1 that make another delivery win."""
    changes: list[Change] = []
    for what, fields in SCALABLE.items():
        if all(getattr(cluster, field) in (None, math.inf) for field in fields):
            continue

        def winner(factor: float, what: str = what) -> Prediction:
            return _fastest(cluster.scaled(what, factor), candidates)

        for factors in (FACTORS[FACTORS < 1][::-1], FACTORS[FACTORS > 1]):
            found = _first_change(winner, factors.tolist(), best)
            if found is not None:
                changes.append(Change(what, *found))
    return tuple(changes)


def _first_change(
    winner: Callable[[float], Prediction], factors: Sequence[float], best: Prediction
) -> tuple[float, Prediction] | None:
    """The factor nearest to 1 at which another way wins, to about one per cent."""
    near = 1.0
    for far in factors:
        other = winner(far)
        if other.work.way != best.work.way:
            while max(near / far, far / near) > 1.01:
                middle = (near * far) ** 0.5
                at_middle = winner(middle)
                if at_middle.work.way == best.work.way:
                    near = middle
                else:
                    far, other = middle, at_middle
            return far, other
        near = far
    return None
