from __future__ import annotations

import re

import numpy as np
import pytest

import dshuffle
from dshuffle.compare import stable_step
from dshuffle.compare.pairs import sample_ids
from dshuffle.errors import InvalidParameter

URL = "memory://steps"


@pytest.mark.parametrize("width", [3, pytest.param(900, marks=pytest.mark.slow)])
def test_at_most_twice_the_step_keeps_the_mean_squared_error_from_growing(width):
    """The error after a step on a random row is computed exactly, in the direction in which it grows fastest."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((900, width)) * rng.lognormal(0, 1, (900, 1))  # of very different norms
    dataset = dshuffle.create_dataset(URL, {"x": rows, "y": rows[:, 0]}, overwrite=True)
    step = stable_step(dataset)
    norms = (rows**2).sum(axis=1)

    def growth(step):
        # E|(1 - step x x') v|² - |v|² = -v' (2 step C - step² M) v; the largest eigenvalue is the fastest growth.
        weighted = (rows * (step**2 * norms - 2 * step)[:, np.newaxis]).T @ rows / len(rows)
        return np.linalg.eigvalsh(weighted)[-1]

    assert growth(1.99 * step) < 1e-12 < growth(2.01 * step)


@pytest.mark.parametrize("batch_size", [4, 32])
def test_the_step_of_a_batch_keeps_its_mean_squared_error_from_growing(batch_size):
    """In no direction with the step, and in some direction with four times as large a one."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((500, 6)) * rng.lognormal(0, 1, (500, 1))
    dataset = dshuffle.create_dataset(URL, {"x": rows, "y": rows[:, 0]}, overwrite=True)
    step = stable_step(dataset, batch_size=batch_size)
    second = rows.T @ rows / len(rows)
    fourth = (rows.T * (rows**2).sum(axis=1)) @ rows / len(rows)
    of_batch = fourth / batch_size + (1 - 1 / batch_size) * second @ second

    def growth(step):
        return np.linalg.eigvalsh(step**2 * of_batch - 2 * step * second)[-1]

    assert growth(step) < 1e-12 < growth(4 * step)
    assert stable_step(dataset) < step < batch_size * stable_step(dataset)


def test_rows_that_no_step_suits_are_refused(tmp_path):
    x = np.full((3000, 4), 5, np.float32)
    infinite = np.where(np.arange(3000)[:, None] == 0, np.inf, x)
    arrays = {"x": x, "y": x[:, 0], "zero": 0 * x, "infinite": infinite.astype(np.float32)}
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", arrays)
    assert stable_step(dataset) == pytest.approx(1 / 100)
    for name, words in (
        ("zero", "values that are not all zero"),
        ("infinite", r"finite values \(sample 0 is not finite"),
    ):
        with pytest.raises(InvalidParameter, match=rf"features='{name}'.*{words}"):
            stable_step(dataset, features=name)
    with pytest.raises(InvalidParameter, match="target='x'"):
        stable_step(dataset, target="x")


@pytest.mark.parametrize("scale", [1e160, 1e-170, 1e300, 5e-324])
def test_features_whose_squares_no_float_holds_are_refused(scale):
    x = scale * np.where(np.arange(40).reshape(20, 2) % 3, 1.0, -1.0)
    dataset = dshuffle.create_dataset(URL, {"x": x, "y": np.ones(20)}, overwrite=True)
    with pytest.raises(InvalidParameter, match=re.escape(f"The largest one is {scale:.3g}. Scale the features")):
        stable_step(dataset)


def test_rare_large_rows_are_not_missed():
    """A row in ten thousand decides the step."""
    x = np.ones((50_000, 2))
    x[:, 1] = np.random.default_rng(0).standard_normal(50_000)
    x[7::10_000, 1] = 300
    dataset = dshuffle.create_dataset(URL, {"x": x, "y": x[:, 0]}, overwrite=True)
    norms = (x**2).sum(axis=1)
    # The generalised eigenvalues of two 2 x 2 matrices.
    ratios = np.linalg.eigvals(np.linalg.solve(x.T @ x, (x * norms[:, np.newaxis]).T @ x))
    assert 1 / stable_step(dataset) == pytest.approx(ratios.max(), rel=1e-6)


def test_of_a_larger_dataset_rows_at_many_places_are_read():
    rows = np.random.default_rng(0).standard_normal((30_000, 400)).astype(np.float32)
    dataset = dshuffle.create_dataset(URL, {"x": rows, "y": rows[:, 0]}, chunk_rows=1000, overwrite=True)
    ids = sample_ids(dataset, 400)
    assert len(ids) == len(set(ids)) == 1000
    assert np.diff(ids).max() <= 31
    narrow = sample_ids(dataset, 100)
    assert 18_000 <= len(narrow) <= 20_000
    assert (narrow[0], narrow[-1]) == (0, 29_999)
