"""Whole sessions in virtual time, under random faults."""

from __future__ import annotations

import pytest

from dshuffle.exchange.receiver import Receiver

from .schedule import RATES, STRIKES, Schedule, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")  # of processes that are killed


def test_some_random_schedules() -> None:
    seen = simulate(range(15))
    assert seen["epochs"] > 10, seen


@pytest.mark.slow
def test_many_random_schedules() -> None:
    seen = simulate(range(15, 165))
    assert min(seen[what] for what in [*RATES, *STRIKES, "epochs", "WorkerLost", "ExchangeError"]) > 5, seen


def test_a_schedule_that_fails_is_named_and_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that does not stop its tasks when its run is aborted."""

    async def abort(receiver: Receiver) -> None:
        receiver._inbox.abort()

    monkeypatch.setattr(Receiver, "abort", abort)
    with pytest.raises(AssertionError, match=r"Schedule\(seed=\d+, .*, or Schedule\(seed=\d+, .*: tasks are left"):
        simulate(range(50))


def test_everything_follows_from_the_seed() -> None:
    assert Schedule.of(5) == Schedule.of(5)
    assert simulate(range(5)) == simulate(range(5))
