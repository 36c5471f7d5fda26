"""Whole sessions in virtual time, under random workloads and faults."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dshuffle.runtime.scheduler.machine
from dshuffle.runtime.client.epoch import EpochTasks
from dshuffle.runtime.messages import CloseOrder
from dshuffle.runtime.worker.worker_plugin import OPERATIONS, WorkerSessions

from .coverage import possible
from .datasets import N_SAMPLES, Store
from .processes import Process
from .schedule import BUILD, EPOCHS, FAULTS, WAYS, Schedule, Workload
from .simulation import Simulation, simulate
from .virtual_time import VirtualLoop

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
def test_many_schedules_cover_each_value_and_most_pairs() -> None:
    simulation = simulate(MANY)
    assert simulation.coverage.missing(possible()) == []
    assert simulation.coverage.share_of_pairs(possible()) > 0.9
    seen = simulation.seen
    refusals = [f"refused: {name}" for name in ("ExchangeError", "Mistake", "ClusterError")]
    assert min(seen[what] for what in [*FAULTS, *refusals, "epochs", "resumed", "WorkerLost"]) > 4, seen


def test_possible_values_are_those_that_are_defined() -> None:
    values = possible().values
    assert {value for aspect, value in values if aspect == "fault"} == set(FAULTS)
    assert {value for aspect, value in values if aspect == "delivery"} == {way["delivery"] for way in WAYS}
    assert ("sessions", "2") in values


def test_a_schedule_that_fails_is_named_and_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that do not close their sessions."""

    async def close(sessions: WorkerSessions, session_id: str, number: int) -> None:
        pass

    monkeypatch.setitem(OPERATIONS, "close", (CloseOrder, close))
    smallest = r"Schedule\(seed=\d+, way=\d+, n_workers=2, epochs=1, faults=frozenset\(\), .*\)"
    with pytest.raises(AssertionError, match=rf"Schedule\(seed=.*, or {smallest}: .*: a session is left on tcp://"):
        simulate(range(15))


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


def test_callbacks_of_a_slow_process_run_late_and_in_order() -> None:
    loop = VirtualLoop(random.Random(0))
    try:
        process = Process("tcp://slow:1", loop)
        process.slow_down(10.0, lag=1.0)
        ran: list[tuple[float, int]] = []
        for number in range(50):
            process.context_run(loop.call_soon, lambda number=number: ran.append((loop.now, number)))
        loop.call_later(60, loop.stop)
        loop.run_forever()
    finally:
        loop.close()
    times = [when for when, _ in ran]
    assert [number for _, number in ran] == list(range(50))
    assert times == sorted(times)
    assert 10 < times[-1] < 11.5, "it is slow for 10 s"
    np.testing.assert_array_less(np.diff(times), 1 + 1e-5)


def test_a_dataset_in_memory_is_read_like_the_one_on_disk(store: Store) -> None:
    ids, slots = np.array([7, 59, 0]), np.array([2, 0, 1])
    rows: list[Any] = []
    for dataset in (store.on_disk, store.in_memory):
        rows.append(dataset.layout.empty(3))
        dataset.read_into(rows[-1], slots, ids)
        assert dataset.n_samples == N_SAMPLES
    np.testing.assert_array_equal(rows[0], rows[1])
