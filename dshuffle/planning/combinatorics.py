"""Counting."""

from __future__ import annotations

import math


def log_choose(n: float, k: float) -> float:
    """Natural logarithm of the binomial coefficient, which may be of real numbers.

    Examples
    --------
    >>> round(math.exp(log_choose(5, 2)))
    10
    """
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
