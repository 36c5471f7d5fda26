from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.compare import local_cluster
from dshuffle.errors import InvalidParameter
from dshuffle.planning.randomness import permutation
from dshuffle.training import Decay, fit_matrix_completion, split_entries
from dshuffle.training.matrix_completion import FIRST_PRODUCTS, first_factors, shrunk_means

from ..low_rank import low_rank_entries

SHAPE = {"n_rows": 40, "n_columns": 23}
ENTRIES = {name: array.compute() for name, array in low_rank_entries(**SHAPE, per_row=8, rank=2).items()}


def one_process(partitions_of_epochs, baseline, *, rank, step, mu, seed, permute="every epoch"):
    """P5 and P6 over the same schedule, one entry after the other, on whole factors."""
    expected = baseline.mean + baseline.row_bias[:, np.newaxis] + baseline.column_bias
    rest = ENTRIES["value"] - expected[ENTRIES["row"], ENTRIES["column"]]
    scale = FIRST_PRODUCTS * np.sqrt(np.mean(rest**2))
    rng = np.random.default_rng(seed)
    left, right = (
        rng.standard_normal((size, rank), np.float32).astype(float) * (scale * rank**-0.5) ** 0.5
        for size in SHAPE.values()
    )
    of_row, of_column = (np.bincount(ENTRIES[name]) for name in ("row", "column"))
    for number, partitions in enumerate(partitions_of_epochs):
        n = len(partitions)
        size = step * 0.9**number
        columns = permutation(SHAPE["n_columns"], "columns", seed, number if permute == "every epoch" else 0)
        blocks = np.array_split(np.arange(SHAPE["n_columns"]) if permute == "never" else columns, n)
        for turn in range(n):
            for k, partition in enumerate(partitions):
                for i, j, value in zip(partition["row"], partition["column"], partition["value"], strict=True):
                    if j in blocks[(k + turn) % n]:
                        error = expected[i, j] + left[i] @ right[j] - value
                        left[i], right[j] = (
                            (1 - mu * size / of_row[i]) * left[i] - size * error * right[j],
                            (1 - mu * size / of_column[j]) * right[j] - size * error * left[i],
                        )
    return left, right


@pytest.mark.parametrize("permute", ["every epoch", "once", "never"])
def test_it_is_what_one_process_computes(fake_shuffler, permute):
    shuffler = fake_shuffler(ENTRIES, n_workers=5, assignment="local", sharding="contiguous")
    settings = {"rank": 3, "step": 0.05, "seed": 4}
    history = fit_matrix_completion(
        shuffler, **SHAPE, **settings, epochs=3, regularization=0.5, schedule=Decay(0.9), permute_columns=permute,
        test=tuple(ENTRIES[name] for name in ("row", "column", "value")),
        validate=lambda model: {"rows": len(model.left)},
    )  # fmt: skip
    assert [set(point.validation) for point in history.points] == [{"rows", "test_error", "baseline_error"}] * 3
    assert history.points[0].validation["rows"] == 40
    partitions = [epoch.partitions() for epoch in shuffler.epochs(3)]
    left, right = one_process(partitions, history.model.baseline, **settings, mu=0.5, permute=permute)
    np.testing.assert_allclose(history.model.left, left, atol=1e-5)
    np.testing.assert_allclose(history.model.right, right, atol=1e-5)


@pytest.mark.slow
def test_rows_move_between_workers_and_unseen_entries_are_found(tmp_path):
    made = low_rank_entries(200, 50, per_row=25, rank=2, seed=1)
    entries = {name: array.compute() for name, array in made.items()}
    # One entry of each row, at another place in each: columns ascend, and the last one would never be trained.
    unseen = np.arange(len(entries["row"])) % 25 == entries["row"] * 7 % 25
    known = {name: array[~unseen] for name, array in entries.items()}
    dataset = dshuffle.create_dataset(str(tmp_path / "m.zarr"), known, chunk_rows=240)
    with (
        local_cluster(3, processes=False) as client,
        dshuffle.Shuffler(client, dataset, assignment="chunks:24") as shuffler,
    ):
        assert shuffler.n_workers == 3
        history = fit_matrix_completion(
            shuffler,
            n_rows=200,
            n_columns=50,
            rank=2,
            epochs=15,
            step=0.1,
            test=tuple(entries[name][unseen] for name in ("row", "column", "value")),
        )
    errors = [point.validation["test_error"] for point in history.points]
    assert errors[0] > 0.3
    assert errors[-1] < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_rows": 39}, r"row\[3..\]=39 is not allowed; it must be in \[0, 39\)"),
        ({"n_columns": 5}, r"column\["),
        ({"rank": 0}, "rank=0"),
        ({"step": 0}, "step=0"),
        ({"step": 1e6}, "step=.*diverged in epoch 0"),
        ({"regularization": -1}, "regularization=-1"),
        ({"permute_columns": "twice"}, "permute_columns='twice'"),
        ({"assignment": "global"}, "chunks:ENTRIES"),
        ({"value": np.where(np.arange(320) == 77, np.inf, ENTRIES["value"])}, r"value\[77\]=inf"),
    ],
)
def test_what_cannot_be_completed_is_refused(fake_shuffler, options, message):
    entries = {**ENTRIES, "value": options.get("value", ENTRIES["value"])}
    shuffler = fake_shuffler(entries, 5, options.get("assignment", "local"), "contiguous")
    options = {name: value for name, value in options.items() if name not in ("value", "assignment")}
    with pytest.raises(InvalidParameter, match=message):
        fit_matrix_completion(shuffler, **{**SHAPE, "rank": 2, "epochs": 2, "step": 0.1, **options})


