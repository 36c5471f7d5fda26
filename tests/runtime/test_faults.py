"""Faults that are not a lost worker: paused workers, lost messages, hung tasks, and clients that go away."""

from __future__ import annotations

import os
import signal
import threading
import time

import dask
import numpy as np
import pytest
from distributed import Client, Status, wait

from dshuffle import Shuffler
from dshuffle.errors import ClusterError, ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.runtime.worker.reports import ReportSender

from .conftest import address_of

pytestmark = pytest.mark.timeout(90)

NAMES = {"0": {}, "1": {}, "2": {}}


def set_status(client, name, status, eventually):
    """Pause a worker, or let it go on, as Dask does when its memory is full."""
    address, wanted = address_of(client, name), status.name

    def change(dask_worker):
        dask_worker.status = Status[wanted]

    client.run(change, workers=[address])
    eventually(
        lambda: client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.workers[address].status.name) == wanted
    )


# -- paused workers ------------------------------------------------------------------------------------------------


def test_a_paused_worker_does_not_take_part(cluster_of, small, check_orders, eventually, caplog):
    with cluster_of(NAMES) as cluster, Client(cluster) as client:
        set_status(client, "1", Status.paused, eventually)
        with Shuffler(client, small) as shuffler:
            assert shuffler.n_workers == 2
            check_orders(shuffler, 2)
        assert "paused and do not take part: tcp://" in caplog.text
        for name in ("0", "2"):
            set_status(client, name, Status.paused, eventually)
        with pytest.raises(ClusterError, match=r"none of the workers can run tasks: tcp://.*\(paused\)"):
            Shuffler(client, small)


def test_a_task_of_a_paused_worker_runs_when_it_goes_on(cluster_of, small, check_ids, eventually):
    with cluster_of(NAMES) as cluster, Client(cluster) as client, Shuffler(client, small) as shuffler:
        for epoch in shuffler.epochs(2):
            set_status(client, "1", Status.paused, eventually)
            futures = epoch.map(check_ids)
            wait([futures[0], futures[2]])
            assert not futures[1].done()
            assert "rank 1 (tcp://" in shuffler._calls.waiting_for()
            assert "is paused in Dask" in shuffler._calls.waiting_for()
            set_status(client, "1", Status.running, eventually)
            assert np.array_equal(np.sort(np.concatenate(client.gather(futures))), np.arange(1000))


def test_a_task_that_needs_resources_which_its_worker_lacks_says_so(threads, small, check_ids, within):
    with dask.config.set({"dshuffle.paused-timeout": "2s"}), Shuffler(threads, small) as shuffler:
        [epoch] = shuffler.epochs(1)
        with dask.annotate(resources={"GPU": 1}):
            futures = epoch.map(check_ids)
        words = (
            r"waited 2 s \(dshuffle.paused-timeout\) because it needs the resources GPU=1, and rank \d .* has none\. S"
        )
        with pytest.raises(ClusterError, match=words):
            within(20, lambda: threads.gather(futures))
        epoch.accept(futures)


# -- messages that are lost ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_votes_and_orders_that_are_lost_do_not_hang_an_epoch(cluster_of, small, check_orders, within, monkeypatch):
    send_vote, lost = ReportSender.send_vote, []

    async def lossy(self, run_id, vote):
        if (self._sender["participant"], run_id) in {(0, 1), (2, 2)}:
            lost.append(run_id)
        else:
            await send_vote(self, run_id, vote)

    monkeypatch.setattr(ReportSender, "send_vote", lossy)
    with (
        dask.config.set({"dshuffle.heartbeat": "3s"}),
        cluster_of(NAMES) as cluster,
        Client(cluster) as client,
        Shuffler(client, small) as shuffler,
    ):
        within(20, lambda: check_orders(shuffler, 3))
    assert sorted(lost) == [1, 2]


def test_an_exchange_that_fails_once_is_repeated_and_keeps_what_has_arrived(threads, small, check_orders, monkeypatch):
    unpack, calls = CachePartition.unpack, []

    def stumble(self, sample_ids, slots, rows, checksums):
        calls.append(sample_ids)
        if len(calls) == 4:
            raise RuntimeError("stumbled")
        unpack(self, sample_ids, slots, rows, checksums)

    with Shuffler(threads, small) as shuffler:
        check_orders(shuffler, 1)
        monkeypatch.setattr(CachePartition, "unpack", stumble)
        with pytest.raises(ExchangeError, match="stumbled"):  # an unknown error is not tried again
            check_orders(shuffler, 1)
        before = sum(map(len, calls))
        calls.clear()
        calls += [np.empty(0)] * 10
        check_orders(shuffler, 1)
        again = sum(map(len, calls))
        received = shuffler.records[-1].needed
    assert 0 < received - again <= before


