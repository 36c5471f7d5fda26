"""What a comparison means: facts for the sentences of ``templates/story.txt``, from the figures alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dshuffle.noninferiority import ERROR_RATE, PairedOutcome, PairedRuns, holm
from dshuffle.records import slow_rank_of
from dshuffle.report.summary import CPU_BOUND, Comparison, WayResult

CLOSE = 1.5
"""If the medians of two strategies differ by more than this factor, one is called faster even if their ranges overlap.
A single slow epoch can make ranges overlap."""

ALIKE = 1.05
"""If the medians of two strategies differ by less than this factor, none is called faster, even if ranges are apart."""

SERIES = ("gradients", "models", "unknown")
"""What a training averages, in the order of the report."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The strategies that reshuffle everything: the fastest, those with times like its times, and the slower ones."""

    fastest: WayResult
    alike: list[WayResult]
    slower: list[WayResult]

    @classmethod
    def of(cls, ways: Iterable[WayResult]) -> Ranking | None:
        """Rank the strategies by their median; None if no strategy can be ranked."""
        timed = (way for way in ways if way.choices.reshuffles_all and way.figures.epoch_spread is not None)
        ranked = sorted(timed, key=_median)
        if not ranked:
            return None
        fastest, *others = ranked
        least = _median(fastest)
        alike = [
            other
            for other in others
            if (overlap(fastest, other) and _median(other) <= CLOSE * least) or _median(other) < ALIKE * least
        ]
        return cls(fastest, alike, [other for other in others if other not in alike])

    @property
    def ways(self) -> list[WayResult]:
        """All of them."""
        return [self.fastest, *self.alike, *self.slower]

    @property
    def overlaps(self) -> bool:
        """Whether the times of the first two overlap."""
        return overlap(self.fastest, self.alike[0])

    @property
    def other(self) -> WayResult:
        """The strategy to compare the fastest one with: one that reads again, or else the next slower one."""
        return next((way for way in self.slower if way.choices.reads_store), self.slower[0])

    @property
    def times_longer(self) -> float:
        """How many times as long an epoch takes with that way."""
        return _median(self.other) / _median(self.fastest)


def _median(way: WayResult) -> float:
    assert way.figures.epoch_spread is not None
    return way.figures.epoch_spread.median


def overlap(fastest: WayResult, other: WayResult) -> bool:
    """Whether an epoch with the other strategy was as fast as one with the fastest."""
    first, second = fastest.figures.epoch_spread, other.figures.epoch_spread
    return first is not None and second is not None and second.least <= first.greatest


@dataclass(frozen=True, slots=True)
class Series:
    """The pairs of runs of one training.

    Attributes
    ----------
    groups
        Labels of strategies that learn the same, and their pairs: one shuffle before training first.
    """

    averages: str
    groups: tuple[tuple[tuple[str, ...], PairedRuns], ...]
    once: str | None
    p_values: Mapping[str, float]

    @classmethod
    def of(cls, averages: str, ways: Sequence[WayResult]) -> Series:
        """Collect the pairs of the strategies that were tested with a training."""
        tested = {way.label: way for way in ways if averages in way.pairs}
        labels: dict[int, list[str]] = {}
        for label, way in tested.items():
            labels.setdefault(id(way.pairs[averages]), []).append(label)
        once = next((label for label, way in tested.items() if _is_shuffled_once(way)), None)
        groups = sorted(labels.values(), key=lambda group: once not in group)
        runs = {group[0]: tested[group[0]].pairs[averages] for group in groups}
        by_first = holm(runs)
        p_values = {label: by_first[group[0]] for group in groups for label in group}
        return cls(averages, tuple((tuple(group), runs[group[0]]) for group in groups), once, p_values)

    @property
    def runs(self) -> PairedRuns:
        """The pairs with the most runs of the reference."""
        return max((runs for _, runs in self.groups), key=lambda runs: runs.n_pairs)

    @property
    def others(self) -> list[dict[str, str]]:
        """The other strategies, and the answer of each by itself."""
        return [
            {"label": label, "answer": runs.outcome.value if runs.outcome else "not clear yet"}
            for group, runs in self.groups[1:]
            for label in group
        ]

    @property
    def subject(self) -> str | None:
        """The strategy that the answer is about: one shuffle before training, or else the first that is not worse."""
        not_worse = (label for labels, _ in self.groups for label in labels if self.p_values[label] <= ERROR_RATE)
        return self.once or next(not_worse, None)

    @property
    def subject_runs(self) -> PairedRuns | None:
        """The pairs of that way."""
        return next((runs for group, runs in self.groups if self.subject in group), None)

    @property
    def by_chance(self) -> bool:
        """Whether the strategy is not worse by itself, but perhaps by chance, as one of several."""
        runs = self.subject_runs
        is_not_worse = runs is not None and runs.outcome is PairedOutcome.NOT_WORSE
        return is_not_worse and self.p_values[self.subject or ""] > ERROR_RATE

    @property
    def answer(self) -> str:
        """Whether to reshuffle: "no", "yes" or "cannot tell"."""
        judged = [runs for _, runs in self.groups] if self.subject_runs is None else [self.subject_runs]
        if all(runs.outcome is PairedOutcome.WORSE for runs in judged):
            return "yes"
        is_enough = self.subject_runs is not None and self.subject_runs.outcome is PairedOutcome.NOT_WORSE
        return "no" if is_enough and not self.by_chance else "cannot tell"


