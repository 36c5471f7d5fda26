from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import SGDRegressor

from dshuffle.errors import InvalidParameter
from dshuffle.training import fit_linear_regression
from dshuffle.training.linear_regression import local_pass, residual, visit


def random_regression(n_samples, n_features, dtype, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n_samples, n_features)).astype(dtype)
    targets = (rows @ rng.standard_normal(n_features) + rng.standard_normal(n_samples)).astype(dtype)
    return rows, targets


def one_pass(weights, rows, targets, step):
    visit(weights, rows, 0, targets[:, np.newaxis], 0, np.arange(len(rows)), weights, -step, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("step", [0.003, 0.03])
def test_one_pass_is_that_of_scikit_learn(dtype, step):
    rows, targets = random_regression(500, 7, dtype)
    start = np.linspace(-1, 1, 7)
    # scikit-learn's squared_error is half the square, so that its gradient is that of equation 4.
    oracle = SGDRegressor(
        loss="squared_error",
        penalty=None,
        learning_rate="constant",
        eta0=step,
        shuffle=False,
        fit_intercept=False,
        max_iter=1,
        tol=None,
    ).fit(rows.astype(np.float64), targets.astype(np.float64), coef_init=start.copy())
    weights = start.copy()
    one_pass(weights, rows, targets, step)
    np.testing.assert_allclose(weights, oracle.coef_, rtol=1e-9)
    assert not np.allclose(weights, start, rtol=1e-2)


@pytest.mark.parametrize("beside", [None, "u1", "u2", "f8"])
def test_one_worker_is_one_plain_pass_however_its_rows_are_aligned(fake_shuffler, beside):
    rows, targets = random_regression(300, 3, np.float32)
    arrays = {"x": rows, "y": targets} | ({} if beside is None else {"more": np.zeros(300, beside)})
    session = fake_shuffler(arrays, n_workers=1)
    history = fit_linear_regression(session, epochs=1, step=0.01)
    weights = np.zeros(3)
    rows, targets = rows.astype(float), targets.astype(float)
    [epoch] = session.epochs(1)
    for row in epoch.orders[0]:
        weights -= 0.01 * rows[row] * (rows[row] @ weights - targets[row])
    np.testing.assert_allclose(history.model, weights, rtol=1e-9)
    error = np.linalg.norm(rows @ weights - targets) / np.linalg.norm(targets)
    assert history.points[0].error == pytest.approx(error, rel=1e-9)


def test_weights_are_averaged_and_the_error_is_that_of_the_average(fake_shuffler):
    rows, targets = random_regression(301, 4, np.float32)
    shuffler = fake_shuffler({"a": rows, "b": targets}, n_workers=3)
    seen = []
    history = fit_linear_regression(shuffler, epochs=2, step=0.01, features="a", target="b", on_epoch=seen.append)
    common = np.zeros(4)
    for epoch, point in zip(shuffler.epochs(2), history.points, strict=True):
        local = [common.copy() for _ in range(3)]
        for weights, partition in zip(local, epoch.partitions(), strict=True):
            one_pass(weights, partition["a"], partition["b"], 0.01)
        common = np.average(local, axis=0, weights=[len(partition) for partition in epoch.partitions()])
        error = np.linalg.norm(rows @ common - targets) / np.linalg.norm(targets)
        assert point.error == pytest.approx(error, rel=1e-5)
    np.testing.assert_allclose(history.model, common, rtol=1e-12)
    assert seen == list(history.points)
    assert [point.epoch for point in seen] == [0, 1]
    assert 0 < seen[0].seconds <= seen[1].seconds


@pytest.mark.parametrize(("step", "value"), [(3.0, 0.0), (1e200, 0.0), (0.01, np.nan), (0.01, np.inf)])
def test_a_step_that_diverges_says_so(fake_shuffler, step, value):
    rows, targets = random_regression(2000, 10, np.float64)
    rows[17, 1] += value
    with pytest.raises(InvalidParameter, match=r"^step=.*diverged in epoch 0. Take a smaller step.*NaN and infinite"):
        fit_linear_regression(fake_shuffler({"x": rows, "y": targets}), epochs=2, step=step)


@pytest.mark.parametrize(
    ("name", "value"), [("epochs", 0), ("step", 0.0), ("step", -1.0), ("step", float("nan")), ("epochs", 1.5)]
)
def test_parameters_out_of_range_are_refused(fake_shuffler, name, value):
    shuffler = fake_shuffler({"x": np.ones((9, 2)), "y": np.ones(9)})
    with pytest.raises(InvalidParameter, match=f"^{name}={value!r}"):
        fit_linear_regression(shuffler, **{"epochs": 1, "step": 0.01, name: value})


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((8, 2))}, "target='y' is not allowed; it must be one of the dataset's arrays: x"),
        ({"y": np.ones(8)}, "features='x' is not allowed"),
        ({"x": np.ones(8), "y": np.ones(8)}, "features='x'.*2-D array.*it is 1-D, float64"),
        ({"x": np.ones((8, 2), int), "y": np.ones(8)}, "features='x'.*it is 2-D, int64"),
        ({"x": np.ones((8, 2)), "y": np.ones((8, 1))}, "target='y'.*1-D array.*it is 2-D"),
        ({"x": np.ones((8, 2)), "y": np.zeros(8)}, "target='y'.*at least one non-zero value"),
    ],
)
def test_arrays_that_are_no_regression_are_refused(fake_shuffler, arrays, message):
    with pytest.raises(InvalidParameter, match=message):
        fit_linear_regression(fake_shuffler(arrays), epochs=1, step=0.1)


@pytest.mark.parametrize("size", [2, 4])
def test_weights_of_another_size_never_reach_a_kernel(fake_shuffler, size):
    rows, targets = random_regression(100, 3, np.float64)
    [epoch] = fake_shuffler({"x": rows, "y": targets}, n_workers=1).epochs(1)
    for task in (
        lambda partition: local_pass(partition, np.zeros(size), 0.1),
        lambda p: residual(p, np.zeros(size), "x", "y"),
    ):
        with pytest.raises(InvalidParameter, match=rf"weights.shape=\({size},\).*\(3,\)"):
            epoch.map(task)[0].result()


@pytest.mark.parametrize("dtype", ["i8", "i4", "u1", "?"])
def test_integer_targets_are_numbers(fake_shuffler, dtype):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((200, 3)), rng.integers(0, 2, 200).astype(dtype)
    numbers, floats = (
        fit_linear_regression(fake_shuffler({"x": x, "y": target}), epochs=3, step=0.05)
        for target in (y, y.astype("f8"))
    )
    np.testing.assert_array_equal(numbers.model, floats.model)
    assert [point.error for point in numbers.points] == [point.error for point in floats.points]
