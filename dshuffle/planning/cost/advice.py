"""Compare ways of shuffling by predicted cost and recommend one, with reasons and what would change the choice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment import parse_assignment
from dshuffle.planning.cost.cluster import SCALABLE, ClusterRates
from dshuffle.planning.cost.explain import EQUALLY, Advice, exchanges_part, explain
from dshuffle.planning.cost.job import Work
from dshuffle.planning.cost.loads_expected import expected_loads
from dshuffle.planning.cost.prediction import Prediction, loads_of, timed
from dshuffle.planning.delivery import SIMPLEST, Circumstances, suitable_deliveries
from dshuffle.planning.delivery.definition import Loads

ASSIGNMENTS = ("local", "partial:0.1", "global", "aligned", "chunks")
SAMPLES = 100_000
"""Most samples of a plan made to compare ways. Fewer than in :func:`predict`, because many plans are made."""
FACTORS = np.geomspace(1 / 256, 256, 17)
"""Factors by which rates are scaled to find out what would change the recommendation."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the cluster that would make another way the fastest.

    Parameters
    ----------
    what
        Scaled part of the cluster: a key of :data:`~dshuffle.planning.cost.cluster.SCALABLE`.
    factor
        Changed rate divided by the present rate.
    winner
        Prediction for the fastest way on the changed cluster.
    """

    what: str
    factor: float
    winner: Prediction


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended way of shuffling, and why.

    Parameters
    ----------
    best
        Fastest way to shuffle globally.
    instead
        Way that shuffles less, if training does not hide ``best`` but hides this one. None if training hides
        ``best``, or if the training time is unknown.
    whole_chunks
        Way that moves whole chunks, if it is faster than ``best``; otherwise None.
    verdict, reason
        One sentence each.
    notes
        Further sentences.
    changes
        For each part of the cluster, the smallest slowdown and the smallest speed-up that would make another way the
        fastest.
    """

    best: Prediction
    instead: Prediction | None
    whole_chunks: Prediction | None
    verdict: str
    reason: str
    notes: tuple[str, ...]
    changes: tuple[Change, ...]


def all_ways(
    cluster: ClusterRates, work: Work, *, assignments: Sequence[str] = ASSIGNMENTS, server: bool = True
) -> tuple[Work, ...]:
    """List every way of doing the work that the cluster and the caches allow.

    Parameters
    ----------
    work
        Its assignment, delivery, relay and caching are ignored.
    server
        Whether to include ways that need a server.

    Examples
    --------
    >>> cluster = ClusterRates(4, link_up=1e9, link_down=1e9)
    >>> [way.way for way in all_ways(cluster, Work(1000, 64), assignments=["local", "partial:0.1"])][:4]
    ['local', 'partial:0.1 + peer', 'partial:0.1 + server', 'partial:0.1 + leftover, pipelined']
    """
    ways: list[Work] = []
    excess = work.excess(cluster.n_workers) > 0
    circumstances = Circumstances(cluster.n_workers, excess, has_server=server, has_storage=cluster.storage is not None)
    for name in assignments:
        rule = parse_assignment(name)
        choices = work.choices.with_assignment(rule, caching=None, delivery=SIMPLEST, relay="pipelined")
        base = dataclasses.replace(work, choices=choices)
        if not rule.moves:
            ways.append(base)
            continue
        families: set[str] = set()
        for delivery in suitable_deliveries(circumstances):
            if not delivery.gains_by(needs_holders=rule.needs_holders, in_chunks=rule.in_chunks, excess=excess):
                continue
            relays = delivery.relays[:1] if delivery.family in families else delivery.relays
            families.add(delivery.family)  # the first one of a family is compared with every relay
            ways += [base.with_choices(delivery=delivery.name, relay=relay) for relay in relays]
    return tuple(ways)


def compare_costs(cluster: ClusterRates, ways: Sequence[Work], *, precision: str = "auto") -> list[Prediction]:
    """Predict several ways on one cluster, in the given order. The parameters are those of :func:`predict`.

    Real plans have at most :data:`SAMPLES` samples.

    Examples
    --------
    >>> cluster = ClusterRates(8, link_up=12.5e6, link_down=12.5e6)
    >>> ways = all_ways(cluster, Work(100_000, 1024), assignments=["global"])
    >>> best = min(compare_costs(cluster, ways, precision="closed"), key=lambda p: p.exchange_seconds)
    >>> best.work.way
    'global + peer'
    """
    return [timed(cluster, way, loads) for way, loads in _loads(cluster, ways, precision)]


