from __future__ import annotations

import numpy as np
import pytest

import dshuffle
from dshuffle.compare import local_cluster
from dshuffle.errors import InvalidParameter
from dshuffle.planning.randomness import permutation
from dshuffle.synthetic import low_rank_entries
from dshuffle.training import Decay, fit_matrix_completion
from dshuffle.training.matrix_completion import FIRST_PRODUCTS, first_factors

SHAPE = {"n_rows": 40, "n_columns": 23}
ENTRIES = {name: array.compute() for name, array in low_rank_entries(**SHAPE, per_row=8, rank=2).items()}


def one_process(partitions_of_epochs, baseline, *, rank, step, mu, seed, permute="every epoch"):
    """P5 and P6 over the same schedule, one entry after the other, on whole factors."""
    expected = baseline.mean + baseline.row_bias[:, np.newaxis] + baseline.column_bias
    rest = ENTRIES["value"] - expected[ENTRIES["row"], ENTRIES["column"]]
    model = first_factors(baseline, rank, FIRST_PRODUCTS * np.sqrt(np.mean(rest**2)), seed)
    left, right = model.left.astype(float), model.right.astype(float)
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
        shuffler, **SHAPE, **settings, epochs=3, regularization=0.5, schedule=Decay(0.9), permute_columns=permute
    )
    partitions = [epoch.partitions for epoch in shuffler.epochs(3)]
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
    ],
)
def test_parameters_out_of_range_are_refused(fake_shuffler, options, message):
    shuffler = fake_shuffler(ENTRIES, n_workers=5, assignment="local", sharding="contiguous")
    with pytest.raises(InvalidParameter, match=message):
        fit_matrix_completion(shuffler, **{**SHAPE, "rank": 2, "epochs": 2, "step": 0.1, **options})


def test_rows_on_several_workers_are_refused(fake_shuffler):
    with pytest.raises(InvalidParameter, match="chunks:ENTRIES"):
        fit_matrix_completion(fake_shuffler(ENTRIES), **SHAPE, rank=2, epochs=1, step=0.1)


def test_values_that_are_not_finite_are_named_by_sample(fake_shuffler):
    value = ENTRIES["value"].copy()
    value[77] = np.inf
    shuffler = fake_shuffler({**ENTRIES, "value": value}, assignment="local", sharding="contiguous")
    with pytest.raises(InvalidParameter, match=r"value\[77\]=inf"):
        fit_matrix_completion(shuffler, **SHAPE, rank=2, epochs=1, step=0.1)


def test_validation_stands_beside_the_test_error_and_rates_are_measured(fake_shuffler):
    shuffler = fake_shuffler(ENTRIES, n_workers=5, assignment="local", sharding="contiguous")
    history = fit_matrix_completion(
        shuffler,
        **SHAPE,
        rank=2,
        epochs=2,
        step=0.05,
        test=tuple(ENTRIES[name] for name in ("row", "column", "value")),
        validate=lambda factors: {"rows": len(factors.left)},
    )
    assert [set(point.validation) for point in history.points] == [{"rows", "test_error", "baseline_error"}] * 2
    assert history.points[0].validation["rows"] == 40
    assert len(history.worker_rates) == 5
    assert min(history.worker_rates) > 0


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
        mean, rows, columns = factors.baseline.mean, factors.baseline.row_bias, factors.baseline.column_bias
        expected = [mean + columns[0], mean + columns[19], mean + rows[0], mean]
        np.testing.assert_allclose(factors.predict(*unseen), expected, rtol=1e-12)
        assert np.abs(factors.predict(row, column) - value).max() < 0.5
    assert history.points[-1].error == pytest.approx(0.1**2 / np.mean(value**2), rel=0.2)
