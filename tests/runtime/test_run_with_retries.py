"""Training goes on from the checkpoint when a session or a cluster is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from distributed import Client, LocalCluster, get_worker, wait

import dshuffle
from dshuffle.errors import CheckpointError, ClusterError, ExchangeError, InvalidParameter, StaleEpoch
from dshuffle.planning import Choices, Remainder, WorkerHistory
from dshuffle.runtime.client.epoch_tasks import EpochTasks
from dshuffle.runtime.client.session_state import SessionPosition, SessionState

from .conftest import OPTIONS

pytestmark = pytest.mark.timeout(120)


def train_until(last, seen, strike=lambda shuffler, epoch: None):
    """Train to an epoch; note the samples of every epoch, and let something strike in it."""

    def train(shuffler):
        for epoch in shuffler.epochs(last - shuffler.state_dict()["epoch"]):
            strike(shuffler, epoch)
            samples = shuffler.client.gather(epoch.map(lambda partition: partition.sample_ids.copy()))
            seen.append((epoch.number, shuffler.n_workers, np.sort(np.concatenate(samples)).tolist()))
        return "done"

    return train


def test_training_goes_on_from_the_last_epoch(threads, small, tmp_path):
    seen, tries = [], iter([ClusterError("gone"), ExchangeError("broken")])

    def strike(shuffler, epoch):
        if epoch.number == 2 and (error := next(tries, None)):
            raise error

    train = train_until(4, seen, strike)
    options = {"assignment": "partial:0.2", "seed": 5, "checkpoint": tmp_path / "run.json"}
    assert dshuffle.run_with_retries(train, lambda: threads, small, **options) == "done"
    assert [number for number, _, _ in seen] == [0, 1, 2, 3]
    assert all(samples == list(range(1000)) for *_, samples in seen)
    # A job that starts again finds the checkpoint.
    dshuffle.run_with_retries(train_until(6, seen), lambda: threads, small, **options)
    assert [number for number, _, _ in seen] == [0, 1, 2, 3, 4, 5]


def test_a_cluster_of_an_attempt_is_closed_before_the_next_one_starts(small, tmp_path, caplog):
    events = []

    @contextlib.contextmanager
    def make_client():
        with LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster, Client(cluster) as client:
            events.append("start")
            try:
                yield client
            finally:
                events.append("end")

    def train(shuffler):
        events.append(shuffler.n_workers)
        if events.count("start") == 1:
            raise ClusterError("the cluster is gone. Make a new one")
        return "done"

    assert dshuffle.run_with_retries(train, make_client, small, checkpoint=tmp_path / "run.json") == "done"
    assert events == ["start", 2, "end", "start", 2, "end"]
    assert "training continues in epoch 0 (ClusterError: the cluster is gone)" in caplog.text


def test_errors_of_the_user_are_raised_at_once(threads, small, tmp_path):
    tries = []

    def train(shuffler):
        tries.append(shuffler)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dshuffle.run_with_retries(train, lambda: threads, small, checkpoint=tmp_path / "run.json")
    assert len(tries) == 1


def use_an_epoch_that_has_ended(shuffler):
    epochs = shuffler.epochs(2)
    first = next(epochs)
    next(epochs)  # so every attempt would reach another epoch
    first.map(len)


def use_a_partition_after_its_task(shuffler):
    epoch = next(shuffler.epochs(1))
    shuffler.client.gather(epoch.map(lambda partition: setattr(get_worker(), "kept", partition)))
    shuffler.client.gather(epoch.map(lambda partition: get_worker().kept["x"].sum()))


@pytest.mark.parametrize(
    ("mistake", "error"), [(use_an_epoch_that_has_ended, ClusterError), (use_a_partition_after_its_task, StaleEpoch)]
)
def test_a_mistake_is_raised_at_once(threads, small, tmp_path, mistake, error):
    tries = []

    def train(shuffler):
        tries.append(shuffler.next_epoch)
        mistake(shuffler)

    with pytest.raises(error, match="ended"):
        dshuffle.run_with_retries(train, lambda: threads, small, checkpoint=tmp_path / "run.json")
    assert tries == [0]


@pytest.mark.parametrize("attempts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_attempts_that_only_begin_an_epoch_are_limited(threads, small, tmp_path, attempts):
    tries = []

    def train(shuffler):
        tries.append(next(shuffler.epochs(1)).number)
        raise ClusterError("gone")

    with pytest.raises(ClusterError, match="gone"):
        dshuffle.run_with_retries(train, lambda: threads, small, checkpoint=tmp_path / "run.json", attempts=attempts)
    assert tries == [0] * attempts


@pytest.mark.slow
def test_samples_that_were_trained_on_are_progress(threads, small, tmp_path):
    tries, place = [], tmp_path / "run.json"

    def train(shuffler):
        epoch = next(shuffler.epochs(1))
        left = threads.gather(epoch.map(len))
        tries.append(sum(left))
        if tries[-1] <= 400:
            return "done"
        threads.gather(epoch.map(lambda partition: partition.mark_trained(50)))
        shuffler.save(place)
        raise ClusterError("gone")

    assert dshuffle.run_with_retries(train, lambda: threads, small, checkpoint=place, attempts=2) == "done"
    assert tries == [1000, 750, 500, 250]


@pytest.mark.slow
def test_attempts_are_limited_in_all(threads, small, tmp_path, monkeypatch):
    """Each of them trains on an epoch, and then fails."""
    monkeypatch.setattr("dshuffle.runtime.client.retries.TOTAL_ATTEMPTS", 3)
    seen = []

    def train(shuffler):
        for epoch in shuffler.epochs(1):
            seen.append(epoch.number)
            threads.gather(epoch.map(len))
        raise ClusterError("gone")

    with pytest.raises(ClusterError, match="gone"):
        dshuffle.run_with_retries(train, lambda: threads, small, checkpoint=tmp_path / "run.json", attempts=2)
    assert seen == list(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_a_folder_that_is_away_for_a_second(threads, small, tmp_path, lost):
    folder, seen, tries = tmp_path / "state", [], iter([True])

    def strike(shuffler, epoch):
        if epoch.number == 1 and next(tries, False):
            folder.rename(tmp_path / "away")
            threading.Timer(1.0, (tmp_path / "away").rename, [folder]).start()
            if lost:
                raise ClusterError("gone")

    dshuffle.run_with_retries(train_until(3, seen, strike), lambda: threads, small, checkpoint=folder / "run.json")
    assert [number for number, *_ in seen] == [0, 1, 2]
    assert os.listdir(folder) == ["run.json"]
    assert sorted(os.listdir(tmp_path)) == ["small.zarr", "state"]


@pytest.mark.slow
def test_a_checkpoint_that_has_gone_is_not_waited_for_for_ever(threads, small, tmp_path):
    """Training must not begin again from the first epoch."""
    place, seen = tmp_path / "run.json", []

    def strike(shuffler, epoch):
        if epoch.number == 1:
            place.unlink()
            raise ClusterError("gone")

    with pytest.raises(CheckpointError, match=r"cannot be read \(.*it was there before, and is missing now") as caught:
        dshuffle.run_with_retries(train_until(3, seen, strike), lambda: threads, small, checkpoint=place, patience="1s")
    assert [number for number, *_ in seen] == [0]
    assert caught.value.transient


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attempts": 0}, InvalidParameter, "attempts=0"),
        ({"min_workers": 0}, InvalidParameter, "min_workers=0"),
        ({"patience": "5 minits"}, InvalidParameter, "patience='5 minits'"),
        (
            {"min_workers": 50, "patience": "0.2s"},
            ClusterError,
            "only 5 of min_workers=50 workers are there",
        ),
    ],
)
def test_what_is_refused(threads, small, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        dshuffle.run_with_retries(len, lambda: threads, small, checkpoint=tmp_path / "run.json", **options)


def test_another_way_of_shuffling_is_refused(threads, small, tmp_path):
    path, seen = tmp_path / "run.json", []
    dshuffle.run_with_retries(
        train_until(1, seen), lambda: threads, small, checkpoint=path, assignment="chunks", seed=1
    )
    dshuffle.run_with_retries(
        train_until(2, seen), lambda: threads, small, checkpoint=path, assignment="chunks", seed=1
    )
    with pytest.raises(CheckpointError, match="has seed=1, and seed=2 is asked for"):
        dshuffle.run_with_retries(
            train_until(3, seen), lambda: threads, small, checkpoint=path, assignment="chunks", seed=2
        )


@pytest.mark.slow
def test_another_cluster_takes_over(small, tmp_path):
    """The first cluster dies with its scheduler's workers; the next one has fewer workers."""
    seen, sizes, clusters = [], iter([3, 2]), []

    def make_client():
        for old in clusters:
            old.close()
        cluster = LocalCluster(n_workers=next(sizes), processes=True, **OPTIONS)
        client = Client(cluster)
        clusters[:] = [client, cluster]
        return client

    def strike(shuffler, epoch):
        if epoch.number == 1 and shuffler.n_workers == 3:
            for nanny in clusters[1].workers.values():
                os.kill(nanny.pid, signal.SIGKILL)

    try:
        dshuffle.run_with_retries(
            train_until(3, seen, strike),
            make_client,
            small,
            checkpoint=tmp_path / "run.json",
            min_workers=2,
            on_loss="raise",
        )
    finally:
        for one in clusters:
            one.close()
    assert [(number, n_workers) for number, n_workers, _ in seen] == [(0, 3), (1, 2), (2, 2)]
    assert all(samples == list(range(1000)) for *_, samples in seen)


