from __future__ import annotations

import numpy as np
import pytest

import dshuffle
from dshuffle.compare import falling, stable_step
from dshuffle.errors import InvalidParameter

URL = "memory://steps"


@pytest.mark.parametrize("width", [3, 900])
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


def test_rows_that_no_step_suits_are_refused(tmp_path):
    x = np.full((3000, 4), 5, np.float32)
    infinite = np.where(np.arange(3000)[:, None] == 0, np.inf, x)
    arrays = {"x": x, "y": x[:, 0], "zero": 0 * x, "infinite": infinite.astype(np.float32)}
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", arrays)
    assert stable_step(dataset) == pytest.approx(1 / 100)
    for name in ("zero", "infinite"):
        with pytest.raises(InvalidParameter, match=rf"features='{name}'.*finite values that are not all zero"):
            stable_step(dataset, features=name)
    with pytest.raises(InvalidParameter, match="target='x'"):
        stable_step(dataset, target="x")


def test_one_epoch_has_the_first_step():
    assert falling(1)(0) == 1
