"""The shares of the ranks, from the records of a session."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from dshuffle.planning.shares import MEASURED_EPOCHS, fractions_of
from dshuffle.records import EpochRecord

LISTED_RANKS = 8
"""Ranks up to which all shares are listed."""

LEAST_EPOCHS = MEASURED_EPOCHS + 2
"""Epochs of the shortest run in which measured shares change. An exchange with the former shares is under way when the
last measured epoch ends."""


def shares_in_words(records: Sequence[EpochRecord]) -> str:
    """Say which part of the samples each rank had in the last epoch, and from which epoch on."""
    if not records or records[-1].choices.shares.is_even:
        return ""
    last = records[-1]
    if not last.weights:
        n_epochs = sum(record.first_epoch == last.first_epoch for record in records)
        if last.choices.shares.measures and n_epochs < LEAST_EPOCHS:
            epochs = "1 epoch is" if n_epochs == 1 else f"{n_epochs} epochs are"
            return f"shares: equal, because {epochs} too few to measure them; {LEAST_EPOCHS} are needed"
        return "shares: equal"
    fractions = [f"{fraction:.1%}".replace("%", " %") for fraction in fractions_of(last.weights, last.n_workers)]
    if last.n_workers > LISTED_RANKS:
        smallest, largest = (choose(range(last.n_workers), key=last.weights.__getitem__) for choose in (min, max))
        sizes = f"{fractions[smallest]} (rank {smallest}) to {fractions[largest]} (rank {largest})"
    else:
        sizes = ", ".join(f"{fraction} (rank {rank})" for rank, fraction in enumerate(fractions))
    equal = takewhile(lambda record: record.weights == last.weights, reversed(records))  # earlier equals do not count
    first = min(record.epoch for record in equal)
    since = f" since epoch {first}" if first > records[0].epoch else ""
    return f"shares{since}: {sizes}"
