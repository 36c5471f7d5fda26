"""A fit that was interrupted continues with its model, in another session."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster
from sklearn.linear_model import SGDClassifier

import dshuffle
from dshuffle.errors import CheckpointError, ClusterError, InvalidParameter
from dshuffle.synthetic import gaussian_blobs, keyed_regression
from dshuffle.training import (
    Decay,
    EarlyStopping,
    Network,
    SoftmaxRegression,
    fit_linear_regression,
    fit_matrix_completion,
    fit_parallel_sgd,
    fit_parameter_server,
    fit_synchronous_sgd,
)

from ..low_rank import low_rank_entries

pytestmark = pytest.mark.timeout(120)
EPOCHS = 5


@pytest.fixture(scope="module")
def clients():
    """Clients of clusters of two and three workers."""
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as two,
        LocalCluster(n_workers=3, processes=False, dashboard_address=":0") as three,
        Client(two) as of_two,
        Client(three) as of_three,
    ):
        yield {2: of_two, 3: of_three}


BLOBS = "memory://resumed-blobs"
KEYED = "memory://resumed-keyed"
ENTRIES = "memory://resumed-entries"


@pytest.fixture(scope="module", autouse=True)
def datasets():
    dshuffle.create_dataset(BLOBS, gaussian_blobs(240, n_features=4, n_classes=3), overwrite=True)
    dshuffle.create_dataset(KEYED, keyed_regression(240, n_dense=4, n_keys=4), overwrite=True)
    entries = low_rank_entries(n_rows=12, n_columns=10, rank=2, per_row=5, seed=0)
    dshuffle.create_dataset(ENTRIES, entries, overwrite=True)


def linear(shuffler, **options):
    return fit_linear_regression(shuffler, epochs=EPOCHS, step=0.01, schedule=Decay(0.9), **options)


def parallel(shuffler, **options):
    return fit_parallel_sgd(shuffler, SGDClassifier(random_state=0), epochs=EPOCHS, **options)


def matrix(shuffler, **options):
    return fit_matrix_completion(shuffler, n_rows=12, n_columns=10, rank=2, epochs=EPOCHS, step=0.05, **options)


def synchronous(shuffler, **options):
    return fit_synchronous_sgd(shuffler, Network((4, 6, 3)), epochs=EPOCHS, batch_size=20, step=0.1, **options)


def server(shuffler, **options):
    return fit_parameter_server(shuffler, SoftmaxRegression(3), epochs=EPOCHS, batch_size=12, step=0.1, **options)


FITS = [
    (linear, KEYED, {}, lambda weights: weights),
    (synchronous, BLOBS, {}, lambda network: np.append(network.parameters, network.statistics)),
    *(
        pytest.param(*fit, marks=pytest.mark.slow)
        for fit in [
            (parallel, BLOBS, {"assignment": "partial:0.5"}, lambda model: np.append(model.coef_, model.intercept_)),
            (matrix, ENTRIES, {"assignment": "chunks:5"}, lambda factors: np.append(factors.left, factors.right)),
            (server, BLOBS, {}, lambda parameters: parameters),
        ]
    ),
]
"""Fit, dataset, options of the shuffler, and the numbers of a model."""


def interrupted(fit, at):
    """A fit that fails for the first time after a number of epochs."""
    failures = [ClusterError("the cluster is gone")]

    def on_epoch(point):
        if point.epoch + 1 == at and failures:
            raise failures.pop()

    return lambda shuffler: fit(shuffler, on_epoch=on_epoch)


@pytest.mark.parametrize(
    ("fit", "url", "options", "numbers"), FITS[:4], ids=lambda value: getattr(value, "__name__", "")
)
def test_an_interrupted_fit_gives_the_same_model_bit_for_bit(clients, tmp_path, fit, url, options, numbers):
    with dshuffle.Shuffler(clients[3], url, **options) as shuffler:
        whole = fit(shuffler)
    again = dshuffle.run_with_retries(
        interrupted(fit, 3), lambda: clients[3], url, checkpoint=tmp_path / "run.json", **options
    )
    # The third epoch was trained on, but its end was not saved. It is trained on again.
    assert np.array_equal(numbers(again.model), numbers(whole.model))
    assert [point.epoch for point in again.points] == list(range(EPOCHS))
    assert [point.error for point in again.points] == [point.error for point in whole.points]
    assert all(np.diff([point.seconds for point in again.points]) > 0)


@pytest.mark.parametrize(("fit", "url", "options", "numbers"), FITS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fit_continues_on_another_number_of_workers(clients, tmp_path, fit, url, options, numbers):
    turn = iter([clients[3], clients[2]])
    seen, saved = [], []

    def train(shuffler):
        seen.append((shuffler.n_workers, shuffler.attached is not None))
        saved.append(shuffler.attached)
        return interrupted(fit, 3)(shuffler) if len(seen) == 1 else fit(shuffler)

    history = dshuffle.run_with_retries(train, lambda: next(turn), url, checkpoint=tmp_path / "run.json", **options)
    assert seen == [(3, False), (2, True)]
    assert len(history.points) == EPOCHS
    assert history.points[:2] == saved[1].points
    assert not np.array_equal(numbers(history.model), numbers(saved[1].model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fit", "url", "options", "numbers"), FITS[:4], ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fit_on_workers_that_join_is_one_that_continues_on_them(clients, tmp_path, fit, url, options, numbers):
    with LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster, Client(cluster) as client:

        def grow(point):
            if point.epoch == 0:
                cluster.scale(3)
                client.wait_for_workers(3)

        with dshuffle.Shuffler(client, url, elastic=True, **options) as shuffler:
            elastic = fit(shuffler, on_epoch=grow)
            counts = [record.n_workers for record in shuffler.records]
    changed = counts.index(3)
    assert counts == [2] * changed + [3] * (EPOCHS - changed)
    turn, train = iter([clients[2], clients[3]]), interrupted(fit, changed + 1)
    resumed = dshuffle.run_with_retries(train, lambda: next(turn), url, checkpoint=tmp_path / "run.json", **options)
    np.testing.assert_array_equal(numbers(elastic.model), numbers(resumed.model))


def test_a_fit_with_one_server_for_all_epochs_needs_the_same_workers(clients):
    with (
        dshuffle.Shuffler(clients[2], BLOBS, elastic=True) as shuffler,
        pytest.raises(InvalidParameter, match="fit_parameter_server needs the same number of workers in all epochs"),
    ):
        server(shuffler)


def test_a_fit_that_had_ended_is_not_trained_further(clients, tmp_path):
    path = tmp_path / "run.json"
    ended = dshuffle.run_with_retries(linear, lambda: clients[2], KEYED, checkpoint=path)
    again = dshuffle.run_with_retries(linear, lambda: clients[2], KEYED, checkpoint=path)
    assert again.points == ended.points
    assert np.array_equal(again.model, ended.model)
    stopping = EarlyStopping(patience=1, least_change=1e9)
    stopped = dshuffle.run_with_retries(
        lambda shuffler: linear(shuffler, early_stopping=stopping), lambda: clients[2], KEYED, checkpoint=path
    )
    assert stopped.stopped_early
    assert len(stopped.points) == EPOCHS


def test_the_model_of_another_trainer_is_refused(clients, tmp_path):
    path = tmp_path / "run.json"
    with dshuffle.Shuffler(clients[2], BLOBS, checkpoint=path) as shuffler:
        synchronous(shuffler)
    with (
        dshuffle.Shuffler.resume(clients[2], BLOBS, path) as shuffler,
        pytest.raises(CheckpointError, match="a model of fit_synchronous_sgd, and fit_parallel_sgd cannot continue"),
    ):
        parallel(shuffler)


def test_a_second_fit_in_a_session_begins_anew(clients):
    with dshuffle.Shuffler(clients[2], KEYED) as shuffler:
        first, second = linear(shuffler), linear(shuffler)
    assert first.points[0].error == pytest.approx(second.points[0].error, rel=0.5)
    assert second.points[0].epoch == 0


def test_a_value_that_cannot_be_pickled_or_read(clients, tmp_path):
    with dshuffle.Shuffler(clients[2], KEYED) as shuffler:
        with pytest.raises(CheckpointError, match="attached to the session cannot be pickled"):
            shuffler.attach(number for number in range(3))
        state = shuffler.state_dict()
    state["attached"] = "bm90IGEgcGlja2xl"
    with (
        dshuffle.Shuffler.resume(clients[2], KEYED, state) as shuffler,
        pytest.raises(CheckpointError, match="attached to the state cannot be read"),
    ):
        _ = shuffler.attached
