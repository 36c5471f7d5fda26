"""A lost worker is replaced: its rank is restored, its tasks run again, and every sample is trained on exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
import time
from unittest.mock import create_autospec

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster, Worker

from dshuffle import Shuffler
from dshuffle.errors import WorkerLost
from dshuffle.runtime.client.cluster_view import keep_nannies
from dshuffle.runtime.worker.session import WorkerSession

from .conftest import HTTP, OPTIONS, task_that_checks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


def kill(client, shuffler, rank, how=signal.SIGKILL):
    [pid] = client.run(os.getpid, workers=[shuffler.addresses[rank]]).values()
    os.kill(pid, how)
    return pid


@pytest.fixture(scope="module")
def cluster():
    """Three processes that nannies start again."""
    with LocalCluster(n_workers=3, processes=True, **OPTIONS) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def checked(small):
    return task_that_checks(small)


WAYS = [
    {"delivery": "peer"},
    {"assignment": "partial:0.3"},
    {"assignment": "local"},
    {"delivery": "storage"},
    {"assignment": "chunks"},
    {"delivery": "peer", "cache_fraction": 0.6},
    {"delivery": "peer", "cache_fraction": 0.6, "caching": "recent", "assignment": "partial:0.3"},
    {"delivery": "server"},
    {"delivery": "clique", "cache_fraction": 0.6},
    {"delivery": "leftover", "assignment": "aligned"},
]


@pytest.mark.parametrize("when", ["training", "exchange"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_the_samples_are_those_of_a_session_without_faults(cluster, small, checked, within, way, when):
    cluster.wait_for_workers(3)
    rank = 0 if when == "training" else 2  # rank 0 also serves, if there is a server
    with Shuffler(cluster, small, seed=3, **way) as shuffler:
        expected = [cluster.gather(epoch.map(checked)) for epoch in shuffler.epochs(5)]
    with Shuffler(cluster, small, seed=3, **way) as shuffler:
        seen, before = [], shuffler.addresses
        for epoch in shuffler.epochs(5):
            if epoch.number == 1 and when == "training":
                futures = epoch.map(checked, 1.0)
                time.sleep(0.4)
                kill(cluster, shuffler, rank)
            elif epoch.number == 1:
                futures = epoch.map(checked)
                cluster.gather(futures)
                kill(cluster, shuffler, rank)
            else:
                futures = epoch.map(checked)
            seen.append(within(40, lambda futures=futures: cluster.gather(futures)))
        moved = [one for one in range(3) if shuffler.addresses[one] != before[one]]
        assert moved == [rank]
    assert {record.server for record in shuffler.records} <= {"", "beside rank 0"}
    if "delivery" in way:
        assert {record.delivery for record in shuffler.records[1:]} == {way["delivery"]}
    for now, then in zip(seen, expected, strict=True):
        for one, other in zip(now, then, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("way", [{"delivery": "server"}, {"delivery": "coded", "cache_fraction": 0.6}], ids=str)
def test_a_server_that_only_serves_is_replaced_or_done_without(small, checked, within, way, comes_back):
    """Peers send the rows if nobody can take its place. Every rank trains on the same samples in any case."""
    options = {"host": "127.0.0.1", "nthreads": 1, "dashboard_address": None, "memory_limit": 0}
    workers = {name: {"cls": Nanny, "options": options} for name in "01"}
    workers["s"] = {"cls": Nanny, "options": {**options, "resources": {"dshuffle-server": 1}}}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, **HTTP}}
    with SpecCluster(workers=workers, scheduler=scheduler) as cluster, Client(cluster) as client:
        client.wait_for_workers(3)
        with Shuffler(client, small, seed=5, **way) as shuffler:
            expected = [client.gather(epoch.map(checked)) for epoch in shuffler.epochs(5)]
        with Shuffler(client, small, seed=5, **way) as shuffler:
            for epoch in shuffler.epochs(5):
                samples = within(40, lambda epoch=epoch: client.gather(epoch.map(checked)))
                for now, then in zip(samples, expected[epoch.number], strict=True):
                    np.testing.assert_array_equal(now, then)
                if epoch.number == 1 and comes_back:
                    os.kill(cluster.workers["s"].pid, signal.SIGKILL)
                elif epoch.number == 1:
                    del cluster.worker_spec["s"]
                    cluster.sync(cluster._correct_state)
    last = shuffler.records[-1]
    assert (last.delivery, last.server) == ((way["delivery"], "dedicated") if comes_back else ("peer", ""))


@contextlib.contextmanager
def session_of_three(new_processes, dataset, checked, **options):
    """A session that gives up silent workers soon, with its first of four epochs trained."""
    with (
        dask.config.set({"dshuffle.heartbeat": "4s"}),
        new_processes(3) as cluster,
        Client(cluster) as client,
        Shuffler(client, dataset, **options) as shuffler,
    ):
        epochs = shuffler.epochs(4)
        client.gather(next(epochs).map(checked))
        yield cluster, client, shuffler, epochs


@pytest.mark.parametrize(("delivery", "rank"), [("peer", 1), ("server", 0)])  # rank 0 serves, too
def test_a_stopped_worker_is_replaced_by_itself_when_it_goes_on(new_processes, small, checked, within, delivery, rank):
    with session_of_three(new_processes, small, checked, delivery=delivery) as (_, client, shuffler, epochs):
        pid = kill(client, shuffler, rank, signal.SIGSTOP)
        threading.Timer(8, os.kill, [pid, signal.SIGCONT]).start()
        for epoch in epochs:
            samples = within(40, lambda epoch=epoch: client.gather(epoch.map(checked)))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))


def test_a_worker_that_was_given_up_and_answers_again_gets_no_more_tasks(new_processes, small, checked, within):
    with session_of_three(new_processes, small, checked) as (cluster, client, shuffler, epochs):
        cluster.scale(4)
        client.wait_for_workers(4)
        lost = shuffler.addresses[1]
        pid = kill(client, shuffler, 1, signal.SIGSTOP)
        epoch = within(40, lambda: next(epochs))
        futures = epoch.map(checked)
        while lost in within(40, lambda: shuffler._calls.ask(dict[int, str], "members").values()):
            time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        again = epoch.map(checked)  # the client may still have the old address
        for found in (futures, again, next(epochs).map(checked), next(epochs).map(checked)):
            samples = within(40, lambda found=found: client.gather(found))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
        assert lost not in shuffler.addresses
        left = client.run(lambda dask_worker: len(dask_worker.plugins["dshuffle"].sessions))
        assert left[lost] == 0
        assert sum(left.values()) == 3


@pytest.mark.parametrize("asks_for_members", [False, True])
def test_a_task_waits_until_another_worker_holds_the_partition(monkeypatch, small, check_ids, within, asks_for_members):
    """The worker that was given up answers, but has lost the session, and the new one still reads the partition."""
    restore = WorkerSession.restore

    async def slowly(self, *order):
        await asyncio.sleep(1.0)
        await restore(self, *order)

    def lose(address, dask_scheduler):
        [coordinator] = dask_scheduler.extensions["dshuffle"].coordinators.values()
        coordinator.candidates.refused[address] = math.inf  # it does not answer at first
        coordinator.lose(address)

    monkeypatch.setattr(WorkerSession, "restore", slowly)
    with (
        LocalCluster(n_workers=3, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        Shuffler(client, small) as shuffler,
    ):
        cluster.scale(4)
        client.wait_for_workers(4)
        epochs = shuffler.epochs(2)
        client.gather(next(epochs).map(check_ids))
        lost, epoch = shuffler.addresses[1], next(epochs)
        client.run_on_scheduler(lose, lost)
        while lost in shuffler._calls.ask(dict[int, str], "members").values():
            time.sleep(0.02)
        time.sleep(0.2)  # the session has been closed on the worker that was given up
        if asks_for_members:
            assert shuffler.look_up_members()
        samples = within(30, lambda: client.gather(epoch.map(check_ids)))
        assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))


def test_without_a_replacement_the_error_comes_after_the_timeout(new_processes, small, checked, within):
    async def never():
        await asyncio.sleep(3600)

    config = {"dshuffle.replacement-timeout": "3s"}
    with dask.config.set(config), new_processes(2) as cluster, Client(cluster) as client:
        shuffler = Shuffler(client, small)
        epochs = shuffler.epochs(4)
        client.gather(next(epochs).map(checked))
        # The nannies live, but start nothing: as if the queue had no nodes.
        for nanny in cluster.workers.values():
            nanny.instantiate = never
        kill(client, shuffler, 1)
        with pytest.raises(WorkerLost, match="rank 1"):
            within(20, lambda: [client.gather(epoch.map(checked)) for epoch in epochs])
        within(20, shuffler.close)


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_job_that_ends_is_replaced_by_a_new_one_on_an_adaptive_cluster(small, check_ids, within, adaptive):
    """Nobody can come at the moment of the loss: there is no nanny, and the cluster submits another job only later."""
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "500ms"}),
        LocalCluster(n_workers=3, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        if adaptive:
            cluster.adapt(minimum=3, maximum=3, interval="200ms")
        with Shuffler(client, small) as shuffler:
            epochs = shuffler.epochs(3)
            client.gather(next(epochs).map(check_ids))
            lost = shuffler.addresses[1]
            [worker] = [worker for worker in cluster.workers.values() if worker.address == lost]
            cluster.sync(worker.close)
            if not adaptive:
                with pytest.raises(WorkerLost, match="No other worker could take the rank"):
                    within(30, lambda: client.gather(next(epochs).map(check_ids)))
                return
            for epoch in epochs:
                samples = within(30, lambda epoch=epoch: client.gather(epoch.map(check_ids)))
                assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
            assert lost not in shuffler.addresses


LOST_WORKER = "distributed.deploy.lost-worker-timeout"


@pytest.mark.parametrize(
    ("nannies", "adaptive", "before", "after"),
    [
        (True, False, "15s", "5m"),
        (True, False, "20s", "20s"),  # the user's
        (True, True, "15s", "15s"),  # another worker comes after this time
        (False, False, "15s", "15s"),
    ],
)
def test_a_local_cluster_keeps_the_nannies_of_lost_workers(monkeypatch, nannies, adaptive, before, after):
    """Dask reads this setting when a worker is lost, and ends its nanny if it is not back after this time."""
    client = create_autospec(Client, instance=True)
    client.cluster = create_autospec(LocalCluster, instance=True)
    client.cluster.workers = {0: create_autospec(Nanny if nannies else Worker, instance=True)}
    client.cluster._adaptive = object() if adaptive else None
    with dask.config.set({LOST_WORKER: before}):
        keep_nannies(client)
        assert dask.config.get(LOST_WORKER) == after


def test_the_nanny_of_a_slow_worker_brings_it_back(small, check_ids, within, monkeypatch):
    """A worker that comes back later than Dask's default allows, which is made short here."""
    monkeypatch.setattr("dshuffle.runtime.client.cluster_view.DEFAULT_LOST", "10ms")
    with (
        dask.config.set({LOST_WORKER: "10ms"}),
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        Shuffler(client, small) as shuffler,
    ):
        for epoch in shuffler.epochs(3):
            samples = within(100, lambda epoch=epoch: client.gather(epoch.map(check_ids)))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
            if epoch.number < 2:
                kill(client, shuffler, 1 + epoch.number)


