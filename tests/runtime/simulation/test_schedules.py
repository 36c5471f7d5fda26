"""Whole sessions in virtual time, under random workloads and faults."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

import dshuffle.runtime.scheduler.machine
from dshuffle.runtime.client.epoch import EpochTasks

from .datasets import Store
from .schedule import BUILD, EPOCHS, FAULTS, Schedule, Workload, possible
from .simulation import Simulation, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")  # of processes that are killed

QUICK = range(6)
MANY = range(len(QUICK), 200)


@pytest.fixture
def store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        yield Store(folder)


def test_some_schedules() -> None:
    assert simulate(QUICK).seen["epochs"] > len(QUICK)


@pytest.mark.slow
def test_many_schedules_cover_each_value() -> None:
    simulation = simulate(MANY)
    assert possible() - simulation.covered == set()
    seen = simulation.seen
    refusals = [f"refused: {name}" for name in ("ExchangeError", "Mistake", "ClusterError")]
    assert min(seen[what] for what in [*FAULTS, *refusals, "epochs", "resumed", "WorkerLost"]) > 4, seen


def test_an_epoch_that_ends_without_some_tasks_is_noticed(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """A client that waits for tasks, and does not ask what became of them."""
    monkeypatch.setattr(EpochTasks, "end", EpochTasks.wait)
    simulation = Simulation(store)

    def run() -> None:
        for seed in range(10):
            simulation.run(Schedule(seed, 0, 2, EPOCHS, frozenset({"mistake"}), (Workload(fetches="never"),)))

    with pytest.raises(AssertionError, match=r"ranks \[.*\] have not trained, and nobody says so"):
        run()


@pytest.mark.parametrize("way", [0, 1, 3])
def test_workers_that_draw_differently_train_on_nothing(way: int, store: Store) -> None:
    simulation = Simulation(store)
    simulation.run(Schedule(1, way, 3, EPOCHS, frozenset({BUILD})))
    assert simulation.seen["refused: ExchangeError"] > 0
    assert simulation.seen["epochs"] == 0


def test_samples_that_are_lost_are_noticed(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """A scheduler that does not compare what the workers have drawn."""
    monkeypatch.setattr(dshuffle.runtime.scheduler.machine, "check_votes", lambda *_: None)
    with pytest.raises(AssertionError, match="samples were lost or doubled"):
        Simulation(store).run(Schedule(1, 0, 3, EPOCHS, frozenset({BUILD})))


@pytest.mark.slow
def test_everything_follows_from_the_seed_in_another_process() -> None:
    code = "from tests.runtime.simulation.simulation import simulate; print(sorted(simulate(range(5)).seen.items()))"
    command, environment = [sys.executable, "-W", "ignore", "-c", code], os.environ | {"PYTHONHASHSEED": "0"}
    ran = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    assert ran[0].stdout == ran[1].stdout
    assert "epochs" in ran[0].stdout
