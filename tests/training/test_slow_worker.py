"""One of four workers of a real cluster is four times slower than the rest: every trainer finishes, and says so."""

from __future__ import annotations

import logging
import re
import time

import numpy as np
import pytest
from distributed import get_worker
from sklearn.linear_model import SGDRegressor

import dshuffle
from dshuffle.training import (
    Network,
    SoftmaxRegression,
    fit_linear_regression,
    fit_matrix_completion,
    fit_parallel_sgd,
    fit_parameter_server,
    fit_synchronous_sgd,
    linear_regression,
    matrix_completion,
)

pytestmark = pytest.mark.slow

N_WORKERS, SLOW_RANK, EPOCHS = 4, 2, 3
N_SAMPLES = 80
ROW_SECONDS = 0.01
"""What a sample takes: far more than everything else in an epoch, so that workers differ by it alone."""


@pytest.fixture(scope="module")
def client(cluster_of):
    with cluster_of(N_WORKERS, processes=False) as client:
        yield client


def work_on(rows: int) -> None:
    time.sleep(rows * ROW_SECONDS * (4 if get_worker().name == SLOW_RANK else 1))


class SlowRegressor(SGDRegressor):
    def partial_fit(self, X, y, sample_weight=None):
        work_on(len(X))
        return super().partial_fit(X, y, sample_weight)


class SlowNetwork(Network):
    __slots__ = ()

    def gradient(self, parameters, rows, labels, starts=(0,)):
        work_on(len(rows))
        return super().gradient(parameters, rows, labels, starts)


class SlowSoftmax(SoftmaxRegression):
    __slots__ = ()

    def gradient(self, parameters, rows, targets):
        work_on(len(rows))
        return super().gradient(parameters, rows, targets)


def regression(shuffler, monkeypatch):
    fast = linear_regression.local_pass

    def slow(partition, *args, **kwargs):
        work_on(len(partition))
        return fast(partition, *args, **kwargs)

    monkeypatch.setattr(linear_regression, "local_pass", slow)
    return fit_linear_regression(shuffler, epochs=EPOCHS, step=0.1)


def completion(shuffler, monkeypatch):
    fast = matrix_completion.update_factors

    def slow(left, right, row, *args):
        work_on(len(row))
        return fast(left, right, row, *args)

    monkeypatch.setattr(matrix_completion, "update_factors", slow)
    return fit_matrix_completion(shuffler, n_rows=8, n_columns=10, rank=2, epochs=EPOCHS, step=0.01)


def estimator(shuffler, monkeypatch):
    return fit_parallel_sgd(shuffler, SlowRegressor(), epochs=EPOCHS)


def synchronous(shuffler, monkeypatch):
    return fit_synchronous_sgd(shuffler, SlowNetwork((2, 3)), epochs=EPOCHS, batch_size=10, step=0.1)


def servers(shuffler, monkeypatch):
    return fit_parameter_server(shuffler, SlowSoftmax(3), epochs=EPOCHS, batch_size=20, step=0.1)


REGRESSION = {"x": np.ones((N_SAMPLES, 2)), "y": np.ones(N_SAMPLES)}
CLASSES = {"x": np.ones((N_SAMPLES, 2)), "y": np.arange(N_SAMPLES) % 3}
ENTRIES = {
    "row": np.arange(N_SAMPLES, dtype=np.int32) // 10,
    "column": np.arange(N_SAMPLES, dtype=np.int32) % 10,
    "value": np.ones(N_SAMPLES, dtype=np.float32),
}


@pytest.mark.parametrize(
    ("arrays", "fit"),
    [
        (REGRESSION, regression),
        (REGRESSION, estimator),
        (ENTRIES, completion),
        (CLASSES, synchronous),
        (CLASSES, servers),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_worker_that_is_four_times_slower_is_waited_for_and_named(client, monkeypatch, caplog, arrays, fit):
    dataset = dshuffle.create_dataset("memory://slow-worker", arrays, overwrite=True)
    options = {"assignment": "local", "sharding": "contiguous"}  # two rows of the matrix each
    with dshuffle.Shuffler(client, dataset, **options) as shuffler, caplog.at_level(logging.WARNING, "dshuffle"):
        history = fit(shuffler, monkeypatch)
    assert len(history.points) == EPOCHS
    times = [float(one) for one in re.findall(rf"worker {SLOW_RANK} trained (\S+) times slower", caplog.text)]
    assert len(times) == 1
    assert 2.2 < times[0] < 6, "4, on a machine that does nothing else"
    assert caplog.text.count("times slower") == 1, "nobody else is"
