"""An epoch ends if all of its tasks have finished, or if the user accepts that they have not."""

from __future__ import annotations

import json
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import Client, LocalCluster, get_client, secede, wait

from dshuffle import Shuffler
from dshuffle.errors import ClusterError, InvalidParameter, WorkerLost
from dshuffle.runtime.messages import UnfinishedTask, place_of_key, task_key
from dshuffle.runtime.scheduler.scheduler_plugin import OUTCOME_OF_STATE, record_outcome, unfinished_tasks

from .conftest import OPTIONS
from .test_worker_loss import no_restart

pytestmark = pytest.mark.timeout(120)

UNFINISHED = "tasks of epoch 0 did not finish, so their samples were not trained on"


def fail_on_rank(rank):
    def fail(partition):
        if partition.rank == rank:
            raise ZeroDivisionError("thirteen by nought")
        return len(partition)

    return fail


def epoch_of(checkpoint):
    """The epoch that a checkpoint goes on with."""
    return json.loads(checkpoint.read_bytes().partition(b"\n")[0])["state"]["epoch"]


# -- failed tasks ----------------------------------------------------------------------------------------------------


def test_an_error_that_nobody_fetches_is_raised_until_the_epoch_is_accepted(threads, small, check_orders, tmp_path):
    checkpoint = tmp_path / "run.json"
    with Shuffler(threads, small, checkpoint=checkpoint) as shuffler:
        epoch = next(shuffler.epochs(3))
        epoch.map(fail_on_rank(2))
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="thirteen by nought") as caught:
                next(shuffler.epochs(3))
            [note] = caught.value.__notes__
            assert "Tasks of epoch 0: 1 failed (rank 2)" in note
            assert "epoch.accept()" in note
        assert (shuffler.next_epoch, epoch_of(checkpoint)) == (1, 0)
        epoch.accept()
        check_orders(shuffler, 2)
    assert epoch_of(checkpoint) == 3


@pytest.mark.parametrize("look", ["exception", "skip", "raise"])
def test_errors_that_were_handled_are_accepted(threads, small, look):
    with Shuffler(threads, small) as shuffler:
        for epoch in shuffler.epochs(3):
            futures, others = epoch.map(fail_on_rank(1)), epoch.map(len)
            if look == "exception":
                assert isinstance(futures[1].exception(), ZeroDivisionError)
            elif look == "skip":
                assert threads.gather(futures, errors="skip") == [200] * 4
            else:
                with pytest.raises(ZeroDivisionError):
                    threads.gather(futures)
            epoch.accept(futures)
            assert threads.gather(others) == [200] * 5
    assert len(shuffler.records) == 3


def test_accepting_one_call_does_not_accept_another(threads, small):
    with Shuffler(threads, small) as shuffler:
        epoch = next(shuffler.epochs(1))
        accepted = epoch.map(fail_on_rank(1))
        epoch.accept(accepted)
        other = epoch.map(fail_on_rank(3))
        with pytest.raises(ZeroDivisionError) as caught:
            next(shuffler.epochs(1))
        assert "1 failed (rank 3)" in caught.value.__notes__[0]
        for wrong in ([], accepted[:2], "all"):
            with pytest.raises(InvalidParameter, match="futures="):
                epoch.accept(wrong)
            with pytest.raises(InvalidParameter, match="futures="):
                epoch.forget(wrong)
        epoch.accept(other)


def test_closing_says_in_the_log_what_did_not_finish(threads, small, sessions_left, caplog):
    """It often follows an error, which it must not replace by another one."""
    shuffler = Shuffler(threads, small)
    next(shuffler.epochs(1)).map(fail_on_rank(4))
    shuffler.close()
    shuffler.close()
    [message] = [record.getMessage() for record in caplog.records if record.name == "dshuffle.runtime.client.shuffler"]
    assert "ZeroDivisionError: thirteen by nought" in message
    assert "Tasks of epoch 0: 1 failed (rank 4)" in message
    assert sessions_left(threads) == (0, 0)


