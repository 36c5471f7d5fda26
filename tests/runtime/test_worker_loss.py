"""Workers, clients and clusters that go away: an error within seconds, never a wait for ever, and nothing left."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import ClusterError, WorkerLost

from .conftest import address_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def no_restart(client):
    """From now on lost workers stay lost."""
    client.run(lambda dask_worker: dask_worker.close_gracefully(), nanny=True)


@pytest.mark.parametrize("restart", [True, False])
def test_a_worker_is_killed_while_tasks_run(
    new_processes, small, check_ids, check_orders, sessions_left, within, restart
):
    with new_processes(3) as cluster, Client(cluster) as client:
        if not restart:
            no_restart(client)
        with Shuffler(client, small, on_loss="raise") as shuffler:
            epochs = shuffler.epochs(5)
            client.gather(next(epochs).map(check_ids))
            epoch = next(epochs)
            futures = epoch.map(lambda partition: (time.sleep(1), len(partition))[1])
            time.sleep(0.3)
            pid = client.run(os.getpid, workers=[address_of(client, 1)])
            os.kill(next(iter(pid.values())), signal.SIGKILL)
            with pytest.raises(WorkerLost, match="rank 1"):
                within(20, futures[1].result)
            assert within(20, futures[0].result) > 0  # the others' results are there
            # A task that comes afterwards must not wait either.
            with pytest.raises(WorkerLost):
                within(20, epoch.map(check_ids)[1].result)
            with pytest.raises(WorkerLost, match=r"rank 1 \(.*new Shuffler"):
                within(20, lambda: next(epochs))
            within(20, shuffler.close)
        client.wait_for_workers(3 if restart else 2)
        with Shuffler(client, small) as shuffler:  # reads the partitions that are left
            assert shuffler.n_workers == (3 if restart else 2)
            check_orders(shuffler, 3)
        assert sessions_left(client) == (0, 0)


@pytest.mark.parametrize("delivery", ["peer", "server"])
def test_a_worker_is_killed_during_an_exchange(new_processes, tmp_path, within, delivery):
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((60_000, 1024), np.uint8)})
    with new_processes(3) as cluster, Client(cluster) as client:
        no_restart(client)
        rank = 0 if delivery == "server" else 2
        address = address_of(client, rank)
        [pid] = client.run(os.getpid, workers=[address]).values()
        shuffler = Shuffler(client, dataset, delivery=delivery)
        for epoch in shuffler.epochs(1):
            client.gather(epoch.map(len))
        client.sync(client.scheduler.dshuffle_prefetch, session_id=shuffler._calls.session_id)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=f"rank {rank}"):
            within(20, lambda: next(shuffler.epochs(1)))
        within(20, shuffler.close)
        within(20, shuffler.close)
        with Shuffler(client, dataset, delivery=delivery) as shuffler:
            for epoch in shuffler.epochs(2):
                assert sum(client.gather(epoch.map(len))) == 60_000


def test_a_result_that_was_lost_with_its_worker(new_processes, small, check_ids, within):
    with new_processes(2) as cluster, Client(cluster) as client:
        no_restart(client)
        shuffler = Shuffler(client, small)
        futures = next(shuffler.epochs(1)).map(check_ids)
        while not all(future.done() for future in futures):
            time.sleep(0.02)
        [pid] = client.run(os.getpid, workers=[address_of(client, 0)]).values()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            within(20, lambda: client.gather(futures))
        within(20, shuffler.close)


def test_a_worker_retires(cluster_of, small, check_ids, sessions_left):
    with cluster_of({"0": {}, "1": {}, "2": {}}) as cluster, Client(cluster) as client:
        with Shuffler(client, small) as shuffler:
            epochs = shuffler.epochs(3)
            client.gather(next(epochs).map(check_ids))
            client.retire_workers([address_of(client, 2)])
            with pytest.raises(WorkerLost, match="rank 2"):
                next(epochs)
        assert sessions_left(client) == (1, 2), "partitions stay for a session that may follow"


@pytest.mark.parametrize("how", ["restarts", "goes away"])
@pytest.mark.parametrize("busy", [False, True])
def test_the_cluster(new_processes, small, check_ids, check_orders, sessions_left, within, busy, how):
    with new_processes(2) as cluster, Client(cluster) as client:
        shuffler = Shuffler(client, small)
        epochs = shuffler.epochs(3)
        futures = next(epochs).map((lambda partition: time.sleep(60)) if busy else check_ids)
        if not busy:
            client.gather(futures)
        client.restart() if how == "restarts" else cluster.close()
        with pytest.raises(ClusterError, match="restarted" if how == "restarts" else None):
            within(20, lambda: next(epochs))
        within(20, shuffler.close)
        within(20, shuffler.close)
        if how == "restarts":
            assert sessions_left(client) == (0, 0)
            with Shuffler(client, small) as shuffler:
                check_orders(shuffler, 2)


def test_the_client_goes_away_without_closing(processes, small, check_ids, sessions_left, eventually):
    client = Client(processes.scheduler.address)
    shuffler = Shuffler(client, small)
    client.gather(next(shuffler.epochs(2)).map(check_ids))
    assert sessions_left(processes) == (1, 3)
    client.close()
    eventually(lambda: sessions_left(processes) == (0, 0))
    shuffler.close()
    with pytest.raises(ClusterError, match="closed"):
        next(shuffler.epochs(1))
