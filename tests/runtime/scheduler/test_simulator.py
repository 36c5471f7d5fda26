"""The scheduler's state machine under random schedules."""

from __future__ import annotations

from .simulator import FAULTS, simulate


def test_random_schedules() -> None:
    seen = simulate(range(2000))
    expected = [*FAULTS, "committed", "ExchangeError", "WorkerLost", "replaced"]
    assert min(seen[what] for what in expected) > 50, seen
    assert min(seen[what] for what in ["adopted", "MembershipChanged"]) > 20, seen
