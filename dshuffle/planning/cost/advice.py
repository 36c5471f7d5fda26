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
from dshuffle.planning.cost.job import Work
from dshuffle.planning.cost.loads import loads_of
from dshuffle.planning.cost.prediction import Prediction, timed
from dshuffle.planning.delivery import SIMPLEST, Circumstances, suitable_deliveries
from dshuffle.planning.delivery.definition import Loads
from dshuffle.units import human_bytes, human_seconds

ASSIGNMENTS = ("local", "partial:0.1", "global", "aligned", "chunks")
SAMPLES = 100_000
"""Most samples of a plan made to compare ways. Fewer than in :func:`predict`, because many plans are made."""
EQUALLY = 0.02
"""Relative tolerance for equal times."""
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
    predictions
        Those of all ways, in their order.
    """

    best: Prediction
    instead: Prediction | None
    whole_chunks: Prediction | None
    verdict: str
    reason: str
    notes: tuple[str, ...]
    changes: tuple[Change, ...]
    predictions: tuple[Prediction, ...]


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
        if rule.in_chunks and -(-work.n_samples // base.group_rows) < cluster.n_workers:
            continue  # some workers would have nothing
        families: set[str] = set()
        for delivery in suitable_deliveries(circumstances):
            if not delivery.gains_by(needs_holders=rule.needs_holders, in_chunks=rule.in_chunks, excess=excess):
                continue
            relays = delivery.relays[:1] if delivery.family in families else delivery.relays
            families.add(delivery.family)  # the first one of a family is compared with every relay
            ways += [base.with_choices(delivery=delivery.name, relay=relay) for relay in relays]
    return tuple(ways)


def compare_costs(cluster: ClusterRates, ways: Sequence[Work]) -> list[Prediction]:
    """Predict several ways on one cluster, in the given order. Plans have at most :data:`SAMPLES` samples.

    Examples
    --------
    >>> cluster = ClusterRates(8, link_up=12.5e6, link_down=12.5e6)
    >>> ways = all_ways(cluster, Work(100_000, 1024), assignments=["global"])
    >>> best = min(compare_costs(cluster, ways), key=lambda p: p.exchange_seconds)
    >>> best.work.way
    'global + peer'
    """
    return [timed(cluster, way, loads) for way, loads in _loads(cluster, ways)]


def _loads(cluster: ClusterRates, ways: Sequence[Work]) -> list[tuple[Work, Loads]]:
    return [(way, loads_of(cluster, way, most_samples=SAMPLES)) for way in ways]


def recommend(cluster: ClusterRates, ways: Sequence[Work]) -> Recommendation:
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
    >>> advice = recommend(cluster, all_ways(cluster, Work(100_000, 1024)))
    >>> advice.verdict, [(change.what, change.winner.work.delivery.name) for change in advice.changes]
    ('Use global + peer: 948 ms per epoch.', [('links', 'storage'), ('storage', 'storage')])
    """
    candidates = _loads(cluster, ways)
    shuffling = [(way, loads) for way, loads in candidates if way.choices.assignment.redraws_all]
    if not shuffling:
        raise InvalidParameter.of("ways", [way.way for way in ways], "a list with a 'global' or 'aligned' way")
    predictions = [timed(cluster, *candidate) for candidate in candidates]
    best = _fastest(cluster, shuffling)
    whole = min((p for p in predictions if p.work.in_chunks), key=_seconds, default=None)
    if whole is not None and (not _seconds(best) or _seconds(whole) * (1 + EQUALLY) > _seconds(best)):
        whole = None
    training, instead = best.work.training_seconds, None
    pace = f"{human_seconds(_seconds(best))} per {'epoch' if best.work.choices.every == 1 else 'exchange'}"
    verdict, notes = f"Use {best.work.way}: {pace}.", []
    if training is not None and _seconds(best) <= training:
        notes.append(f"The exchange is hidden behind {human_seconds(training)} of training.")
    elif training is not None:
        parts = [p for p in predictions if _exchanges_part(p)]
        hidden = [p for p in predictions if not p.work.choices.assignment.moves] + parts
        fits = [p for p in hidden if _seconds(p) <= training]
        # Of those that training hides, the way that shuffles the most.
        instead = min(fits, key=lambda p: (-p.work.fraction, _seconds(p)), default=None)
        if instead is not None:
            verdict = (
                f"Do not shuffle globally: the fastest way ({best.work.way}) takes {pace}, but training takes only "
                f"{human_seconds(training)}. Use {instead.work.way} ({human_seconds(_seconds(instead))})."
            )
        else:
            notes.append(f"The exchange takes longer than training ({human_seconds(training)}).")
        sent = min((p for p in parts if _seconds(p) and not p.storage_bytes), key=_seconds, default=None)
        if sent is not None and 0.001 <= (fraction := sent.work.fraction * training / _seconds(sent)) < 1:
            notes.append(f"Training can hide the exchange of up to partial:{fraction:.2g}.")
    if whole is not None:
        took = human_seconds(_seconds(whole))
        notes.append(
            f"Moving whole chunks ({whole.work.way}) takes {took}. It mixes less, as their rows stay together."
        )
    read = next((p for p in predictions if p.work.choices.assignment.redraws_all and p.storage_bytes), None)
    if read is not None and read.read_amplification > 1 + EQUALLY and not best.storage_bytes:
        work = dataclasses.replace(read.work, chunk_rows=1)
        single = timed(cluster, work, loads_of(cluster, work, most_samples=SAMPLES))
        notes.append(f"With one row per chunk, re-reading would take {human_seconds(_seconds(single))}.")
    changes, reason = _changes(cluster, shuffling, best), _reason(best, predictions)
    return Recommendation(best, instead, whole, verdict, reason, tuple(notes), changes, tuple(predictions))


