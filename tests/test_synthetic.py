from __future__ import annotations

import dask
import numpy as np
import pytest
import scipy.fft

from dshuffle.synthetic import (
    BLOCK_ROWS,
    WIDE_BLOCK_ROWS,
    gaussian_blobs,
    keyed_regression,
    keyed_weights,
    rare_keys_regression,
)


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


def test_noise_is_added_to_the_targets_alone():
    (x, y), (same_x, clean) = computed(BLOCK_ROWS + 1000, noise=0.3), computed(BLOCK_ROWS + 1000)
    np.testing.assert_array_equal(x, same_x)
    noise = y - clean
    assert (noise.mean(), noise.std()) == pytest.approx((0, 0.3), abs=0.01)
    assert abs(np.corrcoef(noise, clean)[0, 1]) < 0.03
    assert not np.array_equal(noise[:1000], noise[BLOCK_ROWS:]), "blocks must not repeat each other"


def test_rows_of_a_rare_key_are_neighbours_and_their_mean_is_its_code():
    n, n_keys = WIDE_BLOCK_ROWS + 976, 40
    (data,) = dask.compute(rare_keys_regression(n, n_keys, seed=3))
    x, y = data["x"].astype(float), data["y"]
    assert (data["x"].dtype, y.dtype, x.shape) == (np.float32, np.float32, (n, n_keys))
    codes = scipy.fft.dct(np.eye(n_keys), norm="ortho", axis=0) * np.sqrt(0.9)
    keys = np.repeat(np.arange(n_keys), n // n_keys)
    own = x - codes[keys]
    assert (own**2).sum(axis=1).mean() == pytest.approx(0.1, rel=0.05)
    assert abs(own.mean()) < 0.002
    np.testing.assert_allclose(x @ keyed_weights(n_keys, 0, seed=3), y, atol=1e-6)
    assert not np.allclose(own[: n - WIDE_BLOCK_ROWS], own[WIDE_BLOCK_ROWS:]), "blocks must not repeat each other"
    (noisy,) = dask.compute(rare_keys_regression(n, n_keys, seed=3, noise=0.5))
    np.testing.assert_array_equal(noisy["x"], data["x"])
    assert (noisy["y"] - y).std() == pytest.approx(0.5, rel=0.1)


def test_blobs_are_sorted_balanced_and_as_far_apart_as_asked():
    n = BLOCK_ROWS + 1000
    (data,) = dask.compute(gaussian_blobs(n, n_features=40, n_classes=7, seed=2, separation=5))
    x, y = data["x"], data["y"]
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert (np.diff(y) >= 0).all()
    assert np.ptp(np.bincount(y, minlength=7)) <= 1
    centres = np.stack([x[y == label].mean(axis=0) for label in range(7)])
    assert (x - centres[y]).std() == pytest.approx(1, abs=0.01)
    distances = np.linalg.norm(centres[:, None] - centres, axis=2)[np.triu_indices(7, 1)]
    assert np.sqrt((distances**2).mean()) == pytest.approx(5, rel=0.15)
    assert (np.diff(x[:, 0]) != 0).all(), "blocks must not repeat each other"


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: gaussian_blobs(50, seed=seed),
        lambda seed: rare_keys_regression(50, 10, seed=seed),
    ],
)
def test_other_datasets_depend_on_the_seed_alone(make):
    first, again, other = dask.compute(make(3), make(3), make(4))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["x"], other["x"])
