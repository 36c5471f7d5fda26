"""The votes on a run: whether what all participants counted fits together."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from dshuffle.planning.sample_digest import SAME_BUILD, SampleDigest
from dshuffle.runtime.messages import Counts


@dataclass(frozen=True, slots=True)
class Totals:
    """Samples that had to move in an epoch, packets that carried them, and rows in these packets."""

    needed: int
    packets: int
    expected: int

    @classmethod
    def of(cls, counts: Collection[Counts]) -> Self:
        """Sums over workers that planned their own parts, else what all of them found."""
        first = next(iter(counts))
        summed = counts if first.leaving is not None else [first]
        return cls(*(sum(getattr(member, field.name) for member in summed) for field in dataclasses.fields(cls)))


def check_votes(epoch: int, counts: Collection[Counts]) -> str | None:
    """What is wrong with the counts of all participants, or None.

    They must have the same plan, together train on every sample that is due exactly once, and have all their rows.
    """
    if len({member.digest for member in counts}) > 1:
        return f"epoch {epoch}: the workers made different plans. {SAME_BUILD}"
    drew = SampleDigest.summed(member.drawn.fields for member in counts if member.drawn is not None)
    due = SampleDigest.summed(member.due.fields for member in counts if member.due is not None)
    if drew != due:
        samples = f"as many samples as are due ({due.count}), but not the same ones"
        if drew.count != due.count:
            samples = f"{drew.count} samples, but {due.count} are due"
        return (
            f"epoch {epoch}: the workers drew {samples}. Some samples would be trained on twice, or not at all. "
            f"Workers draw differently if their builds of dshuffle differ. {SAME_BUILD}"
        )
    expected = Totals.of(counts).expected
    arrived = sum(member.rows for member in counts)
    if arrived != expected:
        return f"epoch {epoch}: {arrived} rows arrived, but {expected} were expected"
    leaving = sum(member.leaving or 0 for member in counts)
    arriving = sum(member.arriving or 0 for member in counts)
    if leaving != arriving:
        return f"epoch {epoch}: the workers planned to send {leaving} rows and to receive {arriving}. {SAME_BUILD}"
    return None
