"""Stratified sharding: the same classes on every worker."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.errors import ShardingWarning
from dshuffle.planning import label_codes, stratified_ranks
from dshuffle.planning.values import Ranks


def stratified(labels: ArrayLike, n_workers: int, *, seed: int = 0) -> Ranks:
    """Deal every class out to the workers in turn.

    Parameters
    ----------
    labels
        ``(q,)`` integers, the class of each sample.
    n_workers
        At most q.
    seed
        Any integer.

    Returns
    -------
    (q,) int32
        The worker of each sample. Of each class, and of all samples, workers get equally many or one more.

    Raises
    ------
    InvalidParameter
        If labels are not one-dimensional, not integral or all distinct, or there are fewer samples than workers.

    Warns
    -----
    ShardingWarning
        If a class has fewer samples than there are workers, some of which then get none of it.

    References
    ----------
    Paper 002, section III-A and Fig. 4.

    Examples
    --------
    >>> stratified([3, 3, 8, 8], 2)
    array([0, 1, 0, 1], dtype=int32)
    """
    codes, classes = label_codes(labels)
    ranks = stratified_ranks(codes, len(classes), n_workers, seed=seed)
    sizes = np.bincount(codes)
    small = np.flatnonzero(sizes < n_workers)
    if len(small):
        least = small[sizes[small].argmin()]
        warnings.warn(
            f"{len(small)} of {len(classes)} classes have fewer samples than there are workers ({n_workers}), some of "
            f"which get none of them; the smallest is {classes[least]} with {sizes[least]}",
            ShardingWarning,
            stacklevel=2,
        )
    return ranks