# -- cancelled tasks -------------------------------------------------------------------------------------------------


def test_cancelled_tasks_are_an_error(threads, small, check_orders, tmp_path):
    checkpoint = tmp_path / "run.json"
    with Shuffler(threads, small, checkpoint=checkpoint) as shuffler:
        epochs = shuffler.epochs(1)
        epoch = next(epochs)
        futures = epoch.map(lambda partition: time.sleep(0.5))
        threads.cancel(futures[:2])
        with pytest.raises(ClusterError, match=UNFINISHED) as caught:
            next(epochs)
        assert "2 cancelled (rank 0, rank 1)" in caught.value.__notes__[0]
        assert epoch_of(checkpoint) == 0
        epoch.accept()
        check_orders(shuffler, 1)
    assert epoch_of(checkpoint) == 2


# -- lost workers ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("on_loss", ["replace", "raise"])
def test_a_worker_that_is_lost_for_good_in_the_last_epoch_is_an_error(small, tmp_path, on_loss):
    checkpoint = tmp_path / "run.json"
    with LocalCluster(n_workers=3, **OPTIONS) as cluster, Client(cluster) as client:
        no_restart(client)

        def train(shuffler):
            for epoch in shuffler.epochs(2 - shuffler.next_epoch):
                epoch.map(lambda partition: time.sleep(1.5))  # nobody fetches the results
                if epoch.number == 1:
                    pids = client.run(os.getpid)
                    os.kill(pids[cluster.workers[1].worker_address], signal.SIGKILL)
            return "trained"

        with Shuffler(client, small, checkpoint=checkpoint, on_loss=on_loss) as shuffler, pytest.raises(WorkerLost):
            train(shuffler)
    assert epoch_of(checkpoint) == 1


# -- the position of a session ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["epochs(0)", "forget", "evaluate"])
def test_the_last_checkpoint_stays_where_it_is(threads, small, tmp_path, after):
    checkpoint = tmp_path / "run.json"
    with Shuffler(threads, small, checkpoint=checkpoint) as shuffler:
        for epoch in shuffler.epochs(2):
            futures = epoch.map(len)
            if after == "forget":
                wait(futures)
                epoch.forget(futures)
        if after == "evaluate":
            assert threads.gather(epoch.map(len)) == [200] * 5
        for _ in range(2):
            assert list(shuffler.epochs(0)) == []
        assert (epoch_of(checkpoint), shuffler.state_dict()["epoch"]) == (2, 2)


def test_an_epoch_without_a_task_is_still_to_be_trained_on(threads, small, tmp_path):
    checkpoint = tmp_path / "run.json"
    with Shuffler(threads, small, checkpoint=checkpoint) as shuffler:
        [epoch] = shuffler.epochs(1)
        assert epoch_of(checkpoint) == 0
        threads.gather(epoch.map(len))
        assert list(shuffler.epochs(0)) == []
        assert epoch_of(checkpoint) == 1


# -- the record ------------------------------------------------------------------------------------------------------


def test_outcomes_of_any_events_are_those_of_their_history():
    """The oracle looks at the whole history of a task, where the record keeps one word."""
    rng = np.random.default_rng(0)
    states = ["waiting", "processing", "memory", "erred", "released", "no-worker", "forgotten"]
    counts = dict.fromkeys(["finished", "failed", "cancelled", "lost"], 0)
    for _ in range(2000):
        history = rng.choice(states, size=rng.integers(0, 6)).tolist()
        session = SimpleNamespace(outcomes={}, ranks=range(3), spec=SimpleNamespace(session_id="0f3a"))
        key = task_key("train", "0f3a", 7, 2, 1)
        for state in filter(OUTCOME_OF_STATE.get, history):
            record_outcome(session.outcomes, place_of_key(key), OUTCOME_OF_STATE[state])
        if "memory" in history:
            expected = "finished"
        else:
            expected = "failed" if "erred" in history else "cancelled"
            if "erred" in history and rng.random() < 0.5:
                record_outcome(session.outcomes, place_of_key(key), "lost")
                expected = "lost"
        counts[expected] += 1
        unfinished = unfinished_tasks(session, 7, [2])
        assert unfinished[0] == UnfinishedTask(2, 0, "cancelled")
        assert (UnfinishedTask(2, 1, expected) in unfinished) == (expected != "finished")
    assert min(counts.values()) > 100


