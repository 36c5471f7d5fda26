"""The scheduler's state machine under random schedules."""

from __future__ import annotations

from .simulator import FAULTS, simulate


def test_nobody_is_lost_because_a_task_keeps_its_worker_from_answering() -> None:
    seen = simulate(range(300), dict.fromkeys(FAULTS, 0.0) | {"busy": 0.02})
    assert seen["busy"] > 300, seen
    assert seen["committed"] + seen["ExchangeError"] == 300 * 6, seen
    assert seen["ExchangeError"] < 10, seen  # calls that have waited for the timeout; they are made again
    assert seen["searched"] == seen["ended"] == 0, seen


def test_random_schedules() -> None:
    seen = simulate(range(2000))
    expected = [*FAULTS, "committed", "ExchangeError", "WorkerLost", "replaced"]
    assert min(seen[what] for what in expected) > 50, seen
    assert min(seen[what] for what in ["adopted", "MembershipChanged"]) > 20, seen
