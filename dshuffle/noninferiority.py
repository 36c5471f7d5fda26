"""Whether a way of training is not worse than a reference by a margin: a paired test with an error rate.

Both runs of a pair share initial weights, batch seeds and a held-out set, and differ in the way alone. Pairs are added
until the answer is clear, or until there are as many as the user allows.

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
from collections.abc import Mapping
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

WITH_EXPONENT = 1e15
"""Differences from this size on are shown with an exponent."""

SAME = 1e-6
"""Differences between values of a metric, as a fraction of the largest one, that are rounding and not its step."""

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
        if not (math.isfinite(self.size) and self.size > 0):
            raise _bad_margin(self.size)

    @classmethod
    def of(cls, value: Margin | float | str) -> Margin:
        """Return the margin that a number, or a text such as ``"1%"``, stands for.

        Raises
        ------
        InvalidParameter
            If it is not a finite number above 0.
        """
        if isinstance(value, Margin):
            return value
        text = str(value).strip()
        relative = text.endswith("%")
        try:
            size = float(text.removesuffix("%"))
        except ValueError:
            raise _bad_margin(value) from None
        if not (math.isfinite(size) and size > 0) or isinstance(value, bool):
            raise _bad_margin(value)
        return cls(size / 100 if relative else size, relative)

    def __str__(self) -> str:
        return f"{100 * self.size:.4g} %" if self.relative else f"{self.size:.4g}"


def _bad_margin(value: object) -> InvalidParameter:
    return InvalidParameter.of(
        "margin", value, "a number > 0 in the unit of the metric, or a percentage of it such as '1%'"
    )


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
        if len(self.way) > len(self.reference):
            raise InvalidParameter.of("len(reference)", len(self.reference), f"at least {len(self.way)}")

    @property
    def n_pairs(self) -> int:
        """Number of pairs."""
        return len(self.way)

    @property
    def diverged(self) -> tuple[int, int]:
        """Numbers of pairs in which only the run with the way diverged, and only that with the reference."""
        way, reference = np.isfinite(self.way), np.isfinite(self.reference[: self.n_pairs])
        return int(np.sum(~way & reference)), int(np.sum(way & ~reference))

    @property
    def _finite_pairs(self) -> NDArray[np.float64]:
        pairs = np.array([self.way, self.reference[: self.n_pairs]], dtype=np.float64)
        return np.asarray(pairs[:, np.isfinite(pairs).all(axis=0)])

    @property
    def _scale(self) -> float:
        """Absolute mean of the reference."""
        reference = self._finite_pairs[1]
        return abs(float(reference.mean())) if len(reference) else 0.0

    @property
    def is_relative(self) -> bool:
        """Whether differences are fractions of the mean of the reference. Those of rounding would mean nothing."""
        return self._margin.relative and self._scale > self.test.rounding

    @property
    def _margin(self) -> Margin:
        assert isinstance(self.test.margin, Margin)  # PairedTest has made it one
        return self.test.margin

    @property
    def limit(self) -> float:
        """The margin, which is at least the rounding of the metric."""
        if self.is_relative:
            return max(self._margin.size, self.test.rounding / self._scale)
        return max(self._margin.size * (self._scale if self._margin.relative else 1.0), self.test.rounding)

    @property
    def relative_limit(self) -> float:
        """The margin as a fraction of the mean of the reference; infinite if that is 0."""
        if self.is_relative:
            return self.limit
        return self.limit / self._scale if self._scale else math.inf

    @property
    def differences(self) -> NDArray[np.float64]:
        """Differences of the pairs in which neither run diverged; positive ones mean that the way is worse.

        Relative ones are linearised: their mean is the ratio of the means, and they scatter as much as it does, since
        the mean of the reference is not known exactly.
        """
        way, reference = self._finite_pairs
        differences = (way - reference) * (-1.0 if self.test.higher_is_better else 1.0)
        if not self.is_relative or not len(way):
            return np.asarray(differences)
        ratio = differences.mean() / self._scale
        return np.asarray(ratio + (differences - ratio * reference * np.sign(reference.mean())) / self._scale)

    @property
    def mean(self) -> float:
        """Mean difference of the pairs; NaN if there is none."""
        return float(self.differences.mean()) if len(self.differences) else math.nan

    @property
    def step(self) -> float:
        """Smallest difference between two values of the metric in all runs; 0 if there is none, or it has a rounding.

        An accuracy on 100 samples has steps of 0.01.
        """
        values = np.unique(self._finite_pairs)
        gaps = np.diff(values)
        gaps = gaps[gaps > SAME * np.abs(values).max(initial=0.0)]
        if self.test.rounding > 0 or not len(gaps):
            return 0.0
        return float(gaps.min()) / (self._scale if self.is_relative else 1.0)

    @property
    def _deviation(self) -> float:
        """Standard deviation of the differences, at least one step: few of them may be equal by chance."""
        differences = self.differences
        return max(float(differences.std(ddof=1)), self.step) if len(differences) > 1 else math.nan

    @property
    def _sampling_error(self) -> float:
        """Standard error of the mean difference due to the held-out samples, if their losses are known."""
        if self.by_sample is None:
            return 0.0
        unit = self._scale if self.is_relative else 1.0
        return float(self.by_sample.std(ddof=1)) / math.sqrt(len(self.by_sample)) / unit

    @property
    def _standard_error(self) -> float:
        """Standard error of the mean difference, with the correction of Nadeau and Bengio."""
        count = max(1, len(self.differences))
        return math.hypot(self._deviation * math.sqrt(1 / count + self.test_to_train), self._sampling_error)

    @property
    def _spent(self) -> float:
        """Part of the error rate that the last look has spent."""
        return self.test.spent_at(max((look for look in self.test.looks if look <= self.n_pairs), default=self.n_pairs))

    def _half_width(self, rate: float) -> float:
        """Half of the width of an interval whose bounds each fail with this rate, over all looks; NaN for one pair."""
        freedom = max(1, len(self.differences) - 1)
        return float(scipy.special.stdtrit(freedom, 1 - rate * self._spent)) * self._standard_error

    @property
    def worst(self) -> float:
        """Upper bound of the true difference, which all looks together exceed with :data:`ERROR_RATE` at most."""
        return self.mean + self._half_width(ERROR_RATE)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds between which all looks together have the true difference with 1 - :data:`ERROR_RATE` at least."""
        half = self._half_width(ERROR_RATE / 2)
        return self.mean - half, self.mean + half

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds that are shown: the interval, or only the upper bound if the answer is *not worse*.

        The lower bound is then -inf.
        """
        return (-math.inf, self.worst) if self.outcome is PairedOutcome.NOT_WORSE else self.interval

    @property
    def p_value(self) -> float:
        """Least error rate at which the answer would be *not worse*, over all looks; 1 if the answer is another one."""
        if self.outcome is not PairedOutcome.NOT_WORSE:
            return 1.0
        error = self._standard_error
        if error == 0:
            return 0.0
        tail = scipy.stats.t.sf((self.limit - self.mean) / error, len(self.differences) - 1)
        return min(1.0, float(tail) / self._spent)

    def _signs_agree(self, above: NDArray[np.float64], rate: float) -> bool:
        """Whether a sign-flip test of few values finds their mean above 0, as far as so few can."""
        if len(above) > FEW_PAIRS:
            return True
        signs = 1 - 2 * (np.arange(1 << len(above))[:, np.newaxis] >> np.arange(len(above)) & 1)
        p_value = np.mean(signs @ above >= above.sum() * (1 - 1e-12))
        return bool(p_value <= max(rate * self._spent, 0.5 ** len(above)))

    @property
    def _diverges_more(self) -> bool:
        """Whether runs with the way diverge more often than those with the reference (exact sign test)."""
        more, less = self.diverged
        return bool(more) and scipy.stats.binomtest(more, more + less, alternative="greater").pvalue <= (
            ERROR_RATE * self._spent
        )

    @property
    def outcome(self) -> PairedOutcome | None:
        """The answer; None if there are too few pairs for one."""
        return self._answer[0]

    @property
    def reason(self) -> str:
        """Why it is *cannot tell*, or *worse* without a difference, in a word; the report says what helps."""
        return self._answer[1]

    @property
    def _answer(self) -> tuple[PairedOutcome | None, str]:
        is_last = self.n_pairs == self.test.pairs
        if self.n_pairs not in self.test.looks:
            return None, ""
        if self._diverges_more:
            return PairedOutcome.WORSE, "diverged"
        if nothing := self._nothing_to_test:
            return PairedOutcome.CANNOT_TELL, nothing
        differences, limit, (least, _) = self.differences, self.limit, self.interval
        more, less = self.diverged
        is_better = self.worst < limit
        if is_better and more <= less and self._signs_agree(limit - differences, ERROR_RATE):
            return PairedOutcome.NOT_WORSE, ""
        for bound in (limit, *([0.0] if is_last else [])):
            if least > bound and self._signs_agree(differences - bound, ERROR_RATE / 2):
                return PairedOutcome.WORSE, ""
        if not is_last:
            return None, ""
        if math.isnan(least) or (is_better and more > less):
            return PairedOutcome.CANNOT_TELL, "some diverged"
        floor = scipy.special.ndtri(1 - ERROR_RATE) * math.hypot(
            self._deviation * math.sqrt(self.test_to_train), self._sampling_error
        )
        if floor >= limit - self.mean > 0:
            return PairedOutcome.CANNOT_TELL, "same samples"
        return PairedOutcome.CANNOT_TELL, "signs" if is_better or least > 0 else "pairs"

    @property
    def _nothing_to_test(self) -> str:
        """Why the metrics test nothing; empty if they do."""
        pairs = self._finite_pairs
        if not pairs.size:
            return "" if np.isfinite(self.reference[: self.n_pairs]).any() else "reference diverged"
        largest = self.largest
        if 0 < self.test.rounding >= largest:
            return "rounding"
        is_rounded = self.limit == self.test.rounding > 0
        if self._margin.relative and not is_rounded and self._scale <= float(np.std(pairs[1])):
            return "no scale"  # a fraction of a reference that scatters around 0 means nothing
        is_constant = pairs.size > 2 and self.test.rounding == 0 and float(np.ptp(pairs)) <= SAME * largest
        return "constant" if is_constant else ""

    @property
    def largest(self) -> float:
        """Largest absolute metric of all pairs in which neither run diverged."""
        return float(np.abs(self._finite_pairs).max(initial=0.0))

    def __str__(self) -> str:
        """The answer, its bounds, and the number of pairs."""
        outcome, reason = self._answer
        counts = f"{self.n_pairs} pair{'' if self.n_pairs == 1 else 's'}"
        if outcome is None:
            return f"not clear yet ({counts})"
        same = "; on these held-out samples" if self.fixed and self.by_sample is None else ""
        runs = f"95 % {'confidence' if outcome is PairedOutcome.NOT_WORSE else 'interval'}, {counts}"
        if reason == "diverged":
            return f"worse: it diverged in {self.diverged[0]} of {counts}, and reshuffling in {self.diverged[1]}"
        if math.isnan(self.bounds[1]) or reason in ("no scale", "rounding", "constant"):
            return f"cannot tell ({counts})"
        counts = f"({runs}; {self.test.direction}{same})"
        if outcome is PairedOutcome.NOT_WORSE:
            most = self.shown_bounds.removeprefix("≤ ")
            return f"not worse by more than {self.shown_margin}: {self.shown_mean}, at most {most} {counts}"
        words = f"{self.shown_mean} {self.shown_bounds} {counts}"
        doubt = f", but perhaps by less than the margin of {self.shown_margin}"
        is_doubtful = outcome is PairedOutcome.WORSE and self.interval[0] <= self.limit
        return f"{outcome.value}: {words}{doubt if is_doubtful else ''}"

    @property
    def percent(self) -> str:
        """What follows a number that is shown: a percent sign, or nothing."""
        return " %" if self.is_relative else ""

    def scaled(self, difference: float) -> float:
        """A difference as it is shown: in percent of the reference, or in the unit of the metric."""
        return 100 * difference if self.is_relative else difference

    def shown(self, difference: float) -> str:
        """Format a difference with its sign and three significant digits."""
        scaled = self.scaled(difference) + 0.0  # takes the sign from -0.0
        return f"{'+' if scaled >= 0 else ''}{human_numbers([scaled], DIGITS)[0]}{self.percent}"

    @property
    def shown_margin(self) -> str:
        """The margin, as short as it was given."""
        return f"{self.scaled(self.limit):.{DIGITS}g}{self.percent}"

    @property
    def _shown(self) -> list[str]:
        """The mean, and its bounds rounded outward, with as many decimals."""
        values = [self.scaled(value) for value in (self.mean, *self.bounds)]
        sizes = [abs(value) for value in values if math.isfinite(value)]
        if max(sizes, default=0.0) >= WITH_EXPONENT:
            return [f"{value:.{DIGITS - 1}e}" for value in values]
        decimals = decimals_of(max(sizes, default=0.0), DIGITS)
        unit = 10**decimals
        mean, least, most = values
        outward = [
            mean,
            math.floor(least * unit + SAME) / unit if math.isfinite(least) else least,
            math.ceil(most * unit - SAME) / unit if math.isfinite(most) else most,
        ]
        return [f"{value:z.{decimals}f}" for value in outward]

    @property
    def shown_mean(self) -> str:
        """The mean difference, with its sign."""
        mean, *_ = self._shown
        return f"{'' if mean.startswith(('-', 'nan')) else '+'}{mean}{self.percent}"

    @property
    def shown_bounds(self) -> str:
        """:attr:`bounds`, rounded outward: an interval, or the upper bound alone after a "≤"."""
        _, least, most = self._shown
        return f"{f'≤ {most}' if self.bounds[0] == -math.inf else f'[{least}, {most}]'}{self.percent}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        has_bounds = len(self.differences) > 1
        return {
            "metric": self.test.metric,
            "margin": str(self.test.margin),
            "higher_is_better": self.test.higher_is_better,
            "most_pairs": self.test.pairs,
            "outcome": None if self.outcome is None else self.outcome.value,
            "reason": self.reason,
            "text": str(self),
            "diverged": list(self.diverged),
            "relative": self.is_relative,
            "limit": self.limit,
            "mean": _or_none(self.mean),
            "worst": self.worst if has_bounds else None,
            "interval": list(self.interval) if has_bounds else None,
            "p_value": self.p_value,
            "test_to_train": self.test_to_train,
            "fixed_held_out": self.fixed,
            "reference": list(map(_or_none, self.reference[: self.n_pairs])),
            "way": list(map(_or_none, self.way)),
        }


def holm(runs: Mapping[str, PairedRuns]) -> dict[str, float]:
    """Adjust the p-values of several ways, so that any wrong "not worse" among them has the error rate."""
    adjusted, largest = {}, 0.0
    for place, (label, p_value) in enumerate(sorted(((k, r.p_value) for k, r in runs.items()), key=lambda kv: kv[1])):
        largest = max(largest, min(1.0, (len(runs) - place) * p_value))
        adjusted[label] = largest
    return adjusted


def _or_none(value: float) -> float | None:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else None
