"""Training goes on from the checkpoint when a session or a cluster is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from distributed import Client, wait

import dshuffle
from dshuffle.errors import CheckpointError, ClusterError, ExchangeError, InvalidParameter
from dshuffle.planning import Choices, Remainder, WorkerHistory
from dshuffle.runtime.client.checkpoints import SessionPosition, SessionState
from dshuffle.runtime.client.epoch import EpochTasks

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
    assert sorted(os.listdir(folder)) == ["run.json", "run.json.lock"]
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


def test_another_way_of_shuffling_is_refused(threads, small, tmp_path):
    def run(last, seed):
        way = {"checkpoint": tmp_path / "run.json", "assignment": "chunks", "seed": seed}
        dshuffle.run_with_retries(train_until(last, []), lambda: threads, small, **way)

    run(1, seed=1)
    run(2, seed=1)
    with pytest.raises(InvalidParameter, match="seed=2 is not allowed; it must be left out, or 1 as before"):
        run(3, seed=2)


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


def test_a_state_of_an_earlier_epoch_has_the_workers_of_that_epoch(small):
    histories = [WorkerHistory(3)]
    choices = Choices("partial:0.2")
    position = SessionPosition(SessionState.of(small, choices, histories[0], Remainder(0, ())))
    for number in range(4):
        if number == 2:
            histories.append(histories[-1].changed([0, 1], epoch=2, carried=1))
        position.begin(EpochTasks(number), histories[-1])
        if number == 1:
            position.attach("epoch 0", 0)
    state = SessionState.from_dict(position.state(), small)
    assert (state.next.epoch, state.history) == (1, histories[0])
    position.attach("epoch 1", 1)
    state = SessionState.from_dict(position.state(), small)
    assert (state.next.epoch, state.history) == (2, histories[1])
