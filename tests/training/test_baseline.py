"""Mean and biases of a matrix of entries."""

from __future__ import annotations

import numpy as np
import pytest

from dshuffle.synthetic import low_rank_entries
from dshuffle.training.matrix_completion import fitted_baseline, shrunk_means


def test_means_are_shrunk_by_the_ratio_of_both_variances():
    """Sum / (count + s / t), where s = 2 is the variance of the values in a group and t = 0.5 that of the groups."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 30, 3000)
    groups = np.repeat(np.arange(3000), counts)
    values = np.sqrt(0.5) * rng.standard_normal(3000)[groups] + np.sqrt(2) * rng.standard_normal(len(groups))
    sums = np.bincount(groups, values)
    ratios = sums / shrunk_means(counts.astype(float), sums, float(values @ values)) - counts
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-6)
    assert ratios[0] == pytest.approx(4, rel=0.1)


def test_groups_that_do_not_differ_have_no_bias():
    rng = np.random.default_rng(1)
    for _ in range(20):
        values = rng.standard_normal((200, 10))
        means = shrunk_means(np.full(200, 10.0), values.sum(axis=1), float(np.sum(values**2)))
        assert np.mean(means**2) < 0.1 * np.mean(values.mean(axis=1) ** 2)


@pytest.mark.parametrize(
    ("counts", "sums", "squares"),
    [
        ([1.0, 1.0], [5.0, -5.0], 50.0),  # one value each: nothing tells a bias from noise
        ([0.0, 2.0], [0.0, 0.0], 0.0),
    ],
)
def test_without_evidence_there_is_no_bias(counts, sums, squares):
    assert shrunk_means(np.array(counts), np.array(sums), squares).tolist() == [0, 0]


def test_biases_are_those_of_least_squares_where_there_are_many_entries(fake_shuffler):
    """Additive data with little noise: shrinking changes little, and each worker sees only some rows."""
    rng = np.random.default_rng(2)
    row, column = (index.ravel() for index in np.indices((50, 40)))
    kept = rng.random(2000) < 0.6
    row, column = row[kept], column[kept]
    value = 2 + rng.normal(size=50)[row] + rng.normal(size=40)[column] + 0.01 * rng.normal(size=kept.sum())
    # Unknown: the mean, and all biases but one of rows and one of columns, which the others determine.
    design = np.column_stack([np.eye(50)[row], np.eye(40)[column][:, 1:]])
    fitted = design @ np.linalg.lstsq(design, value, rcond=None)[0]
    found = []
    for n_workers in (1, 4):
        arrays = {"row": row, "column": column, "value": value}
        shuffler = fake_shuffler(arrays, n_workers=n_workers, assignment="local", sharding="contiguous")
        baseline, spread = fitted_baseline(next(shuffler.epochs(1)), 52, 41)
        np.testing.assert_allclose(baseline.predict(row, column), fitted, atol=0.02)
        assert spread == pytest.approx(np.std(value - baseline.predict(row, column)), rel=1e-6)
        assert baseline.mean == pytest.approx(value.mean())
        assert not baseline.row_bias[50:].any()
        assert not baseline.column_bias[40:].any()
        found.append(baseline)
    np.testing.assert_allclose(found[0].row_bias, found[1].row_bias, rtol=1e-9)


def test_a_synthetic_matrix_has_hardly_any_bias(fake_shuffler):
    """So that P5 and P6 see the entries themselves, as in the paper."""
    made = low_rank_entries(200, 200, per_row=40, rank=5)
    arrays = {name: array.compute() for name, array in made.items()}
    shuffler = fake_shuffler(arrays, assignment="local", sharding="contiguous")
    baseline, spread = fitted_baseline(next(shuffler.epochs(1)), 200, 200)
    taken = baseline.predict(arrays["row"], arrays["column"])
    assert np.mean(taken**2) < 0.01 * np.mean(arrays["value"] ** 2)
    assert spread == pytest.approx(np.std(arrays["value"]), rel=0.01)
