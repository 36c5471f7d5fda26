from __future__ import annotations

import dask
import numpy as np
import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.training import keyed_regression, keyed_weights
from dshuffle.training.datasets import BLOCK_ROWS


def computed(*args, **kwargs):
    (arrays,) = dask.compute(keyed_regression(*args, **kwargs))
    return arrays["x"], arrays["y"]


def test_rows_are_sorted_by_a_balanced_key_and_have_unit_norm():
    x, y = computed(BLOCK_ROWS + 1000, n_keys=7, n_dense=5)
    keys = x[:, :7].argmax(axis=1)
    assert ((x[:, :7] > 0).sum(axis=1) == 1).all()
    assert (np.diff(keys) >= 0).all()
    assert np.ptp(np.bincount(keys)) <= 1
    assert (x.astype(float) ** 2).sum(axis=1).mean() == pytest.approx(1, abs=0.02)
    np.testing.assert_allclose(x @ keyed_weights(7, 5), y, atol=1e-6)


def test_the_data_depend_on_the_seed_alone():
    x, y = computed(BLOCK_ROWS + 10, seed=3)
    again_x, again_y = computed(BLOCK_ROWS + 10, seed=3)
    other_x, _ = computed(BLOCK_ROWS + 10, seed=4)
    assert np.array_equal(x, again_x)
    assert np.array_equal(y, again_y)
    assert not np.array_equal(x, other_x)
    assert not np.array_equal(x[:10, 60:], x[BLOCK_ROWS:, 60:]), "blocks must not repeat each other"


def test_unsorted_rows_have_their_keys_in_no_order():
    x, _ = computed(600, n_keys=6, n_dense=0, sort=False)
    keys = x.argmax(axis=1)
    assert (np.diff(keys) < 0).sum() > 100
    assert set(keys) == set(range(6))


@pytest.mark.parametrize(("name", "value"), [("n_samples", 0), ("n_keys", 0), ("n_dense", -1)])
def test_counts_that_make_no_sense_are_refused(name, value):
    with pytest.raises(InvalidParameter, match=f"^{name}={value}"):
        keyed_regression(**{"n_samples": 10, name: value})
