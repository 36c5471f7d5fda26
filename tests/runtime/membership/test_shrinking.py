"""Workers are lost, and nobody takes their ranks: a session goes on with fewer, or ends."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler
from dshuffle.errors import WorkerLost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


def kill(client, address):
    [pid] = client.run(os.getpid, workers=[address]).values()
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("when", ["training", "exchange"])
@pytest.mark.parametrize("way", [{}, {"delivery": "server"}, {"cache_fraction": 0.7}], ids=str)
def test_a_session_shrinks(lonely, labelled, checked, within, way, when):
    with Shuffler(lonely, labelled, on_loss="shrink", **way) as shuffler:
        for epoch in shuffler.epochs(5):
            futures = epoch.map(checked, 0.5 if when == "training" and epoch.number == 1 else 0)
            if epoch.number == 1:
                if when == "exchange":
                    lonely.gather(futures)
                kill(lonely, shuffler.addresses[2])
            samples = within(40, lambda futures=futures: lonely.gather(futures))
            assert len(samples) == (3 if epoch.number < 2 else 2)
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
    assert [record.n_workers for record in shuffler.records if record.epoch != 1] == [3, 2, 2, 2]


def test_ranks_that_run_together_start_again_on_fewer_workers(lonely, labelled, within):
    """Two of them share a worker with one thread until the epoch ends."""

    def total(partition, group):
        time.sleep(0.3)
        mean = group.mean(partition["y"].sum())
        time.sleep(0.3)
        return float(group.mean(mean) * group.size)

    with Shuffler(lonely, labelled, on_loss="shrink") as shuffler:
        for epoch in shuffler.epochs(3):
            if epoch.number == 1:
                threading.Timer(0.4, kill, (lonely, shuffler.addresses[1])).start()
            totals = within(40, lambda epoch=epoch: epoch.together(total))
            assert totals == pytest.approx([sum(range(1000))] * (3 if epoch.number < 2 else 2))


def test_a_lost_worker_is_replaced_if_another_one_can_come(labelled, checked, new_processes, within):
    with new_processes(3) as cluster, Client(cluster) as client, Shuffler(client, labelled, elastic=True) as shuffler:
        for epoch in shuffler.epochs(3):
            futures = epoch.map(checked, 0.5)
            if epoch.number == 1:
                kill(client, shuffler.addresses[1])
            samples = within(40, lambda futures=futures: client.gather(futures))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
        assert shuffler.n_workers == 3


def test_a_session_that_has_ended_is_not_followed_by_another_one(lonely, labelled, checked, within):
    """Samples of the lost worker may not have been trained on."""

    def train(shuffler):
        for epoch in shuffler.epochs(3):
            epoch.map(checked, 0.5)
            if epoch.number == 1:
                kill(lonely, shuffler.addresses[2])

    with (
        Shuffler(lonely, labelled, on_loss="replace") as shuffler,
        pytest.raises(WorkerLost, match="Make a new Shuffler"),
    ):
        within(40, lambda: train(shuffler))