def _exchanges_part(prediction: Prediction) -> bool:
    """Whether every worker exchanges a part of its samples, one by one."""
    assignment = prediction.work.choices.assignment
    return assignment.moves and not (assignment.redraws_all or assignment.in_chunks or assignment.needs_holders)


def _reason(best: Prediction, predictions: Sequence[Prediction]) -> str:
    """What limits the best way, and the fastest one of each other family."""
    families: dict[str, Prediction] = {}
    for p in sorted(predictions, key=_seconds):
        if p.work.choices.assignment.redraws_all and p.work.delivery.family != best.work.delivery.family:
            families.setdefault(p.work.delivery.family, p)
    sentences = [f"{best.work.delivery.name}: {_limit(best)}"]
    for p in families.values():
        ratio = f"would take {_seconds(p) / _seconds(best):.3g} times as long" if _seconds(best) else "takes longer"
        sentences.append(f"{p.work.delivery.name} {ratio}: {_limit(p)}")
    return "; ".join(sentences) + "."


def _limit(p: Prediction) -> str:
    """What limits the speed of a way."""
    if not p.resources:
        return "nothing has to move"
    name, seconds = p.resources[0]
    nbytes = {"server egress": p.server_egress, "worker ingress": p.most_ingress, "storage": p.storage_bytes}.get(name)
    of = "" if nbytes is None else f" of {human_bytes(nbytes)}"
    more = f", {p.read_amplification:.3g} times what it needs" if p.read_amplification > 1 + EQUALLY else ""
    coded = f", {p.needed / p.packets:.1f} rows per packet" if p.packets < p.needed else ""
    return f"{name}{of} takes {human_seconds(seconds)}{more}{coded}"


def _seconds(prediction: Prediction) -> float:
    return prediction.exchange_seconds


def _fastest(cluster: ClusterRates, candidates: Sequence[tuple[Work, Loads]]) -> Prediction:
    """Return the first candidate whose time is about the least; candidates are ordered from simple to complex."""
    predictions = [timed(cluster, way, loads) for way, loads in candidates]
    least = min(map(_seconds, predictions))
    return next(p for p in predictions if _seconds(p) <= least * (1 + EQUALLY))


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
