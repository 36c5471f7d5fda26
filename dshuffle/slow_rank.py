"""Which rank all others wait for, from the seconds that each rank trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dshuffle.units import human_seconds

SLOW = 1.5
"""A rank is slow if its training takes this many times as long as the median of the others."""

NOTICEABLE = 0.1
"""Seconds of an epoch below which differences between ranks are noise."""


def slow_rank_in_words(epochs: Sequence[Sequence[float]]) -> str:
    """Say how much longer the slowest rank trained than the others, and how long they waited for it."""
    counted = epochs[1:] or epochs
    if not counted or len(counted[0]) < 2:
        return ""
    seconds = np.median(counted, axis=0)
    rank = seconds.argmax()
    middle = np.median(np.delete(seconds, rank))
    wait = seconds[rank] - middle
    if wait < NOTICEABLE or seconds[rank] < SLOW * middle:
        return ""
    times = f"{seconds[rank] / middle:.1f} times as long as the median of the others" if middle > 0 else "longest"
    return f"rank {rank} trained {times}, which waited {human_seconds(wait)} an epoch"
