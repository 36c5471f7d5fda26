"""Workers that do not answer because a task holds Python's global lock."""

from __future__ import annotations

import ctypes

import dask
import pytest
from distributed import Client, wait

from dshuffle import Shuffler

pytestmark = pytest.mark.timeout(90)


def hold_the_lock(partition, seconds, log):
    """Hold Python's global lock, as some C extensions do."""
    with open(log, "a") as file:
        file.write(f"{partition.epoch} {partition.rank}\n")
    if partition.rank == 1 and seconds:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return int(partition["y"].sum())


@pytest.mark.slow
@pytest.mark.parametrize("nannies", [True, False])
def test_a_worker_whose_task_holds_the_global_lock_is_not_lost(new_processes, small, tmp_path, within, nannies):
    """Its task runs once, although it says nothing for three heartbeats while the session waits for it."""
    log = tmp_path / "log"
    with dask.config.set({"dshuffle.heartbeat": "3s"}), new_processes(3) as cluster, Client(cluster) as client:
        if not nannies:  # as with ``dask worker --no-nanny``

            def forget_nannies(dask_scheduler):
                for worker in dask_scheduler.workers.values():
                    worker.nanny = ""

            client.run_on_scheduler(forget_nannies)
        with Shuffler(client, small) as shuffler:
            calls = [epoch.map(hold_the_lock, 9 if epoch.number == 1 else 0, str(log)) for epoch in shuffler.epochs(3)]
            sums = [sum(client.gather(futures)) for futures in calls]
    assert sums == [sum(range(1000))] * 3
    assert sorted(log.read_text().split("\n")[:-1]) == [f"{epoch} {rank}" for epoch in range(3) for rank in range(3)]


@pytest.mark.slow
def test_marks_are_asked_for_until_a_busy_worker_answers(new_processes, small, tmp_path, within):
    with (
        dask.config.set({"dshuffle.heartbeat": "3s"}),
        new_processes(2) as cluster,
        Client(cluster) as client,
        Shuffler(client, small) as shuffler,
    ):
        for epoch in shuffler.epochs(1):
            futures = epoch.map(hold_the_lock, 8, str(tmp_path / "log"))
            wait(futures[0], timeout=10)
            assert within(30, shuffler.state_dict)["epoch"] == 0
            client.gather(futures)
