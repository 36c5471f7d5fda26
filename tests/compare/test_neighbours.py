from __future__ import annotations

import numpy as np
import pytest

import dshuffle
from dshuffle.compare.neighbours import looks_random
from dshuffle.synthetic import gaussian_blobs, keyed_regression, rare_keys_regression

URL = "memory://neighbours"


def dataset(arrays):
    return dshuffle.create_dataset(URL, arrays, overwrite=True)


@pytest.mark.parametrize(
    "arrays",
    [
        keyed_regression(3000),
        rare_keys_regression(1500, 300),
        gaussian_blobs(1000, separation=0.1),  # its labels alone are in order
        {"text": np.full(1000, "a"), "step": np.arange(1000)},
        {"image": np.linspace(0, 1, 1000)[:, None, None] + np.random.default_rng(0).random((1000, 3, 4))},
    ],
)
def test_sorted_data_do_not_look_random_and_their_copy_does(arrays):
    data = dataset(arrays)
    assert not looks_random(data)
    copy = dshuffle.shuffle_dataset(data, URL + "-copy", seed=3, overwrite=True)
    assert looks_random(copy)


@pytest.mark.slow
def test_independent_rows_are_hardly_ever_called_sorted():
    rng = np.random.default_rng(1)
    called_random = 0
    for _ in range(100):
        # Columns that are nearly always 0, whose correlations have heavy tails.
        rare = (rng.random((1200, 20)) < 0.01).astype("f4")
        called_random += looks_random(
            dataset({"rare": rare, "y": rng.standard_cauchy(1200), "label": rng.permutation(1200) % 7})
        )
    assert called_random >= 98


@pytest.mark.parametrize("arrays", [{"y": np.zeros(1)}, {"y": np.arange(199)}, {"text": np.full(500, "a")}])
def test_too_few_rows_or_no_numbers_show_nothing(arrays):
    assert not looks_random(dataset(arrays))