def train_late(last, models, strike):
    """Gather the results of an epoch during the next one; the model is the epochs whose results it has."""

    def train(shuffler):
        model, earlier = shuffler.attached or [], None
        for epoch in shuffler.epochs(last - shuffler.next_epoch):
            futures = epoch.map(lambda partition: (partition.epoch, time.sleep(0.5))[0])
            strike(epoch, futures)
            if earlier is not None:
                model = [*model, *set(shuffler.client.gather(earlier))]
                shuffler.attach(model)
            earlier = futures
        if earlier is not None:
            model = [*model, *set(shuffler.client.gather(earlier))]
        shuffler.attach(model)
        models.append(model)
        return model

    return train


def test_results_that_are_gathered_late_and_lost_are_trained_again(new_processes, small, tmp_path):
    struck = []

    def kill(epoch, futures):
        if epoch.number == 2 and not struck:
            struck.append(1)
            wait(futures)
            client.run(lambda: os.kill(os.getpid(), signal.SIGKILL), on_error="ignore")

    place = tmp_path / "run.json"
    with new_processes(2) as cluster, Client(cluster) as client:
        trained = dshuffle.run_with_retries(
            train_late(5, [], kill), lambda: client, small, checkpoint=place, min_workers=2
        )
    assert struck
    assert trained == [0, 1, 2, 3, 4]
    state = json.loads(place.read_bytes().partition(b"\n")[0])["state"]
    assert state["epoch"] == 5  # attached after the last epoch, and written at once


