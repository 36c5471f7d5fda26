"""Workers are lost, and nobody takes their ranks: those that are left go on, from the partitions that they hold."""

from __future__ import annotations

import os
import signal
import time

import dask
import numpy as np
import pytest

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import WorkerLost

from ..conftest import task_that_checks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

CHUNKED = [{"assignment": "chunks"}, {"assignment": "local", "sharding": "contiguous"}]
"""Ways in which the rows of a rank are whole chunks, so that bytes of the store say which rows were read."""


def kill(client, address):
    [pid] = client.run(os.getpid, workers=[address]).values()
    os.kill(pid, signal.SIGKILL)


def is_whole(samples, n_samples=1000):
    return np.array_equal(np.sort(np.concatenate(samples)), np.arange(n_samples))


@pytest.fixture
def plain(tmp_path):
    """A dataset whose chunks have the size of their rows."""
    rows = np.random.default_rng(0).integers(0, 256, (1200, 2048), dtype=np.uint8)
    return create_dataset(str(tmp_path / "plain.zarr"), {"x": rows}, chunk_rows=10)


@pytest.mark.parametrize("when", ["training", "exchange", "validation"])
@pytest.mark.parametrize("way", [{}, {"delivery": "server"}, {"cache_fraction": 0.7}, {"assignment": "local"}], ids=str)
def test_an_elastic_session_goes_on(lonely, labelled, checked, within, way, when):
    """In the same epoch if tasks were lost, perhaps of the one that has just begun, and unnoticed otherwise."""
    numbers = []

    def train():
        with Shuffler(lonely, labelled, elastic=True, **way) as shuffler:
            for epoch in shuffler.epochs(5):
                numbers.append(epoch.number)
                is_struck = numbers == [0, 1]
                futures = epoch.map(checked, 0.5 if is_struck else 0)
                if is_struck and when == "training":
                    kill(lonely, shuffler.addresses[2])
                try:
                    samples = lonely.gather(futures)
                except WorkerLost:
                    assert when != "validation"
                    continue
                assert is_whole(samples)
                assert len(samples) == (3 if numbers in ([0], [0, 1]) else 2)
                if is_struck:
                    kill(lonely, shuffler.addresses[2])
                    time.sleep(2.0 * (when == "validation"))
        return shuffler.records

    records = within(60, train)
    again = {"training": [[0, 1, 1, 2, 3, 4]], "exchange": [[0, 1, 2, 3, 4], [0, 1, 2, 2, 3, 4]]}
    assert numbers in again.get(when, [[0, 1, 2, 3, 4]])
    assert [record.n_workers for record in records if record.epoch != 1] == [3, 2, 2, 2]


@pytest.mark.parametrize("way", CHUNKED, ids=lambda way: way["assignment"])
@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "new session"])
def test_only_the_rows_of_the_lost_worker_are_read_again(lonely, plain, within, way, elastic):
    """Every row is trained on once, with its bytes, by the workers that are left, and within 5 s."""
    checked = task_that_checks(plain)
    with dask.config.set({"dshuffle.replacement-timeout": "500ms" if elastic else "8s"}):
        shuffler = Shuffler(lonely, plain, elastic=elastic, **way)
    [epoch] = shuffler.epochs(1)
    lost = len(lonely.gather(epoch.map(checked))[2])
    futures = epoch.map(checked, 0.5)
    kill(lonely, shuffler.addresses[2])
    with pytest.raises(WorkerLost):
        within(30, lambda: lonely.gather(futures))
    began = time.monotonic()
    if not elastic:
        with pytest.raises(WorkerLost):
            next(shuffler.epochs(1))
        shuffler.close()
        shuffler = Shuffler(lonely, plain, **way)
    with shuffler:
        epochs = shuffler.epochs(1)
        epoch = within(30, lambda: next(epochs))
        seconds = time.monotonic() - began
        assert epoch.number == 0
        samples = lonely.gather(epoch.map(checked))
        assert len(samples) == 2
        assert is_whole(samples, 1200)
        list(epochs)
    [record] = [record for record in shuffler.records if record.n_workers == 2][:1]
    assert 0 < record.store_bytes <= 1.3 * lost * plain.row_nbytes, "three times as much is the whole dataset"
    assert seconds < 15, "three times the 5 s within which it goes on"