def series_of(comparison: Comparison) -> list[Series]:
    """The trainings that strategies were tested with."""
    return [Series.of(name, comparison.ways) for name in SERIES if any(name in way.pairs for way in comparison.ways)]


def facts_of(comparison: Comparison) -> dict[str, Any]:
    """What the sentences of a comparison are made of."""
    ways = comparison.ways
    timed = [way for way in ways if way.figures.epoch_seconds is not None]
    chunks = [
        way for way in ways if way.choices.assignment.in_chunks and way.figures.epoch_spread and way.choices.every == 1
    ]
    slow = {way.label: words for way in ways if (words := slow_rank_of(way.records))}
    ranking = Ranking.of(ways)
    return {
        "series": series_of(comparison),
        "ranking": ranking,
        "busy": [way.label for way in ranking.ways if way.limited_by_processors] if ranking else [],
        "redraws": any(way.choices.assignment.redraws_all and not way.choices.reshuffles_all for way in ways),
        "alone": min((way.figures.epoch_seconds for way in timed if not way.choices.assignment.moves), default=None),  # type: ignore[type-var]
        "chunks": min(chunks, key=_median, default=None),
        "sparse": [way for way in timed if way.choices.every > 1],
        "worth": _worth(ways),
        "begun": _hardly_begun(comparison),
        "slow_ranks": " ".join(f"With “{label}”, {words}." for label, words in slow.items()),
        "untested": [way for way in ways if not way.pairs and not way.choices.reshuffles_all],
        "cpu_bound": CPU_BOUND,
    }


def _is_shuffled_once(way: WayResult) -> bool:
    return not way.choices.assignment.moves and str(way.choices.sharding) == "random"


def _worth(ways: Sequence[WayResult]) -> dict[str, Any]:
    """Last errors: the least with reshuffling, after one shuffle before training, and in stored order."""
    finite = [way for way in ways if way.history and math.isfinite(way.history[-1].error)]
    fixed = {
        str(way.choices.sharding): way.history[-1].error for way in reversed(finite) if not way.choices.assignment.moves
    }
    reshuffled = [way.history[-1].error for way in finite if way.choices.reshuffles_all]
    epochs = max((len(way.history) for way in finite), default=0)
    once, stored = fixed.get("random"), fixed.get("contiguous")
    # The first epoch is only loaded: until the second, nothing has been reshuffled.
    if not reshuffled or once is stored is None or epochs < 2:
        return {}
    return {"errors": [min(reshuffled), once, stored], "epochs": epochs}


def _hardly_begun(comparison: Comparison) -> dict[str, Any]:
    """That training was far from its end, so that more epochs may give another answer to the pairs.

    Training has hardly begun if the last epoch improved the model by more than the margin, and by at least half of the
    mean improvement of an epoch.
    """
    pairs = next(
        (runs for way in comparison.ways for name, runs in way.pairs.items() if name == comparison.averages), None
    )
    histories = [way.history for way in comparison.ways if way.choices.reshuffles_all and len(way.history) > 2]
    if pairs is None or pairs.reason or not histories:
        return {}
    history, metric = histories[0], pairs.test.metric
    if all(metric in point.validation for point in history):
        sign = 1.0 if pairs.test.higher_is_better else -1.0
        values = [sign * point.validation[metric] for point in history]
    else:
        metric = "the error"
        start = [] if comparison.error_at_start is None else [comparison.error_at_start]
        values = [-error for error in (*start, *(point.error for point in history))]
    last, total = values[-1] - values[-2], values[-1] - values[0]
    least = pairs.relative_limit * abs(values[-1])
    if not (last > least and last >= total / (len(values) - 1) / 2) or not values[0]:
        return {}
    return {"metric": metric, "gains": [100 * gain / abs(values[0]) for gain in (total, last)]}
