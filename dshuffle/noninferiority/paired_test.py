"""What to compare in pairs of runs: the metric, the margin, and how many pairs at most."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter

FEWEST_PAIRS = 5
"""Least number of pairs. The variance of fewer differences is hardly known."""


LOWER_METRICS = re.compile("loss|error|mse|mae|perplexity")
"""Names of metrics of which lower values are better, unless they are :data:`IN_DOUBT` as well."""

IN_DOUBT = re.compile(r"(^|[^a-z])(neg|minus)|^-|accuracy|auc|f1|r2|score|precision|recall")
"""Negated metrics, and parts of names of which higher values are better: ``neg_mean_squared_error``."""


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
        Whether higher values of the metric are better, as for an accuracy. None means that
        the name tells: it must match :data:`LOWER_METRICS` and not :data:`IN_DOUBT`. Lower values are then better.
    rounding
        Differences of the metric up to this one are rounding. The margin is at least as large. A metric with a rounding
        is continuous: it has no steps.
    meaning
        What the metric is, in words, for reports; empty if it is what a training function calls it.

    Raises
    ------
    InvalidParameter
        If the margin is not above 0, there are too few pairs, or the direction of the metric is in doubt.

    Examples
    --------
    >>> test = PairedTest("accuracy", margin=0.01, higher_is_better=True)
    >>> test.margin, test.looks
    (Margin(size=0.01, relative=False), (5, 10, 20))
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
            name = self.metric.lower()
            if IN_DOUBT.search(name) or not LOWER_METRICS.search(name):
                hint = "Add --higher-is-better or --lower-is-better; in Python, higher_is_better=True or False."
                raise InvalidParameter.of("metric", self.metric, "given with the direction that is better", hint)
            object.__setattr__(self, "higher_is_better", False)

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
        return (look - before) / self.pairs
