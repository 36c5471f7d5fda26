import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import types
from dshuffle.planning.exchange_epochs import cache_capacity
from dshuffle.planning.types import (
    group_by,
    holders_of,
    holds,
)

from ..draws import missing as missing_of


@pytest.mark.parametrize("with_numba", [False, True])
@given(st.lists(st.integers(0, 6)))
def test_group_by_is_a_stable_sort(with_numba, keys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(types, "worth_a_kernel", lambda n_items: with_numba)
        order, offsets = group_by(np.array(keys, dtype=np.int32), 7)
    assert order.tolist() == sorted(range(len(keys)), key=keys.__getitem__)
    assert offsets.tolist() == [sum(key < k for key in keys) for k in range(8)]


def test_group_by_many_keys_without_numba(monkeypatch):
    monkeypatch.setattr(types, "worth_a_kernel", lambda n_items: False)
    keys = [70_000, 3, 70_000, 0, 3]  # more than 16 bits
    order, offsets = group_by(np.array(keys), 70_001)
    assert order.tolist() == [3, 1, 4, 0, 2]
    assert offsets[[0, 1, 3, 4, 70_000, 70_001]].tolist() == [0, 1, 1, 3, 3, 5]


@st.composite
def held(draw):
    """Sets of samples for each worker, and the masks that say the same."""
    n = draw(st.sampled_from([1, 2, 5, 63, 64, 65, 130]))
    q = draw(st.integers(1, 8))
    sets = [draw(st.sets(st.integers(0, n - 1), max_size=6)) for _ in range(q)]
    masks = np.zeros((q, math.ceil(n / 64)), dtype=np.uint64)
    for sample, mask in enumerate(sum(1 << worker for worker in workers) for workers in sets):
        for word in range(masks.shape[1]):
            masks[sample, word] = mask >> 64 * word & (2**64 - 1)
    return n, sets, masks


@given(held(), st.data())
def test_samples_that_the_destination_lacks_are_missing(case, data):
    n, sets, masks = case
    destinations = [data.draw(st.integers(0, n - 1)) for _ in sets]
    expected = [sample for sample, worker in enumerate(destinations) if worker not in sets[sample]]
    needed = missing_of(masks, destinations, n)
    assert needed.dtype == np.int64
    assert needed.tolist() == expected


@given(st.integers(1, 130), st.data())
def test_holders_of_an_assignment(n, data):
    assignment = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=10))
    holders = holders_of(np.array(assignment, np.int32), n)
    assert holders.shape == (len(assignment), math.ceil(n / 64))
    for sample, owner in enumerate(assignment):
        assert [k for k in range(n) if holds(holders, sample, k)] == [owner]


@pytest.mark.parametrize(
    ("alpha", "q", "n", "capacity"),
    [
        (None, 10, 3, 4),
        (0.3, 10, 4, 3),  # 0.3 * 10 is 3 exactly, though the float 0.3 is less than that
        (0.29, 100, 4, 29),
        (1 / 3, 10, 3, 4),
        (1 / 49, 98, 49, 2),
        (0.5, 11, 4, 5),
        (1, 11, 4, 11),
        (1.0, 1, 1, 1),
    ],
)
def test_capacity(alpha, q, n, capacity):
    assert cache_capacity(alpha, q, n) == capacity


@pytest.mark.parametrize("alpha", [0.24, 0, -1, 1.01, math.nan, math.inf, "0.5"])
def test_capacity_refuses_fractions_outside_1_n_to_1(alpha):
    with pytest.raises(InvalidParameter, match=r"cache_fraction=.*number in \[1/4, 1\].*own share"):
        cache_capacity(alpha, 10, 4)
