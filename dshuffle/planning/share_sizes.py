"""Sizes of unequal shares, from one weight for each rank.

Weights are integers, in thousandths of the largest one. So two processes with the same weights compute the same sizes,
and records and checkpoints can hold them. No weights at all, ``()``, means equal shares.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter

Weights = tuple[int, ...]
"""One weight for each rank, or none for equal shares."""

LARGEST_WEIGHT = 1000
"""The largest weight. Measured speeds are no more exact than one part in a thousand."""


def as_weights(shares: Sequence[float]) -> Weights:
    """Weights in proportion to ``(n,)`` positive numbers; none if they are equal.

    Examples
    --------
    >>> as_weights([2, 2, 0.5]), as_weights([3, 3])
    ((1000, 1000, 250), ())
    """
    largest = max(shares)
    weights = tuple(max(1, round(LARGEST_WEIGHT * (share / largest))) for share in shares)
    return () if min(weights) == LARGEST_WEIGHT else weights


def check_weights(weights: Weights, n_workers: int) -> None:
    """Refuse weights that are not those of so many ranks.

    Raises
    ------
    InvalidParameter
        If there is another number of weights, or one is not in [1, 1000].
    """
    if weights and (len(weights) != n_workers or not all(1 <= weight <= LARGEST_WEIGHT for weight in weights)):
        allowed = f"{n_workers} integers in [1, {LARGEST_WEIGHT}], one for each rank, or () for equal shares"
        raise InvalidParameter.of("weights", weights, allowed)


@functools.lru_cache(maxsize=64)
def share_sizes(n_units: int, weights: Weights) -> NDArray[np.int64]:
    """``(n,)`` int64 sizes in proportion to the weights. They add up to ``n_units``, and each is at least 1.

    Each size is the exact proportion rounded down or up: the units that are left after rounding down go to the largest
    remainders, and to lower ranks among equals. Ranks that would get nothing take a unit from the largest sizes.

    Parameters
    ----------
    n_units
        Number of samples or chunks to share out, at least one for each rank.
    weights
        One weight for each rank.

    Returns
    -------
    (n,) int64, read-only

    Examples
    --------
    >>> share_sizes(13, (1000, 1000, 1000, 250)), share_sizes(4, (1000, 1, 1))
    (array([4, 4, 4, 1]), array([2, 1, 1]))
    """
    total = sum(weights)
    # Python's integers: the products may have more than 64 bits.
    parts = [divmod(n_units * weight, total) for weight in weights]
    sizes = np.array([whole for whole, _ in parts], np.int64)
    by_remainder = sorted(range(len(weights)), key=lambda rank: -parts[rank][1])
    sizes[by_remainder[: n_units - int(sizes.sum())]] += 1
    for rank in np.flatnonzero(sizes == 0).tolist():
        sizes[rank] += 1
        sizes[max(range(len(weights)), key=lambda other: (sizes[other], -weights[other]))] -= 1
    sizes.flags.writeable = False
    return sizes
