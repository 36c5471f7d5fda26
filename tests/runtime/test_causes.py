"""Why a session ended reaches its client and its tasks, and not only that it did."""

from __future__ import annotations

import os
import signal
import time

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import WorkerLost

from .conftest import OPTIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def client():
    """Of three processes that nannies start again."""
    with LocalCluster(n_workers=3, processes=True, **OPTIONS) as cluster, Client(cluster) as client:
        yield client


def kill(client, shuffler, rank):
    [pid] = client.run(os.getpid, workers=[shuffler.addresses[rank]]).values()
    os.kill(pid, signal.SIGKILL)


def test_why_no_worker_could_take_a_rank(client, small, check_ids, within):
    """The dataset was written again, so the worker that the nanny starts sees another one."""
    changed = r"cannot take a lost rank \(rank 1 \(tcp://.*: the dataset at .* is not the one on the client"
    with dask.config.set({"dshuffle.replacement-timeout": "8s"}), Shuffler(client, small) as shuffler:
        epochs = shuffler.epochs(2)
        epoch = next(epochs)
        client.gather(epoch.map(check_ids))
        create_dataset(small.url, {"x": np.zeros((1000, 7)), "y": np.arange(1000)}, chunk_rows=100, overwrite=True)
        futures = epoch.map(lambda partition: time.sleep(2))
        kill(client, shuffler, 1)
        with pytest.raises(WorkerLost, match=changed):
            within(60, lambda: client.gather(futures[1]))
        with pytest.raises(WorkerLost, match=changed):
            within(20, lambda: next(epochs))


def test_why_a_task_of_another_worker_cannot_run(client, small, check_ids, within):
    """It waits behind another task when the session ends."""
    with Shuffler(client, small, on_loss="raise") as shuffler:
        epoch = next(shuffler.epochs(1))
        epoch.forget(epoch.map(lambda partition: time.sleep(4)))
        futures = epoch.map(check_ids)
        lost = shuffler.addresses[1]
        kill(client, shuffler, 1)
        message = rf"the task of rank 0 cannot run: rank 1 \({lost}\) has left the cluster"
        with pytest.raises(WorkerLost, match=message):
            within(30, lambda: client.gather(futures[0]))
        epoch.forget(futures)


def test_a_result_that_was_lost_after_its_epoch(client, small, check_ids, within):
    """Its task cannot run again, because nobody has the partition. The session goes on."""
    with Shuffler(client, small) as shuffler:
        epochs = shuffler.epochs(3)
        first = next(epochs).map(check_ids)
        second = next(epochs)
        kill(client, shuffler, 1)
        with pytest.raises(
            WorkerLost, match="the worker with the result of rank 1 in epoch 0 was lost after that epoch"
        ):
            within(40, lambda: client.gather(first))
        samples = within(40, lambda: client.gather(second.map(check_ids)))
        assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
        samples = within(40, lambda: client.gather(next(epochs).map(check_ids)))
        assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
