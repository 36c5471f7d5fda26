"""The parameter server on Dask actors: that it is the simulation where speeds are given, and asynchronous elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass

import distributed.client
import numpy as np
import pytest
from distributed import Client, LocalCluster, get_worker

import dshuffle
import dshuffle.sharding
from dshuffle.compare import local_cluster
from dshuffle.errors import InvalidParameter, WorkerLost
from dshuffle.planning.assignment.balance import stratified_ranks
from dshuffle.synthetic import gaussian_blobs
from dshuffle.training import SoftmaxRegression, fit_parameter_server, simulate_parameter_server
from dshuffle.training.parameter_server.trainer import Servers

pytestmark = pytest.mark.slow

N_WORKERS = 4
BLOBS = {name: array.compute() for name, array in gaussian_blobs(121, n_features=3, n_classes=4).items()}
ONE_EACH = {"x": np.eye(60), "y": np.zeros(60)}


@pytest.fixture(scope="module")
def client(cluster_of):
    with cluster_of(N_WORKERS, processes=False) as client:
        yield client


def shuffler(client, arrays=BLOBS, **options):
    dataset = dshuffle.create_dataset("memory://parameter-actors", arrays, overwrite=True)
    return dshuffle.Shuffler(client, dataset, **options)


@dataclass(frozen=True)
class Counting:
    """Adds 1 to a parameter of each sample, whatever the parameters are; some workers sleep, some fail."""

    slow: int | None = None
    failing: int | None = None
    n_classes: int | None = None

    def first(self, n_features, seed):
        return np.zeros(n_features)

    def gradient(self, parameters, rows, targets):
        rank = get_worker().name
        if self.slow is not None:
            time.sleep(0.15 if rank == self.slow else 0.01)
        if rank == self.failing:
            raise ZeroDivisionError("on purpose")
        return -rows.mean(axis=0), 0.0

    def loss(self, parameters, rows, targets):
        return float(np.square(rows @ parameters - 1).mean())


@pytest.mark.parametrize(("pace", "servers"), [("once", 2), ("free", 3), ("free", 1)])
def test_workers_of_given_speeds_are_the_simulation_to_the_last_bit(client, pace, servers):
    speeds = (1.0, 0.3, 0.5, 0.25)
    options = {"epochs": 3, "batch_size": 20, "step": 0.4, "pace": pace, "speeds": speeds, "seed": 5}
    with shuffler(client, assignment="local", sharding="stratified:y", seed=2) as real:
        history = fit_parameter_server(real, SoftmaxRegression(4), servers=servers, **options)
    ranks = stratified_ranks(BLOBS["y"], N_WORKERS, seed=2)
    expected = simulate_parameter_server(BLOBS, ranks, SoftmaxRegression(4), **options)
    assert np.array_equal(history.model, expected.model)
    assert np.array_equal(history.staleness.counts, expected.staleness.counts)
    assert [point.error for point in history.points] == pytest.approx([point.error for point in expected.points])
    assert history.worker_rates == speeds


@pytest.mark.parametrize("assignment", ["local", "global"])
def test_every_sample_is_used_once_an_epoch(client, assignment):
    with shuffler(client, ONE_EACH, assignment=assignment) as real:
        # alpha / n = WB, so that a mini-batch adds 1 for each of its samples: 15 a worker, 5 at a time.
        history = fit_parameter_server(real, Counting(), epochs=3, batch_size=20, step=20.0, servers=2)
    np.testing.assert_allclose(history.model, 3)
    assert history.staleness.pushes == 3 * 60 / 5
    assert history.staleness.pushes_by_rank == (9, 9, 9, 9)
    # Between a pull and a push of an epoch there cannot be more than all pushes of the others.
    assert history.staleness.most <= 9
    assert [point.error for point in history.points] == pytest.approx([0, 1, 4])
    assert len(history.worker_rates) == N_WORKERS


def test_nobody_waits_for_a_slow_worker_and_it_is_named(client, caplog, monkeypatch):
    monkeypatch.setattr("dshuffle.training.fit.NOTICEABLE", 0.0)
    with shuffler(client, ONE_EACH) as real, caplog.at_level(logging.WARNING, "dshuffle"):
        history = fit_parameter_server(
            real, Counting(slow=2), epochs=1, batch_size=20, step=20.0, pace="free", features="x"
        )
    assert history.staleness.pushes == 12
    by_rank = history.staleness.pushes_by_rank
    assert by_rank[2] == min(by_rank)
    assert history.staleness.mean_by_rank[2] == max(history.staleness.mean_by_rank)
    assert "worker 2 trained" in caplog.text


@pytest.mark.parametrize("speeds", [None, (1.0, 0.3, 0.5, 0.25)])
def test_an_error_of_one_worker_ends_all(client, speeds):
    with shuffler(client, ONE_EACH) as real, pytest.raises(ZeroDivisionError, match="on purpose"):
        fit_parameter_server(real, Counting(failing=1), epochs=1, batch_size=20, step=1.0, speeds=speeds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": "z"}, "features='z'.*one of the dataset's arrays: x, y"),
        ({"features": "y"}, "features='y'.*rows of numbers"),
        ({"target": "x"}, "target='x'.*1-D array of integers"),
        ({"servers": 0}, "servers=0"),
        ({"servers": 17}, "servers=17.*at most 16"),
        ({"batch_size": 124}, "batch_size=124.*at most 120"),
        ({"step": 1e308}, "step=.*diverged in epoch 0"),
        ({"model": SoftmaxRegression(3)}, r"labels in \[0, 3\)"),
    ],
)
def test_what_cannot_be_trained_is_refused(client, options, message):
    given = {"model": SoftmaxRegression(4), "epochs": 1, "batch_size": 20, "step": 0.1, **options}
    with shuffler(client) as real, pytest.raises(InvalidParameter, match=message):
        fit_parameter_server(real, **given)


@pytest.fixture
def many_blobs(tmp_path):
    arrays = {name: array.compute() for name, array in gaussian_blobs(4_000, n_features=3, n_classes=4).items()}
    return dshuffle.create_dataset(str(tmp_path / "blobs.zarr"), arrays)


ORDERED = {"epochs": 3, "batch_size": 20, "step": 0.1, "speeds": (1.0, 0.5)}


def pid_of(client, address):
    [pid] = client.run(os.getpid, workers=[address]).values()
    return pid


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["trains", "serves", "does both"])
def test_an_epoch_in_which_a_worker_is_lost_starts_again(many_blobs, caplog, tmp_path, killed):
    """The order of the pushes is emulated, so the result is the same as without the fault."""
    flag = tmp_path / "flag"

    class Striking(SoftmaxRegression):
        """Kills a server, or the own worker, which has begun to train, in the middle of an epoch."""

        def gradient(self, *args):
            with contextlib.suppress(FileNotFoundError):
                pid = int(flag.read_text())
                if killed == "serves" or pid == os.getpid():
                    flag.unlink()
                    os.kill(pid, signal.SIGKILL)
            return super().gradient(*args)

    alone = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") if killed == "does both" else None
    with local_cluster(2) if alone is None else Client(alone) as client:
        with dshuffle.Shuffler(client, many_blobs) as real:
            expected = fit_parameter_server(real, SoftmaxRegression(4), **ORDERED)
        with dshuffle.Shuffler(client, many_blobs) as real:
            workers = set(client.scheduler_info(n_workers=-1)["workers"])
            others = sorted(workers - set(real.addresses))
            address = {"trains": real.addresses[1], "does both": real.addresses[0]}.get(killed) or others[0]
            pid = pid_of(client, address)

            def strike_next(point):
                if point.epoch == 0:
                    flag.write_text(str(pid))

            history = fit_parameter_server(real, Striking(4), on_epoch=strike_next, **ORDERED)
    assert not flag.exists()
    if alone is not None:
        alone.close()
    assert "the epoch starts again on all workers" in caplog.text
    np.testing.assert_array_equal(history.model, expected.model)
    assert history.staleness.pushes_by_rank == expected.staleness.pushes_by_rank


@pytest.mark.slow
def test_a_worker_that_is_lost_after_training_does_not_train_again(many_blobs, tmp_path):
    flag = str(tmp_path / "flag")

    class Deadly(SoftmaxRegression):
        def loss(self, *args):
            if os.path.exists(flag):
                os.remove(flag)
                os.kill(os.getpid(), signal.SIGKILL)
            return SoftmaxRegression.loss(self, *args)

    def strike(point):
        if point.epoch == 0:
            (tmp_path / "flag").touch()

    with local_cluster(2) as client:
        with dshuffle.Shuffler(client, many_blobs) as real:
            expected = fit_parameter_server(real, SoftmaxRegression(4), **ORDERED)
        with dshuffle.Shuffler(client, many_blobs) as real:
            history = fit_parameter_server(real, Deadly(4), on_epoch=strike, **ORDERED)
    assert not os.path.exists(flag)
    np.testing.assert_array_equal(history.model, expected.model)


def test_an_epoch_that_is_lost_in_every_attempt_is_an_error(client):
    calls = []

    def train():
        calls.append(actors.parameters())
        raise WorkerLost("gone")

    with (
        shuffler(client) as real,
        Servers(real, np.zeros(4), 1, None) as actors,
        pytest.raises(WorkerLost, match="gone"),
    ):
        actors.attempt(np.ones(4), train)
    np.testing.assert_array_equal(calls, [np.zeros(4), np.ones(4), np.ones(4)])


def test_broadcast_samples_count_once_per_worker(client):
    ranks = np.arange(60, dtype=np.int32) % N_WORKERS
    sharding = dshuffle.sharding.Sharding(ranks, N_WORKERS, broadcast=np.arange(56, 60))
    with shuffler(client, ONE_EACH, assignment="local", sharding=sharding) as real:
        # 14 samples a worker and the 4 that all have: 72 in all, but as many updates of 5 as for 60.
        history = fit_parameter_server(real, Counting(), epochs=2, batch_size=22, step=1e-9, pace="free")
    assert history.staleness.pushes == 2 * 12
    assert history.batch_size == 20
    # Nothing is learnt, so that every sample is wrong by 1.
    assert history.points[0].error == pytest.approx(1)


def test_emulated_speeds_are_no_problem_to_be_told_of(client, caplog):
    with shuffler(client) as real, caplog.at_level(logging.WARNING, "dshuffle"):
        fit_parameter_server(
            real, SoftmaxRegression(4), epochs=1, batch_size=20, step=0.1, speeds=[1.0, 1.0, 1.0, 0.25]
        )
    assert "slower" not in caplog.text


def test_the_shufflers_client_need_not_be_the_default(tmp_path):
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            memory_limit=0,
            dashboard_address=None,
            scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        dataset = dshuffle.create_dataset(str(tmp_path / "blobs.zarr"), BLOBS)
        with dshuffle.Shuffler(client, dataset) as real, pytest.MonkeyPatch.context() as patch:
            # The client of another test may be the default one here.
            patch.setattr(distributed.client, "_get_global_client", distributed.client._current_client.get)
            history = fit_parameter_server(real, SoftmaxRegression(4), epochs=1, batch_size=20, step=0.1)
    assert len(history.points) == 1


@pytest.mark.parametrize("pace", ["once", "free"])
def test_broadcast_samples_are_simulated(client, pace):
    sharding = dshuffle.sharding.Sharding(np.arange(121, dtype=np.int32) % N_WORKERS, N_WORKERS, np.arange(116, 121))
    options = {"epochs": 3, "batch_size": 21, "step": 0.3, "pace": pace, "speeds": [1.0, 2.0, 1.0, 3.0]}
    with shuffler(client, assignment="local", sharding=sharding) as real:
        fitted = fit_parameter_server(real, SoftmaxRegression(4), **options)
    simulated = simulate_parameter_server(BLOBS, sharding, SoftmaxRegression(4), **options)
    np.testing.assert_array_equal(fitted.model, simulated.model)
    assert fitted.staleness.pushes == simulated.staleness.pushes
    if pace == "free":
        assert fitted.staleness.pushes == 3 * -(-121 // 5)