def test_an_error_in_the_block_is_not_replaced_by_one_in_closing(threads, small, monkeypatch, caplog):
    def train(shuffler):
        with shuffler:
            next(shuffler.epochs(1)).map(len)
            raise KeyboardInterrupt

    shuffler = Shuffler(threads, small)
    close = shuffler._membership.close

    def fails():
        close()
        raise ClusterError("the scheduler does not answer")

    monkeypatch.setattr(shuffler._membership, "close", fails)
    with pytest.raises(KeyboardInterrupt):
        train(shuffler)
    assert "after KeyboardInterrupt, closing failed: the scheduler does not answer" in caplog.text


def test_an_error_of_the_last_epoch_is_raised_at_the_end_of_the_block(threads, small, sessions_left):
    with pytest.raises(ZeroDivisionError, match="thirteen by nought"), Shuffler(threads, small) as shuffler:
        next(shuffler.epochs(1)).map(fail_on_rank(4))
    assert sessions_left(threads) == (0, 0)


def test_a_lost_worker_does_not_hide_the_errors_of_others(threads, small):
    def fail(partition):
        raise (WorkerLost if partition.rank < 2 else ValueError)("an error")

    with Shuffler(threads, small) as shuffler:
        epochs = shuffler.epochs(2)
        next(epochs).map(fail)
        with pytest.raises(ValueError, match="an error"):
            next(epochs)


@pytest.mark.slow
def test_an_error_from_a_nested_call_is_raised(processes, small):
    """Its traceback has frames of the Dask client, although nobody has fetched it."""

    def inner():
        raise ValueError("inner failure")

    def nested(partition):
        client = get_client()
        secede()
        return client.submit(inner, pure=False).result()

    with Shuffler(processes, small) as shuffler:
        epochs = shuffler.epochs(2)
        next(epochs).map(nested)
        with pytest.raises(ValueError, match="inner failure"):
            next(epochs)


def test_results_that_were_given_up_have_finished(threads, small):
    """Only tasks that did not run are cancelled: dropping a result is no error."""
    with Shuffler(threads, small) as shuffler:
        for epoch in shuffler.epochs(2):
            futures = epoch.map(len)
            wait(futures)
            threads.cancel(futures)
    assert len(shuffler.records) == 2


@pytest.mark.slow
def test_a_connection_that_is_cut_cancels_tasks(cluster_of, small, eventually):
    with cluster_of({"0": {}, "1": {}}) as cluster, Client(cluster) as client, Shuffler(client, small) as shuffler:
        epochs = shuffler.epochs(1)
        next(epochs).map(lambda partition: time.sleep(1))
        eventually(lambda: any(client.processing().values()))

        async def cut():
            client.scheduler_comm.comm.abort()

        client.sync(cut)
        with pytest.raises(ClusterError, match=UNFINISHED):
            next(epochs)


@pytest.mark.slow
def test_a_worker_that_is_lost_after_its_task_has_finished_has_trained(small, tmp_path):
    checkpoint = tmp_path / "run.json"
    with LocalCluster(n_workers=3, **OPTIONS) as cluster, Client(cluster) as client:
        no_restart(client)
        shuffler = Shuffler(client, small, checkpoint=checkpoint, on_loss="raise")
        for epoch in shuffler.epochs(1):
            futures = epoch.map(len)
            assert sum(client.gather(futures)) == 1000
            os.kill(client.run(os.getpid)[cluster.workers[1].worker_address], signal.SIGKILL)
            late = epoch.map(len)
            with pytest.raises(WorkerLost):
                client.gather(late)
            epoch.accept(late)
        assert epoch_of(checkpoint) == 1
