"""Whether one way of training gives less scattered results than another.

References
----------
M. B. Brown and A. B. Forsythe, "Robust tests for the equality of variances", 1974: Levene's test with the median.
Provatas et al. (2021), Tables II, IV and V, give variances of five runs. With equal variances, a ratio of 3 or more
occurs in 15 % of all such cases; see docs/papers.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray


class VarianceRatio(NamedTuple):
    """Ratio of two variances with its 95 % bootstrap interval, and the p-value of a test that they are equal."""

    ratio: float
    low: float
    high: float
    p_value: float

    @property
    def verdict(self) -> str:
        """``"less"`` or ``"more"`` scattered than the baseline if interval and test agree; else ``"none shown"``."""
        if self.p_value < 0.05 and not self.low <= 1 <= self.high:
            return "less" if self.ratio > 1 else "more"
        return "none shown"


def variance_ratio(baseline: ArrayLike, other: ArrayLike, *, resamples: int = 5000, seed: int = 0) -> VarianceRatio:
    """Compare the variances of two independent sets of at least three runs. NaN if the runs of each set are equal."""
    above, below = np.asarray(baseline, np.float64), np.asarray(other, np.float64)
    if not np.ptp(above) and not np.ptp(below):
        return VarianceRatio(np.nan, np.nan, np.nan, 1.0)
    # scipy.stats.bootstrap warns about resamples without variance, which occur with few runs and are left out here.
    rng = np.random.default_rng(seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = _ratio(above, below)
        samples = [values[rng.integers(len(values), size=(resamples, len(values)))] for values in (above, below)]
        low, high = np.nanpercentile(_ratio(samples[0], samples[1]), [2.5, 97.5])
    p_value = float(scipy.stats.levene(above, below, center="median").pvalue)
    return VarianceRatio(float(ratio), float(low), float(high), p_value)


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.var(above, axis=-1, ddof=1) / np.var(below, axis=-1, ddof=1))