def _loads(cluster: ClusterRates, ways: Sequence[Work], precision: str) -> list[tuple[Work, Loads]]:
    return [(way, loads_of(cluster, way, precision=precision, most_samples=SAMPLES)) for way in ways]


def recommend(cluster: ClusterRates, ways: Sequence[Work], *, precision: str = "auto") -> Recommendation:
    """Recommend the fastest way to shuffle globally, with reasons and what would change the recommendation.

    Parameters
    ----------
    ways
        Candidate ways for one job (see :func:`all_ways`). At least one must shuffle globally. Others (``local``,
        ``partial:Q``, ``chunks``) are compared with the best of these.

    Raises
    ------
    InvalidParameter
        If no way shuffles globally.

    Examples
    --------
    >>> cluster = ClusterRates(8, link_up=12.5e6, link_down=12.5e6, storage=50e6, storage_over_links=False)
    >>> advice = recommend(cluster, all_ways(cluster, Work(100_000, 1024)), precision="closed")
    >>> advice.verdict, [(change.what, change.winner.work.delivery.name) for change in advice.changes]
    ('Use global + peer: 942 ms per epoch.', [('links', 'storage'), ('storage', 'storage')])
    """
    candidates = _loads(cluster, ways, precision)
    shuffling = [(way, loads) for way, loads in candidates if way.choices.assignment.redraws_all]
    if not shuffling:
        raise InvalidParameter.of("ways", [way.way for way in ways], "a list with a 'global' or 'aligned' way")
    predictions = [timed(cluster, *candidate) for candidate in candidates]
    best = _fastest(cluster, shuffling)
    instead = _less(best, predictions)
    chunks = [p for p in predictions if p.work.in_chunks]
    whole = min(chunks, key=_seconds, default=None)
    if whole is not None and (not _seconds(best) or _seconds(whole) * (1 + EQUALLY) > _seconds(best)):
        whole = None
    advice: Advice = explain(cluster, best, instead, whole, _single(cluster, predictions), predictions)
    return Recommendation(
        best, instead, whole, advice.verdict, advice.reason, advice.notes, _changes(cluster, shuffling, best)
    )


def _single(cluster: ClusterRates, predictions: Sequence[Prediction]) -> Prediction | None:
    """Predict re-reading with one sample per chunk, if the present chunks make workers read more than they need."""
    for p in predictions:
        if p.work.choices.assignment.redraws_all and p.read_amplification > 1 + EQUALLY:
            work = dataclasses.replace(p.work, chunk_rows=1)
            return timed(cluster, work, expected_loads(work, cluster))
    return None


def _seconds(prediction: Prediction) -> float:
    return prediction.exchange_seconds


def _fastest(cluster: ClusterRates, candidates: Sequence[tuple[Work, Loads]]) -> Prediction:
    """Return the first candidate whose time is about the least; candidates are ordered from simple to complex."""
    predictions = [timed(cluster, way, loads) for way, loads in candidates]
    least = min(map(_seconds, predictions))
    return next(p for p in predictions if _seconds(p) <= least * (1 + EQUALLY))


def _less(best: Prediction, predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the way that shuffles the most and is hidden by training, if the best global way is not hidden."""
    training = best.work.training_seconds
    if training is None or best.exchange_seconds <= training:
        return None
    fits = [
        p
        for p in predictions
        if (not p.work.choices.assignment.moves or exchanges_part(p)) and p.exchange_seconds <= training
    ]
    return min(fits, key=lambda p: (-p.work.fraction, p.exchange_seconds), default=None)


def _changes(cluster: ClusterRates, candidates: Sequence[tuple[Work, Loads]], best: Prediction) -> tuple[Change, ...]:
    """Find, for each scalable part, the factors nearest to 1, below and above, at which another way wins."""
    changes: list[Change] = []
    for what, fields in SCALABLE.items():
        if all(getattr(cluster, field) in (None, math.inf) for field in fields):
            continue

        def winner(factor: float, what: str = what) -> Prediction:
            return _fastest(cluster.scaled(what, factor), candidates)

        for factors in (FACTORS[FACTORS < 1][::-1], FACTORS[FACTORS > 1]):
            change = _first_change(winner, factors.tolist(), best)
            if change is not None:
                changes.append(Change(what, *change))
    return tuple(changes)


def _first_change(
    winner: Callable[[float], Prediction], factors: Sequence[float], best: Prediction
) -> tuple[float, Prediction] | None:
    """Find the factor nearest to 1 at which another way wins, with a precision of about 1 %."""
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
