"""The scheduler's state machine under random schedules."""

from __future__ import annotations

import pytest

from .simulator import FAULTS, simulate


def test_nobody_is_lost_because_a_task_keeps_its_worker_from_answering() -> None:
    seen = simulate(range(300), dict.fromkeys(FAULTS, 0.0) | {"busy": 0.02})
    assert seen["busy"] > 100, seen
    assert seen["committed"] + seen["ExchangeError"] == 300 * 6, seen
    assert seen["ExchangeError"] < 10, seen  # calls that have waited for the timeout; they are made again
    assert seen["searched"] == seen["ended"] == 0, seen


@pytest.mark.parametrize(("count", "least"), [(250, 4), pytest.param(2000, 50, marks=pytest.mark.slow)])
def test_random_schedules(count: int, least: int) -> None:
    seen = simulate(range(count))
    expected = [*FAULTS, "committed", "ExchangeError", "WorkerLost", "replaced"]
    assert min(seen[what] for what in expected) > least, seen
