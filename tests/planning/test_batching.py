"""Batches of equal number on every worker."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning.batching import MODES, Batching


@given(shares=st.lists(st.integers(1, 40), min_size=1, max_size=5), batch_size=st.integers(1, 45))
def test_every_worker_takes_equally_many(shares, batch_size):
    smallest, largest = min(shares), max(shares)
    for mode in MODES:
        if batch_size > smallest or (mode == "uneven" and -(-largest // batch_size) > smallest):
            with pytest.raises(InvalidParameter, match=f"batch_size={batch_size}"):
                Batching(smallest, smallest, largest, batch_size, mode)
            continue
        counts = set()
        for n_own in shares:
            batching = Batching(n_own, smallest, largest, batch_size, mode)
            batches = [batching.positions(batch) for batch in range(len(batching))]
            counts.add(len(batches))
            sizes = {len(batch) for batch in batches}
            seen = np.bincount(np.concatenate(batches), minlength=n_own)
            assert len(seen) == n_own
            match mode:
                case "drop":
                    assert sizes == {batch_size}
                    assert seen.max() == 1
                    assert smallest - seen.sum() < batch_size
                case "pad":
                    assert sizes == {batch_size}
                    assert seen.min() >= 1
                    assert seen.max() - seen.min() <= 1
                case "uneven":
                    assert max(sizes) <= batch_size
                    assert max(sizes) - min(sizes) <= 1
                    assert min(sizes) >= 1
                    assert (seen == 1).all()
        assert len(counts) == 1


@given(shares=st.lists(st.integers(1, 400), min_size=2, max_size=5), data=st.data())
def test_batches_are_in_proportion_to_unequal_shares(shares, data):
    smallest, largest = min(shares), max(shares)
    batch_size = data.draw(st.integers(-(-largest // smallest), largest))
    counts = set()
    for n_own in shares:
        batching = Batching(n_own, smallest, largest, batch_size, "uneven", unequal=True)
        batches = [batching.positions(batch) for batch in range(len(batching))]
        np.testing.assert_array_equal(np.concatenate(batches), np.arange(n_own))
        counts.add(len(batches))
        for batch in batches:
            assert abs(len(batch) - n_own / len(batches)) < 1
            assert 1 <= len(batch) <= batch_size
    assert counts == {-(-largest // batch_size)}
    for mode in ("drop", "pad"):
        with pytest.raises(InvalidParameter, match=rf"mode='{mode}' is not allowed; it must be 'uneven' with unequal"):
            Batching(smallest, smallest, largest, 1, mode, unequal=True)
    with pytest.raises(InvalidParameter, match=rf"batch_size={largest + 1} .*\[1, {largest}\].*the largest share"):
        Batching(smallest, smallest, largest, largest + 1, "uneven", unequal=True)


@pytest.mark.parametrize("least", [1, 2])
@given(shares=st.lists(st.integers(2, 400), min_size=2, max_size=5), data=st.data())
def test_a_small_share_has_as_many_batches_as_the_others(least, shares, data):
    """Measured shares change in the middle of training, so their batches become larger in place of an error."""
    smallest, largest = min(shares), max(shares)
    batch_size = data.draw(st.integers(1, -(-largest // smallest)))
    for n_own in shares:
        batching = Batching(n_own, smallest, largest, batch_size, "uneven", unequal=True, least=least)
        assert len(batching) == min(smallest // least, -(-largest // batch_size))
        batches = [batching.positions(batch) for batch in range(len(batching))]
        np.testing.assert_array_equal(np.concatenate(batches), np.arange(n_own))
        assert all(len(batch) >= least and abs(len(batch) - n_own / len(batches)) < 1 for batch in batches)


def test_a_share_that_is_too_small_for_a_batch():
    with pytest.raises(InvalidParameter, match=r"the smallest share has 1 samples, and a batch needs 2"):
        Batching(1, 1, 20, 4, "uneven", unequal=True, least=2)


@pytest.mark.parametrize(
    ("batch_size", "mode", "message"),
    [
        (11, "drop", r"batch_size=11 is not allowed; it must be in \[1, 10\].*smaller batches"),
        (0, "pad", "batch_size=0 is not allowed; it must be an integer >= 1"),
        (1, "uneven", "batch_size=1 is not allowed; it must be at least 2 with mode='uneven'"),
        (3, "round", r"mode='round' is not allowed; it must be one of \['drop', 'pad', 'uneven'\]"),
    ],
)
def test_bad_input(batch_size, mode, message):
    with pytest.raises(InvalidParameter, match=message):
        Batching(10, 10, 11, batch_size, mode)
