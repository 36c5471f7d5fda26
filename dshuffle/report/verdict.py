"""What a comparison means: one sentence that answers, and at most three that explain.

The sentences follow from the figures alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dshuffle.report.slow_rank import slow_ranks_of
from dshuffle.report.summary import (
    CPU_BOUND,
    Comparison,
    Figures,
    Spread,
    WayResult,
    figures,
    limited_by_processors,
)
from dshuffle.units import ERROR_DIGITS, human_numbers, human_ratio, human_seconds

CLOSE = 1.5
"""If the medians of two ways differ by more than this factor, one is called faster even if their ranges overlap. A
single slow epoch can make ranges overlap."""

ALIKE = 1.05
"""If the medians of two ways differ by less than this factor, none is called faster even if their ranges are apart."""


def verdict(comparison: Comparison) -> str:
    """Return all sentences as one text."""
    return " ".join(verdict_sentences(comparison))


def verdict_sentences(comparison: Comparison) -> tuple[str, ...]:
    """Return the answers, which are short; then other pairs, times, errors, a doubt and slow ranks, if there are any.

    The first answer is whether one shuffle before training will do, if that was tested in pairs. If training has
    hardly begun, the next sentence says so.
    """
    measured = [_MeasuredWay(way, figures(way)) for way in comparison.ways]
    ranking = _Ranking.of(measured)
    first, *others = _pairs(comparison.ways) or [""]
    if ranking is None:
        answer = _no_ranking(measured)
        times = _sparse_times(measured)
        doubts: tuple[str, ...] = (_stored_order_sentence(comparison), slow_ranks_of(comparison.ways))
    else:
        answer = f"To reshuffle everything every epoch, {ranking.use}."
        times = _times(measured, ranking)
        doubts = (_stored_order_sentence(comparison), _doubt(ranking), slow_ranks_of(comparison.ways))
    begun = _hardly_begun(comparison)
    errors = _errors(measured, comparison)
    return tuple(filter(None, (first, begun, answer, " ".join(others), times, errors, *doubts)))


def recommended_labels(comparison: Comparison) -> frozenset[str]:
    """Labels of the ways that the verdict recommends for reshuffling everything."""
    ranking = _Ranking.of(_MeasuredWay(way, figures(way)) for way in comparison.ways)
    return frozenset(() if ranking is None else (way.way.label for way in (ranking.fastest, *ranking.alike[:1])))


@dataclass(frozen=True, slots=True)
class _MeasuredWay:
    way: WayResult
    figures: Figures

    @property
    def label(self) -> str:
        return f"“{self.way.label}”"

    @property
    def is_global(self) -> bool:
        return self.way.choices.reshuffles_all

    @property
    def is_local(self) -> bool:
        return not self.way.choices.assignment.moves

    @property
    def is_sparse(self) -> bool:
        return self.way.choices.every > 1

    @property
    def spread(self) -> Spread:
        """Seconds of an epoch, of a way that ran for two epochs or more."""
        assert self.figures.epoch_spread is not None
        return self.figures.epoch_spread


@dataclass(frozen=True, slots=True)
class _Ranking:
    """The ways that reshuffle everything: the fastest, those with times like its times, and the slower ones."""

    fastest: _MeasuredWay
    alike: tuple[_MeasuredWay, ...]
    slower: tuple[_MeasuredWay, ...]

    @classmethod
    def of(cls, measured: Iterable[_MeasuredWay]) -> _Ranking | None:
        """Rank the ways by their median; None if no way can be ranked."""
        ranked = sorted(
            (result for result in measured if result.is_global and result.figures.epoch_spread is not None),
            key=lambda result: result.spread.median,
        )
        if not ranked:
            return None
        fastest, *remaining = ranked
        close = {
            id(result)
            for result in remaining
            if result.spread.median < ALIKE * fastest.spread.median
            or (_overlap(fastest, result) and result.spread.median <= CLOSE * fastest.spread.median)
        }
        alike = tuple(result for result in remaining if id(result) in close)
        return cls(fastest, alike, tuple(result for result in remaining if id(result) not in close))

    @property
    def use(self) -> str:
        """What to use, and how much faster it is than a way that reads again, or than the next slower way."""
        if self.alike:
            differ = f"median times differ by less than {100 * (ALIKE - 1):.0f} %"
            reason = "epochs take about the same time" if _overlap(self.fastest, self.alike[0]) else differ
            return f"use {self.fastest.label} or {self.alike[0].label}, whose {reason}"
        if not self.slower:
            return f"use {self.fastest.label}, the only such way that ran"
        rereading = [result for result in self.slower if result.way.choices.reads_store]
        other = (*rereading, *self.slower)[0]
        ratio = human_ratio(other.spread.median / self.fastest.spread.median)
        limited = limited_by_processors(self.fastest.way, self.fastest.figures)
        where = " here" if limited else ""
        return f"use {self.fastest.label} (an epoch takes {ratio} times as long{where} with {other.label})"


def _overlap(fastest: _MeasuredWay, other: _MeasuredWay) -> bool:
    """Whether an epoch with the other way was as fast as one with the fastest."""
    return other.spread.least <= fastest.spread.greatest


def _no_ranking(measured: Iterable[_MeasuredWay]) -> str:
    """Why no way can be called the fastest, and what to add."""
    if any(result.way.choices.assignment.redraws_all and not result.is_global for result in measured):
        return (
            "No way reshuffles everything before every epoch, so none can be called the fastest. Add one with every=1 "
            "(--every 1)."
        )
    return "No way that reshuffles everything ran for two epochs or more, so none can be called the fastest."


@dataclass(frozen=True, slots=True)
class _Worth:
    """Last errors: the least with reshuffling, after one shuffle before training, and in stored order."""

    reshuffled: float
    once: float | None
    stored: float | None
    epochs: int

    @classmethod
    def of(cls, measured: Iterable[_MeasuredWay]) -> _Worth | None:
        """Collect the errors; None if there is nothing to compare."""
        errors = [(result, result.figures.last_error) for result in measured]
        finite = [(result, error) for result, error in errors if error is not None and math.isfinite(error)]
        reshuffled = [error for result, error in finite if result.is_global]
        fixed = {str(result.way.choices.sharding): error for result, error in reversed(finite) if result.is_local}
        once, stored = fixed.get("random"), fixed.get("contiguous")
        epochs = max((len(result.way.history) for result, _ in finite), default=0)
        # The first epoch is only loaded: until the second, nothing has been reshuffled.
        if not reshuffled or (once is None and stored is None) or epochs < 2:
            return None
        return cls(min(reshuffled), once, stored, epochs)


def _pairs(ways: Iterable[WayResult]) -> list[str]:
    """What pairs of runs say of each way: first of one shuffle before training, if that ran."""
    tested = [way for way in ways if way.pairs is not None]
    labels: dict[tuple[str, ...], list[WayResult]] = {}
    for way in tested:  # ways that learn the same share their pairs, and a null pair is that of all ways
        pairs = way.pairs
        assert pairs is not None
        metrics = () if pairs.reason else map(str, pairs.way)
        labels.setdefault((pairs.test.metric, str(pairs), *metrics), []).append(way)
    groups = sorted(labels.values(), key=lambda group: not _is_shuffled_once(group[0]))
    sentences: list[str] = []
    for group in groups:
        pairs = group[0].pairs
        assert pairs is not None
        # The metric is explained where it first stands.
        metric, meaning = pairs.test.metric, "" if sentences else pairs.test.meaning
        labels_of_group = _listed([f"“{way.label}”" for way in group])
        sentences.append(
            f"{labels_of_group} against reshuffling, in {metric}{f' ({meaning})' if meaning else ''}: {pairs}."
        )
    return sentences


def _hardly_begun(comparison: Comparison) -> str:
    """That training was far from its end, so that more epochs may give another answer to the pairs.

    Training has hardly begun if the last epoch improved the model by more than the margin, and by at least half of the
    mean improvement of an epoch.
    """
    pairs = next((way.pairs for way in comparison.ways if way.pairs is not None), None)
    histories = [way.history for way in comparison.ways if way.choices.reshuffles_all and len(way.history) > 2]
    if pairs is None or pairs.reason or not histories:
        return ""
    history, metric = histories[0], pairs.test.metric
    if has_metric := all(metric in point.validation for point in history):
        sign = 1.0 if pairs.test.higher_is_better else -1.0
        values = [sign * point.validation[metric] for point in history]
        least = pairs.limit
    else:
        start = [] if comparison.error_at_start is None else [comparison.error_at_start]
        values = [-error for error in (*start, *(point.error for point in history))]
        least = pairs.relative_limit * abs(values[-1])
    last, total = values[-1] - values[-2], values[-1] - values[0]
    if not (last > least and last >= total / (len(values) - 1) / 2):
        return ""
    if has_metric:
        shown = [f"{text}{pairs.percent}" for text in human_numbers([pairs.scaled(total), pairs.scaled(last)], 3)]
    else:
        shown = [f"{text} %" for text in human_numbers([100 * gain / abs(values[0]) for gain in (total, last)], 2)]
    what = f"{metric} improved" if has_metric else "the error fell"
    course = f"by {shown[0]} in all, of which {shown[1]} in the last epoch"
    if last > total:
        course = f"by {shown[1]} in the last epoch, after it had become worse"
    return (
        f"With reshuffling, {what} {course}: training has hardly begun. "
        "Before you rely on the answer, train for more epochs, or with a larger step."
    )


def _is_shuffled_once(way: WayResult) -> bool:
    return not way.choices.assignment.moves and str(way.choices.sharding) == "random"


def _times(measured: list[_MeasuredWay], ranking: _Ranking) -> str:
    """Seconds of an epoch with every way that was ranked, without an exchange, and with the fastest way by chunks."""
    ranked = (ranking.fastest, *ranking.alike, *ranking.slower)
    times = [f"{human_seconds(result.figures.epoch_seconds)} with {result.label}" for result in ranked]
    local = [result.figures.epoch_seconds for result in measured if result.is_local]
    if alone := [seconds for seconds in local if seconds is not None]:
        times.append(f"{human_seconds(min(alone))} without an exchange")
    sentences = [f"An epoch takes {_listed(times)}. The next exchange runs beside training."]
    chunks = [
        result
        for result in measured
        if result.way.choices.assignment.in_chunks and result.figures.epoch_spread and not result.is_sparse
    ]
    if chunks:
        best = min(chunks, key=lambda result: result.spread.median)
        seconds = human_seconds(best.figures.epoch_seconds)
        sentences.append(f"{best.label} keeps the rows of a chunk together: an epoch takes {seconds}.")
    return " ".join(filter(None, [*sentences, _sparse_times(measured)]))


def _sparse_times(measured: list[_MeasuredWay]) -> str:
    """Mean seconds of an epoch with every way in which some epochs have no exchange."""
    times = [
        f"{human_seconds(result.figures.epoch_seconds)} with {result.label}"
        for result in measured
        if result.is_sparse and result.figures.epoch_seconds is not None
    ]
    return f"On average over epochs with and without an exchange, an epoch takes {_listed(times)}." if times else ""


def _errors(measured: list[_MeasuredWay], comparison: Comparison) -> str:
    worth = _Worth.of(measured)
    if worth is None:
        return ""
    reshuffled, once, stored = human_numbers([worth.reshuffled, worth.once, worth.stored], ERROR_DIGITS)
    parts = [f"{reshuffled} with reshuffling"]
    if worth.once is not None:
        parts.append(f"{once} after one shuffle")
    if worth.stored is not None:
        random = ", which is random" if comparison.stored_at_random else ""
        parts.append(f"{stored} in stored order{random}")
    tested = any(result.way.pairs is not None for result in measured)
    doubt = "" if tested else " Single runs do not tell whether they differ by chance."
    return f"After {worth.epochs} epochs, {comparison.error_meaning} is {_listed(parts)}.{doubt}"


def _stored_order_sentence(comparison: Comparison) -> str:
    """Which ways only seem to train in an order that matters. Ways that draw all samples anew never do."""
    labels = [
        f"“{way.label}”"
        for way in comparison.ways
        if str(way.choices.sharding) == "contiguous" and not way.choices.assignment.redraws_all
    ]
    if not comparison.stored_at_random or not labels:
        return ""
    starts = "starts" if len(labels) == 1 else "start"
    return (
        "The dataset is stored in random order, as far as pairs of neighbouring rows show. So "
        f"{_listed(labels)} {starts} from random shards, too."
    )


def _doubt(ranking: _Ranking) -> str:
    """Which of the times do not describe a network or a store."""
    ranked = (ranking.fastest, *ranking.alike, *ranking.slower)
    observed = [result for result in ranked if result.figures.cpu_idle is not None]
    busy = [result.label for result in observed if limited_by_processors(result.way, result.figures)]
    if not busy:
        return ""
    which = "all of these ways" if len(busy) == len(observed) > 1 else _listed(busy)
    return (
        f"Processors were idle for less than {100 * CPU_BOUND:.0f} % of an exchange with {which}: they, or other "
        "programs on them, limit these exchanges, not the network or the store."
    )


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