def test_rows_and_columns_without_entries_are_predicted_by_mean_and_biases(fake_shuffler):
    """And those with few entries by little more, because the factors start small."""
    rng = np.random.default_rng(0)
    row, column = np.repeat(np.arange(30), 12), np.concatenate([rng.permutation(20)[:12] for _ in range(30)])
    value = 3 + np.linspace(-1, 1, 30)[row] + np.linspace(1, -1, 20)[column] + 0.1 * rng.standard_normal(360)
    arrays = {"row": row, "column": column, "value": value}
    shuffler = fake_shuffler(arrays, n_workers=3, assignment="local", sharding="contiguous")
    seen = []
    history = fit_matrix_completion(
        shuffler,
        n_rows=33,
        n_columns=24,
        rank=2,
        epochs=2,
        step=0.01,
        validate=lambda factors: seen.append(factors) or {},
    )
    for factors in seen:
        assert not factors.left[30:].any()
        assert not factors.right[20:].any()
        unseen = np.array([30, 32, 0, 31]), np.array([0, 19, 22, 23])
        mean, rows, columns = factors.mean, factors.row_bias, factors.column_bias
        expected = [mean + columns[0], mean + columns[19], mean + rows[0], mean]
        np.testing.assert_allclose(factors.predict(*unseen), expected, rtol=1e-12)
        assert np.abs(factors.predict(row, column) - value).max() < 0.5
    assert history.points[-1].error == pytest.approx(0.1**2 / np.mean(value**2), rel=0.2)


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
        factors = first_factors(next(shuffler.epochs(1)), {"row": 52, "column": 41}, rank=400, seed=0)
        baseline = factors.baseline
        np.testing.assert_allclose(baseline.predict(row, column), fitted, atol=0.02)
        products = factors.predict(row, column) - baseline.predict(row, column)
        spread = FIRST_PRODUCTS * np.std(value - baseline.predict(row, column))
        assert np.std(products) == pytest.approx(spread, rel=0.2)
        assert baseline.mean == pytest.approx(value.mean())
        assert baseline.left.shape == (52, 0)
        assert not baseline.row_bias[50:].any()
        assert not baseline.column_bias[40:].any()
        found.append(baseline)
    np.testing.assert_allclose(found[0].row_bias, found[1].row_bias, rtol=1e-9)


@given(
    row=st.lists(st.integers(0, 12), min_size=12, max_size=120),
    n_workers=st.integers(1, 4),
    held_out=st.sampled_from([0, 0.1, 0.5]),
    seed=st.integers(0, 9),
)
def test_rows_stay_whole_and_shares_are_equal(row, n_workers, held_out, seed):
    row = np.array([*row, *range(4), *range(4)])
    ranks = split_entries(row, n_workers, held_out=held_out, seed=seed)
    shares = np.bincount(ranks[ranks >= 0], minlength=n_workers)
    assert len(set(shares)) == 1
    for number in np.unique(row):
        assert len(set(ranks[row == number]) - {-1}) <= 1
    # The loads of the greedy division differ by at most the largest row.
    largest = np.bincount(row).max()
    assert len(row) - shares.sum() <= held_out * len(row) + n_workers * (largest + 1)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ([0, 0, 1], {"n_workers": 3}, "n_workers=3 is not allowed; it must be at most 2, the number of rows"),
        ([0, 0, 1], {"n_workers": 0}, "n_workers=0"),
        ([0.0, 1.0], {"n_workers": 1}, "row.dtype='float64' is not allowed; it must be a dtype of integers"),
        ([[0], [1]], {"n_workers": 1}, r"row.shape=\(2, 1\) is not allowed; it must be one-dimensional"),
        ([0, 1], {"n_workers": 1, "held_out": 1.5}, "held_out=1.5"),
        ([0, 1], {"n_workers": 2, "held_out": 0.5}, "held_out=0.5 is not allowed; it must be small enough"),
    ],
)
def test_what_cannot_be_split_is_refused(row, options, message):
    with pytest.raises(InvalidParameter, match=message):
        split_entries(np.array(row), **options)


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


@pytest.mark.parametrize(
    ("counts", "sums", "squares"),
    [
        ([1.0, 1.0], [5.0, -5.0], 50.0),  # one value each: nothing tells a bias from noise
        ([0.0, 2.0], [0.0, 0.0], 0.0),
    ],
)
def test_without_evidence_there_is_no_bias(counts, sums, squares):
    assert shrunk_means(np.array(counts), np.array(sums), squares).tolist() == [0, 0]


def test_equal_rows_lose_no_more_than_is_held_out():
    ranks = split_entries(np.repeat(np.arange(40), 10), 4, held_out=0.1)
    assert np.bincount(ranks + 1).tolist() == [40, 90, 90, 90, 90]
    held = [split_entries(np.repeat(np.arange(40), 10), 4, seed=seed) < 0 for seed in (0, 1)]
    assert not np.array_equal(*held)
