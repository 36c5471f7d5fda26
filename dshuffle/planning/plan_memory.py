"""How much memory planning takes."""

from __future__ import annotations

from dshuffle.planning.own_part import plans_own_parts
from dshuffle.planning.shuffle_spec import ShuffleSpec

OWN_NBYTES = 90
"""Bytes for each sample of a share that a worker plans alone."""

ALL_NBYTES = 110
"""Bytes for each sample of a plan for all workers, measured as a peak."""

HELD_NBYTES = 25
"""Bytes for each copy of a sample that such a plan loads first if workers hold excess, measured as a peak."""


def plan_nbytes(spec: ShuffleSpec) -> int:
    """Bytes that planning takes at most on every worker, and on the server.

    Examples
    --------
    >>> from dshuffle.planning import Choices
    >>> plan_nbytes(ShuffleSpec(10**9, 4096, Choices("global", "peer")))
    21972690
    >>> plan_nbytes(ShuffleSpec(10**7, 16, Choices("global", "clique", cache_fraction=0.5)))
    3100000000
    """
    if plans_own_parts(spec, spec.choices.delivery):
        return OWN_NBYTES * spec.largest_share
    held = spec.capacity * spec.n_workers if spec.has_excess else 0
    masks = 8 * ((spec.n_workers - 1) // 64)  # beyond the first word of the holder masks
    return (ALL_NBYTES + masks) * spec.n_samples + HELD_NBYTES * held