def test_a_checkpoint_does_not_pass_the_epochs_that_the_attached_value_has(threads, small, tmp_path, caplog):
    place = tmp_path / "run.json"

    def saved():
        state = json.loads(place.read_bytes().partition(b"\n")[0])["state"]
        return state["epoch"], state["trained"]

    with dshuffle.Shuffler(threads, small, checkpoint=place) as shuffler:
        shuffler.attach("no epoch")
        for epoch in shuffler.epochs(5):
            if epoch.number == 1:
                shuffler.attach("epoch 0")  # it has no tasks yet
            assert saved() == ([0, 0, 1, 2, 2][epoch.number], [])
            threads.gather(epoch.map(lambda partition: partition.mark_trained(3)))
            shuffler.save(tmp_path / "copy.json")
            with pytest.raises(InvalidParameter, match=r"epoch=9 is not allowed; it must be in \[-1, "):
                shuffler.attach("epoch 9", 9)
            if epoch.number == 2:
                shuffler.attach("epochs 0 and 1", 1)
            if epoch.number == 4:
                with pytest.raises(InvalidParameter, match=r"nothing was attached in epoch 3.*attach\(value, epoch\)"):
                    shuffler.attach("epochs 0 to 4")
                shuffler.attach("epochs 0 to 4", 4)
        assert saved() == (5, [])
    text = "the state stays at the start of epoch 2, although epoch 4 has begun"
    assert sum(text in record.getMessage() for record in caplog.records) == 1


def test_a_state_of_an_earlier_epoch_has_the_workers_of_that_epoch(small):
    histories = [WorkerHistory(3)]
    choices = Choices("partial:0.2")
    position = SessionPosition(small, choices, Remainder(0, ()), lambda: histories[-1])
    for number in range(4):
        if number == 2:
            histories.append(histories[-1].changed([0, 1], epoch=2, carried=1))
        position.begin(EpochTasks(number))
        if number == 1:
            position.attach("epoch 0", 0)
    state = SessionState.from_dict(position.state(), small)
    assert (state.next.epoch, state.history) == (1, histories[0])
    position.attach("epoch 1", 1)
    state = SessionState.from_dict(position.state(), small)
    assert (state.next.epoch, state.history) == (2, histories[1])
