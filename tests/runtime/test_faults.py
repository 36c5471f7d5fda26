"""Faults that are not a lost worker: paused workers, lost messages, hung tasks, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time

import dask
import numpy as np
import pytest
from distributed import Client, Status, wait
from distributed.comm import connect
from distributed.utils_test import captured_logger
from distributed.versions import get_versions

import dshuffle
from dshuffle import Shuffler
from dshuffle.errors import ClusterError, ExchangeError, WorkerLost
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.runtime.scheduler.scheduler_plugin import DShuffleScheduler
from dshuffle.runtime.session_spec import DatasetReference
from dshuffle.runtime.worker import worker_plugin
from dshuffle.runtime.worker.session import WorkerSession

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


def test_a_paused_worker_does_not_take_part(client_of, small, check_orders, eventually, caplog):
    with client_of(NAMES) as client:
        set_status(client, "1", Status.paused, eventually)
        with Shuffler(client, small) as shuffler:
            assert shuffler.n_workers == 2
            check_orders(shuffler, 2)
        assert "paused and do not take part: tcp://" in caplog.text
        for name in ("0", "2"):
            set_status(client, name, Status.paused, eventually)
        with pytest.raises(ClusterError, match=r"none of the workers can run tasks: "):
            Shuffler(client, small)


def test_a_task_of_a_paused_worker_runs_when_it_goes_on(client_of, small, check_ids, eventually):
    with client_of(NAMES) as client, Shuffler(client, small) as shuffler:
        for epoch in shuffler.epochs(2):
            set_status(client, "1", Status.paused, eventually)
            futures = epoch.map(check_ids)
            wait([futures[0], futures[2]])
            assert not futures[1].done()
            waits = client.sync(shuffler._calls._waiting)
            assert "rank 1 (tcp://" in waits
            assert "is paused in Dask" in waits
            set_status(client, "1", Status.running, eventually)
            assert np.array_equal(np.sort(np.concatenate(client.gather(futures))), np.arange(1000))


@pytest.mark.slow
def test_a_task_of_a_worker_that_stays_paused_fails(client_of, small, check_ids, eventually, within):
    with client_of(NAMES, {"dshuffle.paused-timeout": "2s"}) as client, Shuffler(client, small) as shuffler:
        [epoch] = shuffler.epochs(1)
        set_status(client, "1", Status.paused, eventually)
        futures = epoch.map(check_ids)
        with pytest.raises(ClusterError, match=r"a task waited 2 s .*because rank 1 \(tcp://.*is paused in Dask"):
            within(20, lambda: client.gather(futures))
        epoch.accept(futures)


def test_a_task_that_needs_resources_which_its_worker_lacks_says_so(threads, small, check_ids, within):
    with dask.config.set({"dshuffle.paused-timeout": "2s"}), Shuffler(threads, small) as shuffler:
        [epoch] = shuffler.epochs(1)
        with dask.annotate(resources={"GPU": 1}):
            futures = epoch.map(check_ids)
        words = r"waited 2 s \(dshuffle.paused-timeout\) because rank \d .* the resources none, where it needs GPU=1"
        with pytest.raises(ClusterError, match=words):
            within(20, lambda: threads.gather(futures))
        epoch.accept(futures)


def test_a_task_whose_paused_worker_leaves_fails(client_of, small, check_ids, eventually, within):
    with client_of(NAMES) as client:
        shuffler = Shuffler(client, small)
        [epoch] = shuffler.epochs(1)
        set_status(client, "1", Status.paused, eventually)
        futures = epoch.map(check_ids)
        wait([futures[0], futures[2]])
        within(30, lambda: client.retire_workers([address_of(client, "1")], close_workers=True, remove=True))
        with pytest.raises(WorkerLost, match="rank 1"):
            within(20, futures[1].result)
        within(20, shuffler.close)


# -- messages that are lost ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_votes_and_orders_that_are_lost_do_not_hang_an_epoch(client_of, small, check_orders, within, monkeypatch):
    carry_out, lost = WorkerSession._carry_out, []

    async def lossy(self, run):
        if (self.rank, run.run_id) in {(0, 1), (2, 2)}:
            lost.append(run.run_id)
            await run.start()
        else:
            await carry_out(self, run)

    monkeypatch.setattr(WorkerSession, "_carry_out", lossy)
    with client_of(NAMES, {"dshuffle.heartbeat": "3s"}) as client, Shuffler(client, small) as shuffler:
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
            with pytest.raises(ExchangeError, match=r"waiting to begin epoch 1: rank 3 .*1 task of"):
                within(30, lambda: next(epochs))
        finally:  # otherwise the task would keep the worker from those of all other tests
            (tmp_path / "go on").touch()
        within(20, lambda: check_orders(shuffler, 2))
    assert [record.epoch for record in shuffler.records] == [0, 1, 2]


def test_what_a_task_reaches_is_read_only(threads, small):
    def write(partition):
        array, _, slots = partition.rows("x")
        refused = 0
        for one in (partition.sample_ids, partition.broadcast_ids, array, slots):
            bases = [one]
            while isinstance(bases[-1], np.ndarray):
                with contextlib.suppress(ValueError):
                    bases[-1].flags.writeable = True
                    refused -= 100
                refused += 1
                bases.append(bases[-1].base)
        return refused

    with Shuffler(threads, small) as shuffler:
        [epoch] = shuffler.epochs(1)
        assert all(refused >= 4 for refused in threads.gather(epoch.map(write)))


# -- clients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overtakes", [False, True])
def test_a_client_that_is_connected_again_keeps_its_session(client_of, small, check_orders, eventually, overtakes):
    """If it connects before the old connection ends, Dask removes it as if it had left, and it connects once more."""

    async def overtake(client):
        """Connect again, as the client does itself, while the scheduler still serves the first connection."""
        comm = await connect(client.scheduler.address)
        await comm.write({"op": "register-client", "client": client.id, "reply": False, "versions": get_versions()})
        await comm.read()

    def connections(dask_scheduler):
        return dask_scheduler._client_connections_added_total

    with client_of(NAMES) as client, Shuffler(client, small) as shuffler:
        check_orders(shuffler, 1)
        expected = client.run_on_scheduler(connections) + 1 + overtakes
        if overtakes:
            client.sync(overtake, client)
        client.loop.add_callback(client.scheduler_comm.comm.abort)
        eventually(lambda: client.status == "running" and client.run_on_scheduler(connections) == expected)
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


def test_a_session_that_is_closed_while_it_opens_is_not_opened(client_of, small, sessions_left, monkeypatch):
    with client_of(NAMES) as client:
        ask = dshuffle.runtime.client.session_client.SessionClient.ask

        def interrupted(self, kind, operation, **message):
            if operation == "open":
                threading.Timer(0.05, ask, [self, type(None), "close"]).start()
            return ask(self, kind, operation, **message)

        open_dataset = DatasetReference.open

        def slow(self):
            time.sleep(0.5)
            return open_dataset(self)

        monkeypatch.setattr(dshuffle.runtime.client.session_client.SessionClient, "ask", interrupted)
        monkeypatch.setattr(DatasetReference, "open", slow)
        with pytest.raises(ClusterError, match="closed"):
            Shuffler(client, small)
        assert sessions_left(client) == (0, 0)


def test_a_shuffler_that_is_dropped_warns_and_is_closed(threads, small, sessions_left, eventually):
    shuffler = Shuffler(threads, small)
    [epoch] = shuffler.epochs(1)
    del epoch
    with pytest.warns(ResourceWarning, match="was not closed"):
        del shuffler
    eventually(lambda: sessions_left(threads) == (0, 0))


@pytest.mark.slow
def test_opening_a_session_does_no_harm_to_the_sessions_of_others(client_of, small, check_orders, monkeypatch):
    """A worker that is too busy to answer is asked again, and its plugin is not installed anew."""
    with client_of(NAMES, {"dshuffle.heartbeat": "1s"}) as client, Shuffler(client, small) as first:
        check_orders(first, 1)
        client.run(slow_to_answer, workers=[first.addresses[1]])
        with Shuffler(client, small) as second:
            check_orders(second, 2)
        check_orders(first, 2)


def slow_to_answer(dask_worker):
    """Answer the next question for the protocol after two heartbeats."""
    answer, slow = dask_worker.handlers["dshuffle_protocol"], []

    async def late():
        if not slow:
            slow.append(True)
            await asyncio.sleep(2.0)
        return await answer()

    dask_worker.handlers["dshuffle_protocol"] = late


@pytest.mark.slow
def test_workers_that_are_being_set_up_are_waited_for(client_of, small, check_orders, monkeypatch):
    """They load kernels. Dask would log a traceback if they were asked something that they do not know yet."""
    install, tasks = DShuffleScheduler._install, []

    async def does_not_wait(self):
        tasks.append(asyncio.ensure_future(install(self)))

    def slow(*modules):
        time.sleep(1.5)

    monkeypatch.setattr(DShuffleScheduler, "_install", does_not_wait)
    monkeypatch.setattr(worker_plugin, "load_kernels", slow)
    with client_of(2) as client, captured_logger("distributed.core") as log, Shuffler(client, small) as shuffler:
        check_orders(shuffler, 1)
    assert "No handler" not in log.getvalue()
    assert tasks[0].done()


# -- stopped workers -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3, 60])
def test_a_stopped_worker_is_waited_for_or_lost_after_a_heartbeat(new_processes, small, check_orders, within, seconds):
    with dask.config.set({"dshuffle.heartbeat": "6s"}), new_processes(2) as cluster, Client(cluster) as client:
        shuffler = Shuffler(client, small, on_loss="raise")
        check_orders(shuffler, 1)
        [pid] = client.run(os.getpid, workers=[address_of(client, "1")]).values()
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(seconds, os.kill, [pid, signal.SIGCONT]).start() if seconds < 6 else None
        try:
            if seconds < 6:
                within(30, lambda: next(shuffler.epochs(1)))
            else:
                with pytest.raises(WorkerLost, match=r"rank 1 .* has not answered for 6(\.\d+)? s"):
                    within(30, lambda: next(shuffler.epochs(1)))
            within(30, shuffler.close)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


# -- adaptive clusters -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_adaptive_cluster_keeps_the_workers_of_a_session(new_processes, small, check_ids, eventually):
    """Dask removes idle workers. Those of a session are idle between epochs, but hold its partitions."""
    with new_processes(3) as cluster, Client(cluster) as client:
        with Shuffler(client, small) as shuffler:
            before = shuffler.addresses
            cluster.adapt(minimum=1, maximum=3, interval="100ms", wait_count=2)
            for epoch in shuffler.epochs(4):
                samples = client.gather(epoch.map(check_ids))
                assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
                time.sleep(1.0)
            assert shuffler.addresses == before
        eventually(lambda: len(client.scheduler_info()["workers"]) == 1)


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
