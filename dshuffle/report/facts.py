"""What a comparison means: facts for the sentences of ``templates/story.txt``, from the figures alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dshuffle.noninferiority import ERROR_RATE, PairedOutcome, PairedRuns, holm
from dshuffle.report.slow_rank import slow_ranks_of
from dshuffle.report.summary import CPU_BOUND, Comparison, Figures, Spread, WayResult, figures, limited_by_processors

CLOSE = 1.5
"""If the medians of two ways differ by more than this factor, one is called faster even if their ranges overlap. A
single slow epoch can make ranges overlap."""

ALIKE = 1.05
"""If the medians of two ways differ by less than this factor, none is called faster even if their ranges are apart."""

SERIES = ("gradients", "models", "unknown")
"""What a training averages, in the order of the report."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A way and its figures."""

    way: WayResult
    figures: Figures

    @property
    def is_local(self) -> bool:
        """Whether nothing moves."""
        return not self.way.choices.assignment.moves

    @property
    def spread(self) -> Spread:
        """Seconds of an epoch, of a way that ran for two epochs or more."""
        assert self.figures.epoch_spread is not None
        return self.figures.epoch_spread


@dataclass(frozen=True, slots=True)
class Ranking:
    """The ways that reshuffle everything: the fastest, those with times like its times, and the slower ones."""

    fastest: Timed
    alike: tuple[Timed, ...]
    slower: tuple[Timed, ...]

    @classmethod
    def of(cls, timed: Iterable[Timed]) -> Ranking | None:
        """Rank the ways by their median; None if no way can be ranked."""
        ranked = sorted(
            (one for one in timed if one.way.choices.reshuffles_all and one.figures.epoch_spread is not None),
            key=lambda one: one.spread.median,
        )
        if not ranked:
            return None
        fastest, *others = ranked

        def is_alike(other: Timed) -> bool:
            is_close = overlap(fastest, other) and other.spread.median <= CLOSE * fastest.spread.median
            return is_close or other.spread.median < ALIKE * fastest.spread.median

        return cls(fastest, tuple(filter(is_alike, others)), tuple(one for one in others if not is_alike(one)))

    @property
    def ways(self) -> tuple[Timed, ...]:
        """All of them."""
        return (self.fastest, *self.alike, *self.slower)

    @property
    def overlaps(self) -> bool:
        """Whether the times of the first two overlap."""
        return overlap(self.fastest, self.alike[0])

    @property
    def other(self) -> Timed:
        """The way to compare the fastest one with: one that reads again, or else the next slower one."""
        return next((one for one in self.slower if one.way.choices.reads_store), self.slower[0])

    @property
    def is_limited(self) -> bool:
        """Whether processors limit the fastest way."""
        return limited_by_processors(self.fastest.way, self.fastest.figures)

    @property
    def busy(self) -> list[str]:
        """The ways whose exchanges processors limit."""
        return [one.way.label for one in self.ways if limited_by_processors(one.way, one.figures)]


def overlap(fastest: Timed, other: Timed) -> bool:
    """Whether an epoch with the other way was as fast as one with the fastest."""
    return other.spread.least <= fastest.spread.greatest


@dataclass(frozen=True, slots=True)
class Series:
    """The pairs of runs of one training.

    Attributes
    ----------
    groups
        Labels of ways that learn the same, and their pairs: one shuffle before training first.
    """

    averages: str
    groups: tuple[tuple[tuple[str, ...], PairedRuns], ...]
    once: str | None
    p_values: Mapping[str, float]

    @classmethod
    def of(cls, averages: str, ways: Sequence[WayResult]) -> Series:
        """Collect the pairs of the ways that were tested with a training."""
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
        """The other ways, and the answer of each by itself."""
        return [
            {"label": label, "answer": runs.outcome.value if runs.outcome else "not clear yet"}
            for group, runs in self.groups[1:]
            for label in group
        ]

    @property
    def subject(self) -> str | None:
        """The way that the answer is about: one shuffle before training, or else the first that is not worse."""
        if self.once is not None:
            return self.once
        return next((label for group, _ in self.groups for label in group if self.p_values[label] <= ERROR_RATE), None)

    @property
    def subject_runs(self) -> PairedRuns | None:
        """The pairs of that way."""
        return next((runs for group, runs in self.groups if self.subject in group), None)

    @property
    def by_chance(self) -> bool:
        """Whether the way is not worse by itself, but perhaps by chance, as one of several."""
        runs = self.subject_runs
        if runs is None or self.subject is None or runs.outcome is not PairedOutcome.NOT_WORSE:
            return False
        return self.p_values[self.subject] > ERROR_RATE

    @property
    def answer(self) -> str:
        """Whether to reshuffle: "no", "yes" or "cannot tell"."""
        outcomes = [runs.outcome for _, runs in self.groups]
        if self.once is None:
            worse = all(outcome is PairedOutcome.WORSE for outcome in outcomes)
            return "no" if self.subject else "yes" if worse else "cannot tell"
        runs = self.subject_runs
        assert runs is not None
        if runs.outcome is PairedOutcome.NOT_WORSE and not self.by_chance:
            return "no"
        return "yes" if runs.outcome is PairedOutcome.WORSE else "cannot tell"


def series_of(comparison: Comparison) -> list[Series]:
    """The trainings that ways were tested with."""
    return [Series.of(name, comparison.ways) for name in SERIES if any(name in way.pairs for way in comparison.ways)]


def facts_of(comparison: Comparison) -> dict[str, Any]:
    """What the sentences of a comparison are made of."""
    timed = [Timed(way, figures(way)) for way in comparison.ways]
    seconds = [one.figures.epoch_seconds for one in timed if one.is_local and one.figures.epoch_seconds is not None]
    chunks = [
        one
        for one in timed
        if one.way.choices.assignment.in_chunks and one.figures.epoch_spread and one.way.choices.every == 1
    ]
    return {
        "series": series_of(comparison),
        "ranking": Ranking.of(timed),
        "redraws": any(
            way.choices.assignment.redraws_all and not way.choices.reshuffles_all for way in comparison.ways
        ),
        "alone": min(seconds, default=None),
        "chunks": min(chunks, key=lambda one: one.spread.median, default=None),
        "sparse": [one for one in timed if one.way.choices.every > 1 and one.figures.epoch_seconds is not None],
        "worth": _worth(timed),
        "begun": _hardly_begun(comparison),
        "slow_ranks": slow_ranks_of(comparison.ways),
        "untested": [way for way in comparison.ways if not way.pairs and not way.choices.reshuffles_all],
        "cpu_bound": CPU_BOUND,
    }


def _is_shuffled_once(way: WayResult) -> bool:
    return not way.choices.assignment.moves and str(way.choices.sharding) == "random"


def _worth(timed: Sequence[Timed]) -> dict[str, Any]:
    """Last errors: the least with reshuffling, after one shuffle before training, and in stored order."""
    errors = [(one, one.figures.last_error) for one in timed]
    finite = [(one, error) for one, error in errors if error is not None and math.isfinite(error)]
    fixed = {str(one.way.choices.sharding): error for one, error in reversed(finite) if one.is_local}
    reshuffled = [error for one, error in finite if one.way.choices.reshuffles_all]
    epochs = max((len(one.way.history) for one, _ in finite), default=0)
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
