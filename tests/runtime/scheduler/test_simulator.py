"""The scheduler's state machine under random schedules."""

from __future__ import annotations

import pytest

from .simulator import FAULTS, simulate


@pytest.mark.parametrize(("count", "least"), [(500, 10), pytest.param(2000, 50, marks=pytest.mark.slow)])
def test_random_schedules(count: int, least: int) -> None:
    seen = simulate(range(count))
    expected = [*FAULTS, "committed", "ExchangeError", "WorkerLost", "replaced"]
    assert min(seen[what] for what in expected) > least, seen
    assert min(seen[what] for what in ["adopted", "MembershipChanged"]) > least * 0.4, seen
