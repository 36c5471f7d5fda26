"""Pairs of runs, the bounds that they give, and the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from enum import Enum
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.noninferiority.paired_test import FEWEST_PAIRS, Margin, PairedTest
from dshuffle.units import decimals_of, human_numbers

ERROR_RATE = 0.05
"""Probability of a wrong "not worse" if the difference is exactly the margin, over all looks together."""

DIGITS = 3
"""Significant digits of differences and their bounds."""

WITH_EXPONENT = 1e15
"""Differences from this size on are shown with an exponent."""

SAME = 1e-6
"""Differences between values of a metric, as a fraction of the largest one, that are rounding and not its step."""


class PairedOutcome(Enum):
    """The answer of a paired test."""

    NOT_WORSE = "not worse"
    WORSE = "worse"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRuns:
    """Pairs of runs so far, and what they show.

    Metrics that are not finite are those of runs that diverged.

    Parameters
    ----------
    test
        What is tested.
    reference
        The metric of the runs with the reference, one per pair. There may be more than of ``way``.
    way
        The metric of the runs with the way.
    null
        The metric of one more run with the reference, which differs from the first in the seed of the shuffle alone.
    repeated
        The metric of a run with the reference that is equal to the first.

    Examples
    --------
    >>> runs = PairedRuns(
    ...     test=PairedTest("loss", margin=0.1),
    ...     reference=(1.00, 1.02, 0.99, 1.01, 1.00),
    ...     way=(1.01, 1.02, 1.00, 1.00, 1.01),
    ...     null=1.01,
    ...     repeated=1.0,
    ... )
    >>> print(runs)
    not worse by more than 0.1: on average at most 0.0197 worse (95 % confidence, 5 pairs; lower is better)
    """

    test: PairedTest
    reference: tuple[float, ...]
    way: tuple[float, ...]
    null: float
    repeated: float

    def __post_init__(self) -> None:
        if len(self.way) > len(self.reference) or not self.reference:
            raise InvalidParameter.of("len(reference)", len(self.reference), f"at least {max(1, len(self.way))}")

    @property
    def n_pairs(self) -> int:
        """Number of pairs."""
        return len(self.way)

    @property
    def n_diverged(self) -> int:
        """Number of runs with the way that diverged."""
        return int(np.sum(~np.isfinite(self.way)))

    @property
    def reference_diverged(self) -> bool:
        """Whether a run with the reference diverged."""
        return not np.isfinite([*self.reference[: max(1, self.n_pairs)], self.null, self.repeated]).all()

    @property
    def differences(self) -> NDArray[np.float64]:
        """``(n,)`` differences between the way and the reference, of the pairs in which neither run diverged.

        Positive ones mean that the way is worse.
        """
        sign = -1.0 if self.test.higher_is_better else 1.0
        pairs = np.array([self.way, self.reference[: self.n_pairs]], dtype=np.float64)
        way, reference = pairs[:, np.isfinite(pairs).all(axis=0)]
        return np.asarray(sign * (way - reference), dtype=np.float64)

    @property
    def unit(self) -> float:
        """What a difference is a fraction of: the mean of the reference for a relative margin, or 1."""
        return self._mean_of_reference if self._is_relative else 1.0

    @property
    def limit(self) -> float:
        """The margin in the unit of the metric."""
        return max(self._margin.size * (self._mean_of_reference if self._margin.relative else 1.0), self.test.rounding)

    @property
    def relative_limit(self) -> float:
        """The margin as a fraction of the mean of the reference; infinite if that is 0."""
        return self.limit / self._mean_of_reference if self._mean_of_reference else math.inf

    @property
    def _is_relative(self) -> bool:
        """Whether differences are fractions of the mean of the reference. Those of rounding would mean nothing."""
        return self._margin.relative and self._mean_of_reference > self.test.rounding

    @property
    def _margin(self) -> Margin:
        assert isinstance(self.test.margin, Margin)  # PairedTest has made it one
        return self.test.margin

    @property
    def _mean_of_reference(self) -> float:
        """Absolute mean of the runs with the reference; 0 if all of them diverged."""
        values = _finite(self.reference)
        return abs(float(values.mean())) if len(values) else 0.0

    @property
    def has_no_scale(self) -> bool:
        """Whether a relative margin means nothing: the mean of the reference is not above the scatter of its runs.

        Fewer runs than those of the first look do not show their scatter. They only count if all of them are 0.
        """
        if not self._margin.relative or self.limit == self.test.rounding > 0:
            return False
        if self.n_pairs < FEWEST_PAIRS:
            return not np.any([*self.reference, self.null, self.repeated])
        values = _finite(self.reference)
        return len(values) < 2 or self._mean_of_reference <= float(values.std(ddof=1))

    @property
    def not_deterministic_by(self) -> float:
        """Difference between two equal runs."""
        return abs(self.repeated - self.reference[0])

    @property
    def null_difference(self) -> float:
        """Difference between two runs of the reference that differ in the seed of the shuffle alone."""
        return abs(self.null - self.reference[0])

    @property
    def is_too_noisy(self) -> bool:
        """Whether runs of the reference alone differ by more than the margin."""
        return max(self.null_difference, self.not_deterministic_by) > self.limit

    @property
    def is_constant(self) -> bool:
        """Whether the metric is the same number in every run, such as an accuracy of 1."""
        return len({*self.reference, *self.way, self.null, self.repeated}) == 1

    @property
    def is_rounding(self) -> bool:
        """Whether no metric of a run that did not diverge is larger than its rounding."""
        return 0 < self.test.rounding >= self._largest

    @property
    def _largest(self) -> float:
        """Largest absolute metric of all runs that did not diverge."""
        return float(np.abs(_finite([*self.reference, *self.way, self.null, self.repeated])).max(initial=0.0))

    @property
    def step(self) -> float | None:
        """Smallest difference between two values of the metric in all runs; None if there is none.

        An accuracy on 100 samples has steps of 0.01. A metric with a rounding has no steps: 0.
        """
        if self.test.rounding > 0:
            return 0.0
        values = np.unique(_finite([*self.reference, *self.way, self.null, self.repeated]))
        gaps = np.diff(values)
        gaps = gaps[gaps > SAME * self._largest]
        return float(gaps.min()) if len(gaps) else None

    @property
    def mean(self) -> float:
        """Mean difference of the pairs; NaN if there is none."""
        return float(self.differences.mean()) if len(self.differences) else math.nan

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

    def _half_width(self, rate: float) -> float:
        """Half of the width of an interval whose bounds each fail with this rate, over all looks; NaN for one pair.

        The differences of a metric with large steps may be equal by chance, so that their standard deviation is too
        small. It counts as one step at least: simulations with half a step exceed the error rate.
        """
        differences = self.differences
        if len(differences) < 2:
            return math.nan
        look = max((look for look in self.test.looks if look <= self.n_pairs), default=self.n_pairs)
        quantile = float(scipy.special.stdtrit(len(differences) - 1, 1 - rate * self.test.spent_at(look)))
        deviation = max(float(differences.std(ddof=1)), self.step or 0.0)
        return quantile * deviation / math.sqrt(len(differences))

    @property
    def outcome(self) -> PairedOutcome | None:
        """The answer; None if there are too few pairs for one."""
        if self.reference_diverged or self.has_no_scale:
            return PairedOutcome.CANNOT_TELL
        if self.n_pairs not in self.test.looks:
            return None
        if self.n_diverged:
            return PairedOutcome.WORSE
        if self.is_rounding or (self.is_constant and self.test.rounding == 0):
            return PairedOutcome.CANNOT_TELL
        is_last = self.n_pairs == self.test.pairs
        has_steps = self.step is not None  # equal values do not show how small a difference the metric can have
        if self.worst < self.limit and not self.is_too_noisy and (has_steps or is_last):
            return PairedOutcome.NOT_WORSE
        least, _ = self.interval
        if least > self.limit:
            return PairedOutcome.WORSE
        if not is_last and not self.is_too_noisy:
            return None
        return PairedOutcome.WORSE if least > 0 else PairedOutcome.CANNOT_TELL

    def __str__(self) -> str:
        """The answer, with the number of pairs and the margin."""
        outcome, margin = self.outcome, self.shown_margin
        runs = f"{self.n_pairs} pairs; {self.test.direction}"
        if outcome is None:
            return f"not clear yet ({self.n_pairs} pair{'' if self.n_pairs == 1 else 's'})"
        if outcome is PairedOutcome.NOT_WORSE:
            bound = self._in_words(self.worst, up=True, most="at most ", least="at least ")
            return f"not worse by more than {margin}: on average {bound} (95 % confidence, {runs})"
        least, most = self.interval
        if outcome is PairedOutcome.CANNOT_TELL:
            if reason := self.reason:
                return f"cannot tell: {reason}"
            smallest = self.shown((most - least) / 2)
            bounds = f"{self._in_words(least, up=False)} and {self._in_words(most, up=True)}"
            return (
                f"cannot tell: differences below {smallest} cannot be seen with {self.n_pairs} pairs, and this one is "
                f"between {bounds} (95 % interval; {self.test.direction}); the margin is {margin}"
            )
        if self.n_diverged:
            return f"worse: it diverged in {self.n_diverged} of {self.n_pairs} runs, and reshuffling in none"
        doubt = f", but perhaps by less than the margin of {margin}" if least <= self.limit else ""
        return f"worse by {self.shown_mean} {self.shown_bounds}{doubt} (95 % interval, {runs})"

    @property
    def reason(self) -> str:
        """Why the runs of the reference alone do not allow an answer, and what to do; empty if they do."""
        metric = self.test.metric
        if self.reference_diverged:
            return f"{metric} is not finite in a run that reshuffles everything: take a smaller step"
        if self.has_no_scale:
            return (
                f"{metric} is 0 with reshuffling, or scatters around it, and the margin is {self._margin} of it: "
                "give a margin in the unit of the metric"
            )
        if self.is_rounding:
            return (
                f"{metric} is {self._largest:.2g} at most in all runs, which is rounding, so the test says nothing: "
                "train for fewer epochs, or with a smaller step"
            )
        if self.is_too_noisy:
            noise = self.not_deterministic_by
            equal_runs = f", and two equal runs by {self.shown(noise)}" if noise else ""
            return (
                f"two runs of the reference that differ in the seed of the shuffle alone differ by "
                f"{self.shown(self.null_difference)}{equal_runs}. So smaller differences cannot be seen, and the "
                f"margin is {self.shown_margin}. Take a larger margin, or hold out more samples (compare on a larger "
                "dataset): more pairs do not help"
            )
        if self.is_constant:
            return "the metric is the same in every run, so it tests nothing"
        return ""

    def scaled(self, difference: float) -> float:
        """A difference like the margin: in percent of the reference, or in the unit of the metric."""
        return 100 * difference / self.unit if self._is_relative else difference

    @property
    def percent(self) -> str:
        """What follows a number of :meth:`scaled`: a percent sign, or nothing."""
        return " %" if self._is_relative else ""

    def shown(self, difference: float, *, sign: bool = False) -> str:
        """Format a difference like the margin, with three significant digits."""
        scaled = self.scaled(difference) + 0.0  # takes the sign from -0.0
        return f"{'+' if sign and scaled >= 0 else ''}{human_numbers([scaled], DIGITS)[0]}{self.percent}"

    @property
    def shown_margin(self) -> str:
        """The margin, as short as it was given."""
        return f"{self.scaled(self.limit):.{DIGITS}g}{self.percent}"

    @property
    def shown_mean(self) -> str:
        """The mean difference, with as many decimals as its bounds."""
        mean = self.scaled(self.mean)
        text = f"{mean:.{DIGITS - 1}e}" if abs(mean) >= WITH_EXPONENT else f"{mean:z.{self._decimals}f}"
        return f"{text}{self.percent}"

    @property
    def shown_bounds(self) -> str:
        """:attr:`bounds`, rounded outward: an interval, or the upper bound alone after a "≤"."""
        least, most = self.bounds
        upper = self._rounded(most, up=True)
        return f"{f'≤ {upper}' if least == -math.inf else f'[{self._rounded(least, up=False)}, {upper}]'}{self.percent}"

    @property
    def _decimals(self) -> int:
        """Decimals of the mean and its bounds, of which the largest has :data:`DIGITS` significant digits at most."""
        sizes = np.abs(_finite([*map(self.scaled, (self.mean, *self.bounds))]))
        return decimals_of(float(sizes.max(initial=0.0)), DIGITS)

    def _rounded(self, difference: float, *, up: bool) -> str:
        """A bound of the mean, rounded up or down."""
        scaled = self.scaled(difference)
        if not math.isfinite(scaled):
            return str(scaled)
        if abs(scaled) >= WITH_EXPONENT:
            return f"{scaled:.{DIGITS - 1}e}"
        exact = Decimal(f"{scaled:.9g}")  # without the rounding of binary numbers
        rounded = exact.quantize(Decimal(1).scaleb(-self._decimals), ROUND_CEILING if up else ROUND_FLOOR)
        return f"{rounded + 0:f}"

    def _in_words(self, difference: float, *, up: bool, most: str = "", least: str = "") -> str:
        """A bound in words, such as "0.50 % better", rounded up or down."""
        text = self._rounded(difference, up=up)
        if text.startswith("-"):
            return f"{least}{text[1:]}{self.percent} better"
        return f"{most}{text}{self.percent} worse"

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        has_bounds = len(self.differences) > 1
        return {
            "metric": self.test.metric,
            "margin": str(self.test.margin),
            "higher_is_better": self.test.higher_is_better,
            "most_pairs": self.test.pairs,
            "outcome": None if self.outcome is None else self.outcome.value,
            "text": str(self),
            "diverged": self.n_diverged,
            "limit": self.limit,
            "mean": _or_none(self.mean),
            "worst": self.worst if has_bounds else None,
            "interval": list(self.interval) if has_bounds else None,
            "null_difference": _or_none(self.null_difference),
            "not_deterministic_by": _or_none(self.not_deterministic_by),
            "reference": list(map(_or_none, self.reference[: max(1, self.n_pairs)])),
            "way": list(map(_or_none, self.way)),
        }


def _finite(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    return array[np.isfinite(array)]


def _or_none(value: float) -> float | None:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else None
