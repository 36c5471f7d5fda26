"""Which rank all others wait for, from the records of a session."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dshuffle.records import EpochRecord
from dshuffle.units import human_seconds

SLOW = 1.5
"""A rank is slow if its training takes this many times as long as the median of the others."""

NOTICEABLE = 0.1
"""Seconds of an epoch below which differences between ranks are noise."""


def slow_rank_in_words(records: Sequence[EpochRecord]) -> str:
    """Say how much longer the slowest rank trained than the others, and how long they waited for it.

    Parameters
    ----------
    records
        Epochs of one session. The first one does not count if there are others, because its tasks load code.

    Returns
    -------
    str
        A sentence; empty if no rank is slow, or differences are too short to tell. Medians over the epochs with as many
        ranks as the last one.
    """
    epochs = [record.rank_training_seconds for record in records if record.rank_training_seconds]
    epochs = [seconds for seconds in epochs[1:] or epochs if len(seconds) == len(epochs[-1])]
    if not epochs or len(epochs[0]) < 2:
        return ""
    seconds = np.median(epochs, axis=0)
    rank = int(np.argmax(seconds))
    middle = float(np.median(np.delete(seconds, rank)))
    wait = float(seconds[rank] - middle)
    if wait < NOTICEABLE or seconds[rank] < SLOW * middle:
        return ""
    times = f"{seconds[rank] / middle:.1f} times as long as the median of the others" if middle > 0 else "longest"
    return f"rank {rank} trained {times}, which waited {human_seconds(wait)} an epoch"