# -- tasks ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_task_that_hangs_is_named_and_the_session_goes_on_when_it_ends(
    threads, small, check_orders, within, eventually, tmp_path
):
    def wait_for_file(partition, path):
        while partition.rank == 3 and not os.path.exists(path):
            time.sleep(0.02)

    with dask.config.set({"dshuffle.timeout": "4s", "dshuffle.heartbeat": "3s"}), Shuffler(threads, small) as shuffler:
        epochs = shuffler.epochs(2)
        epoch = next(epochs)
        futures = epoch.map(wait_for_file, str(tmp_path / "go on"))
        epoch.accept(futures)
        eventually(lambda: any(threads.run(lambda dask_worker: len(dask_worker.state.executing)).values()))
        wait([*futures[:3], futures[4]])
        threads.cancel(futures)
        try:
            with pytest.raises(ExchangeError, match=r"waiting to end epoch 0: rank 3 .*1 task of"):
                within(30, lambda: next(epochs))
        finally:  # otherwise the task would keep the worker from those of all other tests
            (tmp_path / "go on").touch()
        within(20, lambda: check_orders(shuffler, 2))
    assert [record.epoch for record in shuffler.records] == [0, 1, 2]


# -- clients -------------------------------------------------------------------------------------------------------


def test_a_client_that_is_connected_again_keeps_its_session(cluster_of, small, check_orders, check_ids, eventually):
    with cluster_of(NAMES) as cluster, Client(cluster) as client, Shuffler(client, small) as shuffler:
        check_orders(shuffler, 1)
        first = client.scheduler_comm
        client.loop.add_callback(client.scheduler_comm.comm.abort)
        eventually(lambda: client.status == "running" and client.scheduler_comm not in (None, first))
        check_orders(shuffler, 2)


def test_ctrl_c_while_the_next_epoch_is_prefetched_loses_no_epoch(threads, small, check_orders, monkeypatch):
    with Shuffler(threads, small) as shuffler:
        tell = shuffler._calls.tell

        def interrupted(operation, **message):
            if operation == "prefetch":
                monkeypatch.undo()
                raise KeyboardInterrupt
            return tell(operation, **message)

        monkeypatch.setattr(shuffler._calls, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(shuffler.epochs(3))
        assert [epoch.number for epoch in shuffler.epochs(3)] == [0, 1, 2]


def test_a_shuffler_that_is_dropped_warns_and_is_closed(threads, small, sessions_left, eventually):
    shuffler = Shuffler(threads, small)
    [epoch] = shuffler.epochs(1)
    del epoch
    with pytest.warns(ResourceWarning, match="was not closed"):
        del shuffler
    eventually(lambda: sessions_left(threads) == (0, 0))


# -- stopped workers -----------------------------------------------------------------------------------------------


# -- a slow worker ---------------------------------------------------------------------------------------------------


# -- adaptive clusters -----------------------------------------------------------------------------------------------


def test_a_stopped_worker_is_named_while_the_client_gathers(new_processes, small, monkeypatch, caplog):
    monkeypatch.setattr("dshuffle.runtime.client.shuffler.PATIENCE", 0.6)
    with (
        dask.config.set({"dshuffle.heartbeat": "2s"}),
        new_processes(2) as cluster,
        Client(cluster) as client,
        Shuffler(client, small) as shuffler,
    ):
        [epoch] = shuffler.epochs(1)
        client.gather(epoch.map(len))
        [pid] = client.run(os.getpid, workers=[shuffler.addresses[1]]).values()
        futures = epoch.map(lambda partition: time.sleep(1))
        time.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(8, os.kill, (pid, signal.SIGCONT)).start()
        client.gather(futures)
    said = [record.getMessage() for record in caplog.records if "waiting for tasks on" in record.getMessage()]
    assert 1 <= len(said) <= 4
    assert all("rank 1 (tcp://" in text and "which has not answered for " in text for text in said)
