"""Whether a way of training is not worse than a reference by a margin: a paired test with an error rate.

Both runs of a pair share initial weights, augmentation and batch seeds, and differ in the way alone. Pairs are added
until the answer is clear, or until there are as many as the user allows.

References
----------
K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika, 1983: the error rate is
spent look by look. Here it is spent in proportion to the pairs, and the parts are added (Bonferroni), because the joint
distribution of the looks is not known if the variance is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter

ERROR_RATE = 0.05
"""Probability of a wrong "not worse" if the difference is exactly the margin, over all looks together."""

FEWEST_PAIRS = 5
"""Least number of pairs. The variance of fewer differences is hardly known."""


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
        Whether higher values of the metric are better, as for an accuracy.
    rounding
        Differences of the metric up to this one are rounding. The margin is at least as large.

    Raises
    ------
    InvalidParameter
        If the margin is not above 0, or there are too few pairs.

    Examples
    --------
    >>> test = PairedTest("accuracy", margin=0.01, higher_is_better=True)
    >>> test.margin, test.looks
    (Margin(size=0.01, relative=False), (5, 10, 20))
    """

    metric: str
    margin: Margin | float | str = "1%"
    pairs: int = 20
    higher_is_better: bool = False
    rounding: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", Margin.of(self.margin))
        as_integer("pairs", self.pairs, FEWEST_PAIRS, "The variance of fewer differences is hardly known.")

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of pairs after which the answer is looked for: a quarter, half and all of them, at least 5."""
        return tuple(sorted({max(FEWEST_PAIRS, -(-self.pairs * quarters // 4)) for quarters in (1, 2, 4)}))

    def spent_at(self, look: int) -> float:
        """Return the part of an error rate that is spent at one of the looks. The parts add up to 1."""
        before = max((earlier for earlier in self.looks if earlier < look), default=0)
        return (look - before) / self.pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRuns:
    """Pairs of runs so far, and what they show.

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
    not worse than 0.1 at 95 % (5 pairs; worst case +0.018)
    """

    test: PairedTest
    reference: tuple[float, ...]
    way: tuple[float, ...]
    null: float
    repeated: float

    def __post_init__(self) -> None:
        values = [*self.reference, *self.way, self.null, self.repeated]
        if not np.isfinite(values).all():
            hint = "Take a smaller step if training diverged."
            raise InvalidParameter.of("metric", self.test.metric, f"finite in every run (it was {values})", hint)
        if len(self.way) > len(self.reference) or not self.reference:
            raise InvalidParameter.of("len(reference)", len(self.reference), f"at least {max(1, len(self.way))}")
        if self.limit == 0:
            hint = "Give a margin in the unit of the metric."
            raise InvalidParameter.of("margin", str(self._margin), f"a number: {self.test.metric} is 0", hint)

    @property
    def n_pairs(self) -> int:
        """Number of pairs."""
        return len(self.way)

    @property
    def differences(self) -> NDArray[np.float64]:
        """``(n_pairs,)`` differences between the way and the reference. Positive ones mean that the way is worse."""
        sign = -1.0 if self.test.higher_is_better else 1.0
        return np.asarray(sign * np.subtract(self.way, self.reference[: self.n_pairs]), dtype=np.float64)

    @property
    def unit(self) -> float:
        """What a difference is a fraction of: the mean of the reference for a relative margin, else 1."""
        return abs(float(np.mean(self.reference))) if self._margin.relative else 1.0

    @property
    def limit(self) -> float:
        """The margin in the unit of the metric."""
        return max(self._margin.size * self.unit, self.test.rounding)

    @property
    def _margin(self) -> Margin:
        assert isinstance(self.test.margin, Margin)  # PairedTest has made it one
        return self.test.margin

    @property
    def not_deterministic_by(self) -> float:
        """Difference between two equal runs."""
        return abs(self.repeated - self.reference[0])

    @property
    def null_difference(self) -> float:
        """Difference between two runs of the reference that differ in the seed of the shuffle, widened by noise.

        The noise is :attr:`not_deterministic_by`.
        """
        return abs(self.null - self.reference[0]) + self.not_deterministic_by

    @property
    def scatters_too_much(self) -> bool:
        """Whether two runs that reshuffle everything differ by more than the margin. No number of pairs helps then."""
        return self.null_difference > self.limit

    @property
    def is_constant(self) -> bool:
        """Whether the metric is the same number in every run, such as an accuracy of 1."""
        return len({*self.reference, *self.way, self.null, self.repeated}) == 1

    @property
    def mean(self) -> float:
        """Mean difference of the pairs."""
        return float(self.differences.mean())

    @property
    def worst(self) -> float:
        """Upper bound of the true difference, which all looks together exceed with :data:`ERROR_RATE` at most."""
        return self.mean + self._half_width(ERROR_RATE)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds between which all looks together have the true difference with 1 - :data:`ERROR_RATE` at least."""
        half = self._half_width(ERROR_RATE / 2)
        return self.mean - half, self.mean + half

    def _half_width(self, rate: float) -> float:
        """Half of the width of an interval whose bounds each fail with this rate, over all looks."""
        look = max((look for look in self.test.looks if look <= self.n_pairs), default=self.n_pairs)
        quantile = float(scipy.special.stdtrit(self.n_pairs - 1, 1 - rate * self.test.spent_at(look)))
        return quantile * float(self.differences.std(ddof=1)) / math.sqrt(self.n_pairs)

    @property
    def outcome(self) -> PairedOutcome | None:
        """The answer; None if there are too few pairs for one."""
        if self.scatters_too_much:
            return PairedOutcome.CANNOT_TELL
        if self.n_pairs not in self.test.looks:
            return None
        if self.is_constant:
            return PairedOutcome.CANNOT_TELL
        if self.worst < self.limit:
            return PairedOutcome.NOT_WORSE
        least, _ = self.interval
        if least > self.limit:
            return PairedOutcome.WORSE
        if self.n_pairs < self.test.pairs:
            return None
        return PairedOutcome.WORSE if least > 0 else PairedOutcome.CANNOT_TELL

    def __str__(self) -> str:
        """The answer, with the number of pairs and the margin."""
        outcome = self.outcome
        if outcome is None:
            return f"not clear yet ({self.n_pairs} pairs)"
        if outcome is PairedOutcome.NOT_WORSE:
            worst = self.shown(self.worst, sign=True)
            return f"not worse than {self.shown(self.limit)} at 95 % ({self.n_pairs} pairs; worst case {worst})"
        if outcome is PairedOutcome.WORSE:
            return f"worse by {self.shown(self.mean)} {self.shown_interval} ({self.n_pairs} pairs)"
        if self.scatters_too_much:
            noise = self.not_deterministic_by
            widened = f", of which two equal runs differ by {self.shown(noise)}" if noise else ""
            return (
                f"cannot tell: two runs of the reference that differ in the seed of the shuffle alone differ by "
                f"{self.shown(self.null_difference)}{widened}, more than the margin of {self.shown(self.limit)}. "
                "Take a larger margin, or hold out more samples: more pairs do not help"
            )
        if self.is_constant:
            return "cannot tell: the metric is the same in every run, so it tests nothing"
        seen = self.shown(self.worst - self.mean)
        return f"cannot tell: differences below {seen} cannot be seen with {self.n_pairs} pairs"

    def scaled(self, difference: float) -> float:
        """A difference like the margin: in percent of the reference, or in the unit of the metric."""
        return 100 * difference / self.unit if self._margin.relative else difference

    @property
    def percent(self) -> str:
        """What follows a number of :meth:`scaled`: a percent sign, or nothing."""
        return " %" if self._margin.relative else ""

    def shown(self, difference: float, *, sign: bool = False) -> str:
        """Format a difference like the margin."""
        plus = "+" if sign and difference >= 0 else ""
        return f"{plus}{self.scaled(difference):.3g}{self.percent}"

    @property
    def shown_interval(self) -> str:
        """Both bounds of the interval."""
        least, most = same_decimals(*map(self.scaled, self.interval))
        return f"[{least}, {most}]{self.percent}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        has_bounds = self.n_pairs > 1
        return {
            "metric": self.test.metric,
            "margin": str(self.test.margin),
            "higher_is_better": self.test.higher_is_better,
            "most_pairs": self.test.pairs,
            "outcome": None if self.outcome is None else self.outcome.value,
            "text": str(self),
            "limit": self.limit,
            "mean": self.mean if self.n_pairs else None,
            "worst": self.worst if has_bounds else None,
            "interval": list(self.interval) if has_bounds else None,
            "null_difference": self.null_difference,
            "not_deterministic_by": self.not_deterministic_by,
            "reference": list(self.reference[: max(1, self.n_pairs)]),
            "way": list(self.way),
        }


def same_decimals(first: float, second: float) -> tuple[str, str]:
    """Format two numbers with as many decimals, of which the larger number has three significant digits at most.

    Examples
    --------
    >>> same_decimals(-0.0812, 1.2345), same_decimals(0.5, 0.5), same_decimals(80.02, 81.0), same_decimals(0.0, 0.0)
    (('-0.08', '1.23'), ('0.5', '0.5'), ('80', '81'), ('0', '0'))
    """
    largest = max(abs(first), abs(second))
    decimals = 0 if largest == 0 else max(0, 2 - math.floor(math.log10(largest)))
    texts = f"{first:.{decimals}f}", f"{second:.{decimals}f}"
    while decimals and all(text.endswith("0") for text in texts):
        decimals -= 1
        texts = texts[0][:-1].rstrip("."), texts[1][:-1].rstrip(".")
    return texts
