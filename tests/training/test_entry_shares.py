"""Whole rows of a matrix for every worker, and equal shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.training import split_entries


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


def test_equal_rows_lose_no_more_than_is_held_out():
    ranks = split_entries(np.repeat(np.arange(40), 10), 4, held_out=0.1)
    assert np.bincount(ranks + 1).tolist() == [40, 90, 90, 90, 90]
    held = [split_entries(np.repeat(np.arange(40), 10), 4, seed=seed) < 0 for seed in (0, 1)]
    assert not np.array_equal(*held)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ([0, 0, 1], {"n_workers": 3}, "n_workers=3 is not allowed; it must be at most 2, the number of rows"),
        ([0, 0, 1], {"n_workers": 0}, "n_workers=0"),
        ([0.0, 1.0], {"n_workers": 1}, "row is not allowed: it is 1-D, float64"),
        ([[0], [1]], {"n_workers": 1}, "row is not allowed: it is 2-D, int64"),
        ([0, 1], {"n_workers": 1, "held_out": 1.5}, "held_out=1.5"),
        ([0, 1], {"n_workers": 2, "held_out": 0.5}, "held_out=0.5 is not allowed; it must be small enough"),
    ],
)
def test_what_cannot_be_split_is_refused(row, options, message):
    with pytest.raises(InvalidParameter, match=message):
        split_entries(np.array(row), **options)
