"""Whether a strategy of training is not worse than a reference by a margin: a paired test with an error rate.

Both runs of a pair share initial weights, batch seeds and a held-out set, and differ in the strategy alone. Pairs are
added until the answer is clear, or until there are as many as the user allows.

References
----------
C. Nadeau and Y. Bengio, "Inference for the generalization error", Machine Learning, 2003: held-out sets that are drawn
anew from one dataset overlap, so the mean of J differences has the variance (1/J + n_test/n_train) s² and not s²/J.
K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika, 1983: the error rate is
spent look by look. Here it is spent as the square of the fraction of the pairs, and the parts are added (Bonferroni).
S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics, 1979.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.units import decimals_of, human_numbers

__all__ = ["ERROR_RATE", "FEWEST_PAIRS", "Margin", "PairedOutcome", "PairedRuns", "PairedTest", "holm"]

ERROR_RATE = 0.05
"""Probability of a wrong "not worse" if the difference is exactly the margin, over all looks together."""

FEWEST_PAIRS = 5
"""Least number of pairs. The variance of fewer differences is hardly known."""

FEW_PAIRS = 12
"""Up to so many pairs, a sign-flip test must agree with Student's t, which skewed differences mislead."""

DIGITS = 3
"""Significant digits of differences and their bounds."""

SAME = 1e-6
"""Differences between values of a metric, as a fraction of the largest one, that are rounding and not its step."""

MARGINS = "a number > 0 in the unit of the metric, or a percentage of it such as '1%'"

DIRECTIONS = dict.fromkeys(("loss", "error", "mse", "rmse", "mae", "nll", "perplexity"), False)
DIRECTIONS |= dict.fromkeys(("accuracy", "auc", "f1", "r2", "score"), True)
"""Whether higher values are better, by the exact name of a metric. Any other metric needs its direction."""


class PairedOutcome(Enum):
    """The answer of a paired test."""

    NOT_WORSE = "not worse"
    WORSE = "worse"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Margin:
    """Largest loss of a metric that counts as no loss.

    Parameters
    ----------
    size
        A finite number above 0: in the unit of the metric, or if ``relative``, a fraction of its mean over the runs of
        the reference.
    relative
        Whether it is a fraction.

    Examples
    --------
    >>> Margin.of("1%"), Margin.of(0.02)
    (Margin(size=0.01, relative=True), Margin(size=0.02, relative=False))
    >>> Margin.of(0)
    Traceback (most recent call last):
    dshuffle.errors.InvalidParameter: margin=0 is not allowed; it must be a number > 0 in the unit of the metric, or a \
percentage of it such as '1%'
    """

    size: float
    relative: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.size < math.inf:
            raise InvalidParameter.of("margin", self.size, MARGINS)

    @classmethod
    def of(cls, value: Margin | float | str) -> Margin:
        """Return the margin that a number, or a text such as ``"1%"``, stands for, or raise an error."""
        if isinstance(value, Margin):
            return value
        text = str(value).strip()
        try:
            relative = text.endswith("%")
            return cls(float(text.removesuffix("%")) / (100 if relative else 1), relative)
        except ValueError:
            raise InvalidParameter.of("margin", value, MARGINS) from None

    def __str__(self) -> str:
        return f"{100 * self.size:.4g} %" if self.relative else f"{self.size:.4g}"


