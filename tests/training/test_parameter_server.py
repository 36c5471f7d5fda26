"""The parameter server: in one process beside a list of events, and on Dask actors beside the simulation."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

import distributed.client
import numpy as np
import pytest
from distributed import Client, LocalCluster, get_worker
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.compare import SimulatedCluster, local_cluster
from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, first_ranks
from dshuffle.sharding import Sharding
from dshuffle.synthetic import gaussian_blobs
from dshuffle.training import SoftmaxRegression, fit_parameter_server
from dshuffle.training.parameter_server import Job

BLOBS = {name: array.compute() for name, array in gaussian_blobs(121, n_features=3, n_classes=4).items()}
LINE = {"x": BLOBS["x"].astype(float), "y": BLOBS["x"] @ np.array([1.0, -2.0, 0.5])}
N_WORKERS = 4
ONE_EACH = {"x": np.eye(60), "y": np.zeros(60)}


@dataclass(frozen=True)
class LinearModel:
    """Half the squared error of x @ w + b."""

    n_classes: int | None = None

    def first(self, n_features, seed):
        return np.zeros(n_features + 1)

    def gradient(self, parameters, rows, targets):
        wrong = rows @ parameters[:-1] + parameters[-1] - targets
        return np.append(wrong @ rows, wrong.sum()) / len(rows), float(wrong @ wrong) / (2 * len(rows))


def simulated(arrays, n_workers, sharding):
    dataset = dshuffle.create_dataset("memory://simulated-server", arrays, overwrite=True)
    return SimulatedCluster.of(dataset, n_workers).session(Choices("local"), sharding)


def simulate(n_workers, arrays=LINE, model=None, **options):
    ranks = first_ranks("random", len(arrays["y"]), n_workers, seed=1)
    defaults = {"epochs": 2, "batch_size": 5 * n_workers, "step": 0.1, "seed": 3}
    session = simulated(arrays, n_workers, ranks)
    return ranks, fit_parameter_server(session, model or LinearModel(), **{**defaults, **options})


def batches_of(ids, n_workers, size, *, rank, epoch, pace="once", seed=3, done=0):
    job = Job(LinearModel(), "x", "y", n_workers, size * n_workers, pace, seed)
    return job.batches(ids, rank, epoch, done)


def test_it_is_what_a_list_of_events_gives():
    """Equations 3 to 5, with all finishing times laid out beforehand and every version of the parameters kept."""
    speeds = (1.0, 0.55, 0.3)
    ranks, history = simulate(3, speeds=speeds, epochs=2)
    versions, staleness = [np.zeros(4)], []
    for epoch in range(2):
        events = []
        for rank, speed in enumerate(speeds):
            shard, begin = np.flatnonzero(ranks == rank), 0.0
            for positions in batches_of(shard, 3, 5, rank=rank, epoch=epoch):
                events.append((begin + len(positions) / speed, begin, shard[positions]))
                begin = events[-1][0]
        events.sort(key=lambda event: event[0])
        ends = [event[0] for event in events]
        before = len(versions) - 1
        for number, (_, begin, batch) in enumerate(events):
            seen = before + sum(end <= begin for end in ends)
            rows = np.column_stack([LINE["x"][batch], np.ones(len(batch))])
            gradient = rows.T @ (rows @ versions[seen] - LINE["y"][batch]) / len(batch)
            staleness.append(before + number - seen)
            versions.append(versions[-1] - 0.1 / 3 * gradient)
    np.testing.assert_allclose(history.model, versions[-1], rtol=1e-10)
    assert history.staleness.sum(axis=0).tolist() == np.bincount(staleness).tolist()


@given(
    n_samples=st.integers(3, 60),
    size=st.integers(1, 3),
    pace=st.sampled_from(["once", "free"]),
    epoch=st.integers(0, 3),
    done=st.integers(0, 50),
    seed=st.integers(0, 2**40),
)
def test_a_pass_goes_over_every_sample_once(n_samples, size, pace, epoch, done, seed):
    ids = np.random.default_rng(seed).permutation(1000)[:n_samples]
    options = {"rank": 1, "epoch": epoch, "pace": pace, "seed": seed, "done": done}
    batches, per_pass = batches_of(ids, 2, size, **options), -(-n_samples // size)
    if pace == "free":
        for _ in range(-done % per_pass):  # to the end of the pass that was under way
            next(batches)
    taken = [next(batches) for _ in range(per_pass)]
    assert np.array_equal(np.sort(np.concatenate(taken)), np.arange(n_samples))
    assert (next(batches, None) is None) == (pace == "once")
    # Of the same samples in another order the same batches are made.
    other = np.sort(ids)
    again, whole = (next(batches_of(order, 2, size, **options)) for order in (other, ids))
    assert np.array_equal(other[again], ids[whole])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 3}, r"batch_size=3.*at least the number of workers \(4\)"),
        ({"batch_size": 400}, "batch_size=400.*at most 120.*100 samples of it, but one worker has only 30"),
        ({"step": 0}, "step=0"),
        ({"step": 1e9, "epochs": 60}, "step=.*diverged in epoch"),
        ({"pace": "fast"}, "pace='fast'.*once or free"),
        ({"speeds": (1.0, 2.0)}, r"speeds=\(1.0, 2.0\).*4 finite numbers > 0"),
        ({"speeds": (1.0, 0.0, 1.0, 1.0)}, r"speeds=\(1.0, 0.0"),
        ({"features": "z"}, "features='z'.*one of the dataset's arrays: x, y"),
        ({"arrays": {**LINE, "y": LINE["y"][:, np.newaxis]}}, r"target='y'.*1-D array of numbers \(it is 2-D"),
        ({"arrays": {**LINE, "y": np.where(np.arange(121) == 9, np.nan, 1.0)}}, "target='y'.*sample 9 is not"),
        ({"model": SoftmaxRegression(4)}, "target='y'.*integers or booleans.*float64"),
        ({"model": SoftmaxRegression(3), "arrays": BLOBS}, r"y\[\d+\]=3 .*label in \[0, 3\).*Number the classes"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options, message):
    with pytest.raises(InvalidParameter, match=message):
        simulate(4, **options)


def test_a_batch_that_workers_cannot_share_equally_is_rounded_and_said(caplog):
    (_, rounded), (_, whole) = (simulate(4, batch_size=size) for size in (14, 12))
    np.testing.assert_array_equal(rounded.model, whole.model)
    assert rounded.batch_size == whole.batch_size == 12
    assert caplog.messages == ["dshuffle: batch_size=14 on 4 workers is rounded to 12: each takes 3 samples"]


@pytest.fixture(scope="module")
def client(cluster_of):
    with cluster_of(N_WORKERS, processes=False) as client:
        yield client


def shuffler(client, arrays=BLOBS, **options):
    dataset = dshuffle.create_dataset("memory://parameter-actors", arrays, overwrite=True)
    return dshuffle.Shuffler(client, dataset, **options)


@dataclass(frozen=True)
class Counting:
    """Adds 1 to a parameter of each sample, whatever the parameters are; some workers fail."""

    failing: int | None = None
    n_classes: int | None = None

    def first(self, n_features, seed):
        return np.zeros(n_features)

    def gradient(self, parameters, rows, targets):
        rank = get_worker().name
        if rank == self.failing:
            raise ZeroDivisionError("on purpose")
        return -rows.mean(axis=0), float(np.square(rows @ parameters - 1).mean())


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ["local", "global"])
def test_every_sample_is_used_once_an_epoch(client, assignment):
    # alpha / n = WB, so that a mini-batch adds 1 for each of its samples: 15 a worker, 5 at a time.
    options = {"epochs": 3, "batch_size": 20, "step": 20.0}
    with shuffler(client, ONE_EACH, assignment=assignment) as real:
        history = fit_parameter_server(real, Counting(), **options)
        with pytest.raises(InvalidParameter, match="speeds is not allowed: workers run at their real speed"):
            fit_parameter_server(real, Counting(), **options, speeds=(1.0,) * N_WORKERS)
    np.testing.assert_allclose(history.model, 3)
    assert history.staleness.sum(axis=1).tolist() == [9, 9, 9, 9]
    # Between a pull and a push of an epoch there cannot be more than all pushes of the others.
    assert history.staleness.shape[1] <= 10
    assert [point.error for point in history.points] == pytest.approx([0, 1, 4])


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["once", "free"])
def test_broadcast_samples_are_used_by_all(client, pace):
    sharding = Sharding(np.arange(121, dtype=np.int32) % N_WORKERS, N_WORKERS, np.arange(116, 121))
    options = {"epochs": 3, "batch_size": 21, "step": 0.3, "pace": pace}
    with shuffler(client, assignment="local", sharding=sharding) as real:
        sessions = [real, simulated(BLOBS, N_WORKERS, sharding)]
        fits = [fit_parameter_server(session, SoftmaxRegression(4), **options) for session in sessions]
    for fitted in fits:
        # 29 and 5 samples, or 29 and 4 that others have: as many updates at the pace "free" as without copies.
        assert fitted.staleness.sum() == 3 * (-(-121 // 5) if pace == "free" else 4 * 7)


@pytest.mark.slow
def test_an_error_of_one_worker_ends_all(client):
    with shuffler(client, ONE_EACH) as real, pytest.raises(ZeroDivisionError, match="on purpose"):
        fit_parameter_server(real, Counting(failing=1), epochs=1, batch_size=20, step=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["trains", "serves", "does both", "has trained"])
def test_an_epoch_in_which_a_worker_is_lost_starts_again(cluster_of, caplog, tmp_path, killed):
    """Every sample adds 1 in every epoch: no gradient is lost, and none is applied twice."""
    flag = tmp_path / "flag"

    class Striking(Counting):
        """Kills a server, or the own worker, which has begun to train, in the middle of an epoch or at its end."""

        def gradient(self, parameters, rows, targets):
            with contextlib.suppress(FileNotFoundError):
                pid, evaluates = int(flag.read_text()), len(rows) > 10
                if killed == "serves" or (pid == os.getpid() and evaluates == (killed == "has trained")):
                    flag.unlink()
                    os.kill(pid, signal.SIGKILL)
            return super().gradient(parameters, rows, targets)

    dataset = dshuffle.create_dataset(tmp_path / "eye.zarr", {"x": np.eye(400), "y": np.zeros(400)})
    with (
        cluster_of(2, processes=True) if killed == "does both" else local_cluster(2) as client,
        dshuffle.Shuffler(client, dataset) as real,
    ):
        workers = set(client.scheduler_info(n_workers=-1)["workers"])
        others = sorted(workers - set(real.addresses))
        address = others[0] if killed == "serves" else real.addresses[killed != "does both"]
        [pid] = client.run(os.getpid, workers=[address]).values()

        def strike_next(point):
            if point.epoch == 0:
                flag.write_text(str(pid))

        history = fit_parameter_server(real, Striking(), epochs=3, batch_size=20, step=20.0, on_epoch=strike_next)
    assert not flag.exists()
    assert ("the epoch starts again on all workers" in caplog.text) == (killed != "has trained")
    np.testing.assert_allclose(history.model, 3)
    assert history.staleness.sum(axis=1).tolist() == [60, 60]


@pytest.mark.slow
def test_the_shufflers_client_need_not_be_the_default():
    address = {"dashboard_address": "127.0.0.1:0"}
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=None, scheduler_kwargs=address) as cluster,
        Client(cluster, set_as_default=False) as client,
        shuffler(client) as real,
        pytest.MonkeyPatch.context() as patch,
    ):
        # The client of another test may be the default one here.
        patch.setattr(distributed.client, "_get_global_client", distributed.client._current_client.get)
        history = fit_parameter_server(real, SoftmaxRegression(4), epochs=1, batch_size=20, step=0.1)
    assert len(history.points) == 1
