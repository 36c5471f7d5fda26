"""The votes on a run, and the measurements of the participants, combined."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from dshuffle.planning.sample_digest import SAME_BUILD, SampleDigest
from dshuffle.records import Measures
from dshuffle.runtime.messages import Counts, Report

CPU_BOUND = 0.2
"""With a smaller share of idle processors, the time of an exchange says nothing about the links."""

TIMED_NBYTES = 256 * 2**10
"""Bytes that a worker must have received for its rate to say something about its link."""


NOTHING = Report(measures=Measures(wire_sent_bytes=(0,), wire_received_bytes=(0,)))
"""The report of a participant that was lost."""


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
    drawn = SampleDigest.summed(member.drawn.fields for member in counts if member.drawn is not None)
    due = SampleDigest.summed(member.due.fields for member in counts if member.due is not None)
    if drawn != due:
        what = f"as many samples as are due ({due.count}), but not the same ones"
        if drawn.count != due.count:
            what = f"{drawn.count} samples, but {due.count} are due"
        return (
            f"epoch {epoch}: the workers drew {what}. Some samples would be trained on twice, or not at all. Workers "
            f"draw differently if their builds of dshuffle differ. {SAME_BUILD}"
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


@dataclass(frozen=True, slots=True)
class Reports:
    """What participants reported with a commit: measurements of each and of all, and seconds of training."""

    measured: list[Measures]
    measures: Measures
    training_seconds: list[float]


def combined_reports(reports: Mapping[int, Report], participants: Iterable[int]) -> Reports:
    """Combine the reports with a commit, in the order of the participants. One that was lost has measured nothing."""
    in_order = [reports.get(who, NOTHING) for who in participants]
    measured = [report.measures for report in in_order]
    return Reports(measured, Measures.combined(measured), [report.training_seconds for report in in_order])


def next_rate(before: float | None, measured: float | None) -> float | None:
    """The rate for the next exchange. It falls by half at most, so that one slow exchange does not decide."""
    if before is None or measured is None:
        return measured or before
    return measured if math.isinf(before) else max(measured, before / 2)


def rate_of(measured: Iterable[Measures], cpu_idle: float) -> float | None:
    """Median rate of messages into a worker, in bytes per second; None if next to nothing was sent.

    If processors were the limit, links may be faster, and messages should be long: each of them costs processor time.
    """
    rates = [
        sum(one.wire_received_bytes) / one.transfer_seconds
        for one in measured
        if sum(one.wire_received_bytes) > TIMED_NBYTES and one.transfer_seconds > 0
    ]
    if not rates:
        return None
    return statistics.median(rates) if cpu_idle >= CPU_BOUND else math.inf
