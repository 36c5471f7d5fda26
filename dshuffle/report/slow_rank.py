"""Which rank all others wait for, from the records of a session."""

from __future__ import annotations

from collections.abc import Sequence

from dshuffle.records import EpochRecord
from dshuffle.report.summary import WayResult
from dshuffle.slow_rank import slow_rank_in_words


def slow_rank_of(records: Sequence[EpochRecord]) -> str:
    """Say how much longer the slowest rank trained than the others, and how long they waited for it."""
    records = [record for record in records if record.rank_training_seconds]
    if not records:
        return ""
    last = records[-1]
    return slow_rank_in_words(
        [
            record.rank_training_seconds
            for record in records
            if len(record.rank_training_seconds) == len(last.rank_training_seconds) and record.weights == last.weights
        ]
    )


def slow_ranks_of(ways: Sequence[WayResult]) -> str:
    """Say which rank is slow with each way that has a slow one; empty if none has."""
    slow = {way.label: slow_rank_of(way.records) for way in ways}
    return " ".join(f"With “{label}”, {words}." for label, words in slow.items() if words)