def test_states_are_taken_while_a_worker_is_replaced(cluster, small, within, eventually):
    """A lost rank counts 0, because its task runs again. Nobody else's samples are forgotten."""
    cluster.wait_for_workers(3)

    def slowly(partition):
        partition.mark_trained(100)
        time.sleep(3)
        partition.mark_trained(len(partition))

    with Shuffler(cluster, small) as shuffler:
        futures = next(shuffler.epochs(1)).map(slowly)
        eventually(lambda: shuffler.state_dict()["trained"] == [[100, 100, 100]])
        kill(cluster, shuffler, 1)
        states, done = [], time.monotonic() + 2
        while time.monotonic() < done:
            states.append(within(20, shuffler.state_dict)["trained"][0])
        assert all((first, last) == (100, 100) for first, _, last in states), states
        assert any(middle == 0 for _, middle, _ in states), states
        within(60, lambda: cluster.gather(futures))
        assert sum(shuffler.state_dict()["trained"][0]) == 1000


def test_a_worker_that_is_lost_while_a_session_opens_is_an_error(cluster, small, checked, within):
    cluster.wait_for_workers(3)
    with Shuffler(cluster, small) as shuffler:  # installs the plugin
        address = shuffler.addresses[1]

    def die_when_a_session_opens(dask_worker):
        async def die(**message):
            os._exit(1)

        dask_worker.handlers["dshuffle_open"] = die

    cluster.run(die_when_a_session_opens, workers=[address])
    with pytest.raises(WorkerLost):
        within(20, lambda: Shuffler(cluster, small))
    with within(60, lambda: Shuffler(cluster, small, min_workers=3)) as shuffler:
        assert shuffler.n_workers == 3
        for epoch in shuffler.epochs(2):
            assert np.array_equal(np.sort(np.concatenate(cluster.gather(epoch.map(checked)))), np.arange(1000))
