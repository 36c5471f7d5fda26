"""The votes on a run, and the measurements of the participants, combined."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dshuffle.planning.sample_digest import SAME_BUILD, SampleDigest
from dshuffle.records import Measures
from dshuffle.runtime.scheduler.instructions import Run

CPU_BOUND = 0.2
"""With a smaller share of idle processors, the time of an exchange says nothing about the links."""

TIMED_NBYTES = 256 * 2**10
"""Bytes that a worker must have received for its rate to say something about its link."""


NO_MEASURES = Measures(wire_sent_bytes=(0,), wire_received_bytes=(0,))


def totals(votes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Samples and packets of an epoch: sums over workers that planned their own parts, else what all of them found."""
    found = list(votes)
    names = {"needed", "packets", "expected", "leaving", "arriving"} & found[0].keys()
    if "leaving" in names:
        return {name: sum(vote[name] for vote in found) for name in names}
    return {name: found[0][name] for name in names}


def check_votes(epoch: int, votes: Iterable[Mapping[str, Any]]) -> str | None:
    """What is wrong with the votes of all participants, or None.

    They must have the same plan, together train on every sample that is due exactly once, and have all their rows.
    """
    found = list(votes)
    if len({vote["digest"] for vote in found}) > 1:
        return f"epoch {epoch}: the workers made different plans. {SAME_BUILD}"
    drawn, due = (SampleDigest.summed(vote[name] for vote in found if name in vote) for name in ("drawn", "due"))
    if drawn != due:
        what = f"as many samples as are due ({due.count}), but not the same ones"
        if drawn.count != due.count:
            what = f"{drawn.count} samples, but {due.count} are due"
        return (
            f"epoch {epoch}: the workers drew {what}. Some samples would be trained on twice, or not at all. Workers "
            f"draw differently if their builds of dshuffle differ. {SAME_BUILD}"
        )
    total = totals(found)
    arrived = sum(vote["rows"] for vote in found)
    if arrived != total["expected"]:
        return f"epoch {epoch}: {arrived} rows arrived, but {total['expected']} were expected"
    if total.get("leaving") != total.get("arriving"):
        return (
            f"epoch {epoch}: the workers planned to send {total['leaving']} rows and to receive {total['arriving']}. "
            + SAME_BUILD
        )
    return None


@dataclass(frozen=True, slots=True)
class Reports:
    """What participants reported with a commit: measurements of each and of all, and seconds of training."""

    measured: list[Measures]
    measures: Measures
    training_seconds: list[float]


def combined_reports(replies: Mapping[int, Mapping[str, Any]], participants: Iterable[int]) -> Reports:
    """Combine the replies to a commit, in the order of the participants. One that was lost has measured nothing."""
    nothing = {"report": {"measures": NO_MEASURES.to_dict(), "training_seconds": 0.0}}
    reports = [replies.get(who, nothing)["report"] for who in participants]
    measured = [Measures.from_dict(report["measures"]) for report in reports]
    return Reports(measured, Measures.combined(measured), [report["training_seconds"] for report in reports])


def measurements_of(run: Run, reports: Reports, asked_at: float) -> dict[str, Any]:
    """What is known of the exchange of a run, for the record of its epoch.

    ``asked_at`` is the time at which the client asked for the epoch.
    """
    total = totals(run.votes.values())
    return {
        "epoch": run.epoch,
        "run_id": run.run_id,
        "needed": total["needed"],
        "packets": total["packets"],
        "components": total["expected"],
        "exchange_seconds": run.ready_after,
        "waited_seconds": max(0.0, run.started + run.ready_after - asked_at),
        "measures": reports.measures.to_dict(),
    }


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
