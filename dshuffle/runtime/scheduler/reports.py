"""The measurements that participants report with a commit, combined; and the rate of links that they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dshuffle.records import Measures
from dshuffle.runtime.messages import Report, TrainingTime

CPU_BOUND = 0.2
"""With a smaller share of idle processors, the time of an exchange says nothing about the links."""

TIMED_NBYTES = 256 * 2**10
"""Bytes that a worker must have received for its rate to say something about its link."""

NOTHING = Report(measures=Measures(wire_sent_bytes=(0,), wire_received_bytes=(0,)))
"""The report of a participant that was lost."""


@dataclass(frozen=True, slots=True)
class Reports:
    """What participants reported with a commit: measurements of each and of all, and times of training."""

    measured: list[Measures]
    measures: Measures
    training: list[TrainingTime]


def combined_reports(reports: Mapping[int, Report], participants: Iterable[int]) -> Reports:
    """Combine the reports with a commit, in the order of the participants. One that was lost has measured nothing."""
    in_order = [reports.get(participant, NOTHING) for participant in participants]
    measured = [report.measures for report in in_order]
    return Reports(measured, Measures.combined(measured), [report.training for report in in_order])


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
        sum(measures.wire_received_bytes) / measures.transfer_seconds
        for measures in measured
        if sum(measures.wire_received_bytes) > TIMED_NBYTES and measures.transfer_seconds > 0
    ]
    if not rates:
        return None
    return statistics.median(rates) if cpu_idle >= CPU_BOUND else math.inf
