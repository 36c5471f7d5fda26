"""Counting."""

from __future__ import annotations

import math
from fractions import Fraction


def log_factorial(n: float | Fraction) -> float:
    """Natural logarithm of n!, which may be that of a real number.

    Examples
    --------
    >>> round(math.exp(log_factorial(4)))
    24
    """
    return math.lgamma(float(n) + 1)


def log_choose(n: float, k: float) -> float:
    """Natural logarithm of the binomial coefficient, which may be of real numbers.

    Examples
    --------
    >>> round(math.exp(log_choose(5, 2)))
    10
    """
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