@pytest.mark.parametrize("saves", [True, False])
def test_what_the_last_state_of_the_epoch_has_is_not_trained_on_again(lonely, labelled, checked, within, saves):
    def piece(partition, first, last):
        partition.mark_trained(last)
        time.sleep(0.3)
        return partition.sample_ids[first:last].copy()

    with Shuffler(lonely, labelled, elastic=True) as shuffler:
        [epoch] = shuffler.epochs(1)
        done = lonely.gather(epoch.map(piece, 0, 100))
        if saves:
            shuffler.attach("the model after the first piece")
            shuffler.state_dict()
        futures = epoch.map(piece, 100, 200)
        kill(lonely, shuffler.addresses[0])
        with pytest.raises(WorkerLost):
            within(30, lambda: lonely.gather(futures))
        epochs = shuffler.epochs(1)
        samples = within(30, lambda: lonely.gather(next(epochs).map(checked)))
        assert is_whole([*done, *samples] if saves else samples)
        samples = within(30, lambda: lonely.gather(next(epochs).map(checked)))
        assert is_whole(samples)
        assert shuffler.epoch == 1


def test_a_loop_that_misses_calls_of_an_epoch_gets_it_again(lonely, labelled, checked, within):
    """It hears of the loss when it takes a state, after all tasks so far have ended."""
    numbers = []
    with Shuffler(lonely, labelled, elastic=True) as shuffler:
        for epoch in shuffler.epochs(2):
            numbers.append(epoch.number)
            lonely.gather(epoch.map(checked))
            if numbers == [0]:
                kill(lonely, shuffler.addresses[1])
                with pytest.raises(WorkerLost):
                    within(30, lambda: [(time.sleep(0.2), shuffler.state_dict()) for _ in range(60)])
                continue
            assert is_whole(lonely.gather(epoch.map(checked)))
    assert numbers == [0, 0, 1]


def test_partitions_of_a_session_that_was_lost_are_freed_after_a_while(lonely, labelled, checked, within, eventually):
    def n_open(dask_worker):
        return len(dask_worker.plugins["dshuffle"].sessions.ids)

    with dask.config.set({"dshuffle.replacement-timeout": "2s"}):
        shuffler = Shuffler(lonely, labelled)
    [epoch] = shuffler.epochs(1)
    futures = epoch.map(checked, 0.5)
    kill(lonely, shuffler.addresses[2])
    with pytest.raises(WorkerLost):
        within(30, lambda: lonely.gather(futures))
    shuffler.close()
    assert sorted(lonely.run(n_open).values()) == [1, 1]
    eventually(lambda: sorted(lonely.run(n_open).values()) == [0, 0])


@pytest.mark.parametrize("assignment", ["local", "partial:0.1"])
def test_a_new_worker_trains_on_what_is_left_of_a_lost_rank(lonely, labelled, checked, within, assignment):
    """There are as many workers as before, and others have the ranks of the names."""

    def half(partition):
        count = len(partition) // 2
        partition.mark_trained(count)
        return partition.sample_ids[:count].copy()

    def train():
        options = {"elastic": True, "min_workers": 3, "on_loss": "raise", "assignment": assignment}
        with (
            dask.config.set({"dshuffle.replacement-timeout": "30s"}),
            Shuffler(lonely, labelled, **options) as shuffler,
        ):
            epochs = shuffler.epochs(3)
            assert is_whole(lonely.gather(next(epochs).map(checked)))
            epoch = next(epochs)
            done = lonely.gather(epoch.map(half))
            shuffler.state_dict()
            futures = epoch.map(checked, 2.0)
            kill(lonely, shuffler.addresses[1])
            with pytest.raises(WorkerLost):
                lonely.gather(futures)
            lonely.cluster.scale(4)
            again = next(epochs)
            assert (again.number, shuffler.n_workers) == (1, 3)
            assert is_whole([*done, *lonely.gather(again.map(checked))])
            assert is_whole(lonely.gather(next(epochs).map(checked)))

    within(60, train)


def test_tasks_of_a_stopped_worker_fail_when_the_session_ends(lonely, labelled, checked, within):
    """Its tasks would be running for Dask until it drops the worker, which takes minutes."""

    def take_a_while():
        import asyncio

        from dshuffle.runtime.worker.session import ExchangeRun

        start = ExchangeRun.start

        async def late(self):
            await asyncio.sleep(1)
            await start(self)

        ExchangeRun.start = late

    def train():
        with (
            dask.config.set({"dshuffle.heartbeat": "2s"}),
            Shuffler(lonely, labelled, elastic=True) as shuffler,
        ):
            assert is_whole(lonely.gather(next(shuffler.epochs(1)).map(checked)))
            stopped = shuffler.addresses[2]
            [pid] = lonely.run(os.getpid, workers=[stopped]).values()
            lonely.run(take_a_while, workers=[stopped])
            epochs = shuffler.epochs(2)
            epoch = next(epochs)  # the exchange for the next one begins
            futures = epoch.map(checked, 1.0)
            os.kill(pid, signal.SIGSTOP)
            try:
                with pytest.raises(WorkerLost):
                    lonely.gather(futures)
                again = next(epochs)
                assert (again.number, shuffler.n_workers) == (1, 2)
                assert is_whole(lonely.gather(again.map(checked)))
            finally:
                os.kill(pid, signal.SIGKILL)

    within(60, train)
