"""Whole sessions in virtual time, under random faults."""

from __future__ import annotations

import pytest

from dshuffle.runtime.worker.worker_plugin import DShuffleWorker

from .schedule import RATES, STRIKES, Schedule, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")  # of processes that are killed


def test_some_random_schedules() -> None:
    seen = simulate(range(15))
    assert seen["epochs"] > 10, seen


@pytest.mark.slow
def test_many_random_schedules() -> None:
    seen = simulate(range(15, 90))
    assert min(seen[what] for what in [*RATES, *STRIKES, "epochs", "WorkerLost", "ExchangeError"]) > 2, seen


def test_a_schedule_that_fails_is_named_and_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that do not close their sessions."""

    async def close(plugin: DShuffleWorker, session_id: str, number: int) -> None:
        pass

    monkeypatch.setattr(DShuffleWorker, "close", close)
    smallest = r"Schedule\(seed=\d+, way=\d+, n_workers=2, epochs=1, faults=frozenset\(\), .*\)"
    with pytest.raises(AssertionError, match=rf"Schedule\(seed=.*, or {smallest}: a session is left on sim://"):
        simulate(range(15))


def test_everything_follows_from_the_seed() -> None:
    assert Schedule.of(5) == Schedule.of(5)
    assert simulate(range(5)) == simulate(range(5))