@dataclass(frozen=True, slots=True)
class PairedTest:
    """What to compare in pairs of runs, and how long.

    Parameters
    ----------
    metric
        Name of the metric of a run: ``"error"``, or the name of a validation metric.
    margin
        A :class:`Margin`, or what :meth:`Margin.of` takes.
    pairs
        Largest number of pairs.
    higher_is_better
        Whether higher values of the metric are better, as for an accuracy. None is allowed for names in
        :data:`DIRECTIONS`.
    rounding
        Differences of the metric up to this one are rounding. The margin is at least as large. A metric with a rounding
        is continuous: it has no steps.
    meaning
        What the metric is, in words, for reports; empty if it is what a training function calls it.

    Raises
    ------
    InvalidParameter
        If the margin is not above 0, there are too few pairs, or the direction of the metric is not known.

    Examples
    --------
    >>> test = PairedTest("accuracy", margin=0.01)
    >>> test.margin, test.looks, test.direction
    (Margin(size=0.01, relative=False), (5, 10, 20), 'higher is better')
    """

    metric: str
    margin: Margin | float | str = "1%"
    pairs: int = 20
    higher_is_better: bool | None = None
    rounding: float = 0.0
    meaning: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", Margin.of(self.margin))
        as_integer("pairs", self.pairs, FEWEST_PAIRS, "The variance of fewer differences is hardly known.")
        if self.higher_is_better is None:
            if self.metric.lower() not in DIRECTIONS:
                hint = "Add --higher-is-better or --lower-is-better; in Python, higher_is_better=True or False."
                raise InvalidParameter.of("metric", self.metric, "given with the direction that is better", hint)
            object.__setattr__(self, "higher_is_better", DIRECTIONS[self.metric.lower()])

    @property
    def direction(self) -> str:
        """Which values of the metric are better, in words."""
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of pairs after which the answer is looked for: a quarter, half and all of them, at least 5."""
        return tuple(sorted({max(FEWEST_PAIRS, -(-self.pairs * quarters // 4)) for quarters in (1, 2, 4)}))

    def spent_at(self, look: int) -> float:
        """Return the part of an error rate that is spent at one of the looks. The parts add up to 1."""
        before = max((earlier for earlier in self.looks if earlier < look), default=0)
        return (look**2 - before**2) / self.pairs**2


@dataclass(kw_only=True, eq=False)
class PairedRuns:
    """Pairs of runs so far, and what they show.

    Metrics that are not finite are those of runs that diverged. Differences, their bounds and the limit are in the unit
    of the margin: that of the metric, or fractions of the mean of the reference.

    Parameters
    ----------
    test
        What is tested.
    reference
        The metric of the runs with the reference, one per pair. There may be more than of ``way``.
    way
        The metric of the runs with the way.
    test_to_train
        Held-out samples for each sample that a run trains on, if every pair draws both anew from one dataset.
    fixed
        Whether all pairs have the same held-out set, so that the answer is about these samples.
    by_sample
        Difference in the loss of each of these samples, the mean over the pairs, if it is known. The sampling error of
        the held-out set is then in the bounds, and the answer is about new samples.

    Attributes
    ----------
    n_pairs, diverged
        Number of pairs; and of those in which only the run with the strategy diverged, and only that with the
        reference.
    differences, mean
        Differences of the pairs in which neither run diverged, and their mean. Positive ones mean that the strategy is
        worse.
    limit, relative_limit
        The margin, which is at least the rounding of the metric; and as a fraction of the mean of the reference.
    outcome, reason
        The answer, None without enough pairs; and why it is *cannot tell*, or *worse* without a difference, in a word.
    bounds
        The interval, or only its upper bound if the answer is *not worse*. The lower bound is then -inf.
    p_value
        Least error rate at which the answer would be *not worse*, over all looks; 1 if the answer is another one.

    Examples
    --------
    >>> reference, way = (1.00, 1.02, 0.99, 1.01, 1.00), (1.01, 1.02, 1.00, 1.00, 1.01)
    >>> print(PairedRuns(test=PairedTest("loss", margin=0.1, pairs=5), reference=reference, way=way))
    not worse by more than 0.1: +0.0040, at most 0.0136 (95 % confidence, 5 pairs; lower is better)
    """

    test: PairedTest
    reference: tuple[float, ...]
    way: tuple[float, ...]
    test_to_train: float = 0.0
    fixed: bool = False
    by_sample: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        test, margin, n_pairs = self.test, Margin.of(self.test.margin), len(self.way)
        if n_pairs > len(self.reference):
            raise InvalidParameter.of("len(reference)", len(self.reference), f"at least {n_pairs}")
        self.n_pairs = n_pairs
        pairs = np.array([self.way, self.reference[:n_pairs]], np.float64)
        finite = np.isfinite(pairs)
        # Pairs in which only the run with the way diverged, and only that with the reference.
        self.diverged = int(np.sum(finite[0] < finite[1])), int(np.sum(finite[1] < finite[0]))
        way, reference = self._pairs = pairs[:, finite.all(axis=0)]
        count, center = len(way), float(reference.mean()) if len(way) else 0.0
        scale = self._scale = abs(center)
        self.largest = float(np.abs(self._pairs).max(initial=0.0))
        # Fractions of a reference that is rounding would mean nothing.
        self.is_relative = margin.relative and scale > test.rounding
        unit = scale if self.is_relative else 1.0
        self.limit = max(margin.size * (scale / unit if margin.relative else 1.0), test.rounding / unit)
        self.relative_limit = self.limit / (scale / unit) if scale else math.inf

        differences = (way - reference) * (-1.0 if test.higher_is_better else 1.0)
        if self.is_relative:
            # Linearised: their mean is the ratio of the means, and they scatter as much as it does, since the mean of
            # the reference is not known exactly.
            ratio = differences.mean() / scale
            differences = ratio + (differences - ratio * reference * np.sign(center)) / scale
        self.differences: NDArray[np.float64] = differences
        self.mean = float(differences.mean()) if count else math.nan
        # An accuracy on 100 samples has steps of 0.01. Few differences may be equal by chance.
        gaps = np.diff(np.unique(self._pairs))
        gaps = gaps[gaps > SAME * self.largest]
        step = float(gaps.min()) / unit if len(gaps) and not test.rounding else 0.0
        self._deviation = max(float(differences.std(ddof=1)), step) if count > 1 else math.nan
        self._sampling_error = 0.0
        if (losses := self.by_sample) is not None:
            self._sampling_error = float(losses.std(ddof=1)) / math.sqrt(len(losses)) / unit
        # With the correction of Nadeau and Bengio.
        scatter = self._deviation * math.sqrt(1 / max(1, count) + self.test_to_train)
        error = math.hypot(scatter, self._sampling_error)
        self._spent = test.spent_at(max((look for look in test.looks if look <= n_pairs), default=n_pairs))

        def half_width(rate: float) -> float:
            return float(scipy.special.stdtrit(max(1, count - 1), 1 - rate * self._spent)) * error

        # All looks together exceed the upper bound with ERROR_RATE at most, as they do the interval.
        self.worst = self.mean + half_width(ERROR_RATE)
        self.interval = self.mean - half_width(ERROR_RATE / 2), self.mean + half_width(ERROR_RATE / 2)
        self.outcome, self.reason = self._answer()
        self.bounds, self.p_value = self.interval, 1.0
        if self.outcome is PairedOutcome.NOT_WORSE:
            self.bounds = -math.inf, self.worst
            tail = float(scipy.stats.t.sf((self.limit - self.mean) / error, count - 1)) if error else 0.0
            self.p_value = min(1.0, tail / self._spent)

    def _answer(self) -> tuple[PairedOutcome | None, str]:
        """The answer, if there are enough pairs for one; and why, in a word from which the report says what helps."""
        test, limit, mean, largest = self.test, self.limit, self.mean, self.largest
        (more, less), cannot_tell, is_last = self.diverged, PairedOutcome.CANNOT_TELL, self.n_pairs == test.pairs
        if self.n_pairs not in test.looks:
            return None, ""
        # An exact sign test.
        if more and scipy.stats.binomtest(more, more + less, alternative="greater").pvalue <= ERROR_RATE * self._spent:
            return PairedOutcome.WORSE, "diverged"
        if self._pairs.size:
            if 0 < test.rounding >= largest:
                return cannot_tell, "rounding"
            if test.margin.relative and not limit == test.rounding > 0 and self._scale <= np.std(self._pairs[1]):  # type: ignore[union-attr]
                return cannot_tell, "no scale"  # a fraction of a reference that scatters around 0 means nothing
            if self._pairs.size > 2 and test.rounding == 0 and np.ptp(self._pairs) <= SAME * largest:
                return cannot_tell, "constant"
        elif not np.isfinite(self.reference[: self.n_pairs]).any():
            return cannot_tell, "reference diverged"
        is_better, least = self.worst < limit, self.interval[0]
        if is_better and more <= less and self._signs_agree(limit - self.differences, ERROR_RATE):
            return PairedOutcome.NOT_WORSE, ""
        for bound in (limit, 0.0) if is_last else (limit,):
            if least > bound and self._signs_agree(self.differences - bound, ERROR_RATE / 2):
                return PairedOutcome.WORSE, ""
        if not is_last:
            return None, ""
        if math.isnan(least) or (is_better and more > less):
            return cannot_tell, "some diverged"
        floor = math.hypot(self._deviation * math.sqrt(self.test_to_train), self._sampling_error)
        if scipy.special.ndtri(1 - ERROR_RATE) * floor >= limit - mean > 0:
            return cannot_tell, "same samples"
        return cannot_tell, "signs" if is_better or least > 0 else "pairs"

    def _signs_agree(self, above: NDArray[np.float64], rate: float) -> bool:
        """Whether a sign-flip test of few values finds their mean above 0, as far as so few can."""
        if len(above) > FEW_PAIRS:
            return True
        signs = 1 - 2 * (np.arange(1 << len(above))[:, np.newaxis] >> np.arange(len(above)) & 1)
        p_value = np.mean(signs @ above >= above.sum() * (1 - 1e-12))
        return bool(p_value <= max(rate * self._spent, 0.5 ** len(above)))

    def __str__(self) -> str:
        """The answer, its bounds, and the number of pairs."""
        outcome, counts = self.outcome, f"{self.n_pairs} pair{'' if self.n_pairs == 1 else 's'}"
        if outcome is None:
            return f"not clear yet ({counts})"
        if self.reason == "diverged":
            return f"worse: it diverged in {self.diverged[0]} of {counts}, and reshuffling in {self.diverged[1]}"
        if math.isnan(self.bounds[1]) or self.reason in ("no scale", "rounding", "constant"):
            return f"cannot tell ({counts})"
        is_not_worse, most = outcome is PairedOutcome.NOT_WORSE, self.shown_bounds.removeprefix("≤ ")
        same = "; on these held-out samples" if self.fixed and self.by_sample is None else ""
        runs = f"(95 % {'confidence' if is_not_worse else 'interval'}, {counts}; {self.test.direction}{same})"
        if is_not_worse:
            return f"not worse by more than {self.shown_margin}: {self.shown_mean}, at most {most} {runs}"
        is_doubtful = outcome is PairedOutcome.WORSE and self.interval[0] <= self.limit
        doubt = f", but perhaps by less than the margin of {self.shown_margin}" if is_doubtful else ""
        return f"{outcome.value}: {self.shown_mean} {most} {runs}{doubt}"

    @property
    def _unit(self) -> tuple[float, str]:
        """By what numbers are multiplied when they are shown, and what follows them."""
        return (100.0, " %") if self.is_relative else (1.0, "")

    def shown(self, difference: float) -> str:
        """Format a difference with its sign and three significant digits."""
        factor, unit = self._unit
        scaled = factor * difference + 0.0  # takes the sign from -0.0
        return f"{'+' if scaled >= 0 else ''}{human_numbers([scaled], DIGITS)[0]}{unit}"

    @property
    def shown_margin(self) -> str:
        """The margin, as short as it was given."""
        factor, unit = self._unit
        return f"{factor * self.limit:.{DIGITS}g}{unit}"

    @property
    def _shown(self) -> list[str]:
        """The mean, and its bounds rounded outward, with as many decimals."""
        values = [self._unit[0] * value for value in (self.mean, *self.bounds)]
        largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
        decimals = decimals_of(largest, DIGITS)
        unit = 10**decimals
        if math.isfinite(values[1]):
            values[1] = math.floor(values[1] * unit + SAME) / unit
        if math.isfinite(values[2]):
            values[2] = math.ceil(values[2] * unit - SAME) / unit
        return [f"{value:z.{decimals}f}" for value in values]

    @property
    def shown_mean(self) -> str:
        """The mean difference, with its sign."""
        mean = self._shown[0]
        return f"{'' if mean.startswith(('-', 'nan')) else '+'}{mean}{self._unit[1]}"

    @property
    def shown_bounds(self) -> str:
        """:attr:`bounds`, rounded outward: an interval, or the upper bound alone after a "≤"."""
        _, least, most = self._shown
        return f"{f'≤ {most}' if self.bounds[0] == -math.inf else f'[{least}, {most}]'}{self._unit[1]}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""

        def finite(values: Iterable[float]) -> list[float | None]:
            return [value if math.isfinite(value) else None for value in values]

        [mean], has_bounds = finite([self.mean]), len(self.differences) > 1
        return {
            "metric": self.test.metric,
            "margin": str(self.test.margin),
            "higher_is_better": self.test.higher_is_better,
            "most_pairs": self.test.pairs,
            "outcome": self.outcome and self.outcome.value,
            "reason": self.reason,
            "text": str(self),
            "diverged": list(self.diverged),
            "relative": self.is_relative,
            "limit": self.limit,
            "mean": mean,
            "worst": self.worst if has_bounds else None,
            "interval": list(self.interval) if has_bounds else None,
            "p_value": self.p_value,
            "test_to_train": self.test_to_train,
            "fixed_held_out": self.fixed,
            "reference": finite(self.reference[: self.n_pairs]),
            "way": finite(self.way),
        }


def holm(runs: Mapping[str, PairedRuns]) -> dict[str, float]:
    """Adjust the p-values of several strategies, so that any wrong "not worse" among them has the error rate."""
    adjusted, largest = {}, 0.0
    for place, label in enumerate(sorted(runs, key=lambda label: runs[label].p_value)):
        largest = max(largest, min(1.0, (len(runs) - place) * runs[label].p_value))
        adjusted[label] = largest
    return adjusted
