import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import types
from dshuffle.planning.exchange_epochs import cache_capacity
from dshuffle.planning.types import group_by


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


@pytest.mark.parametrize(
    ("alpha", "q", "n", "capacity"),
    [  # 0.3 * 10 is 3 exactly, though the float 0.3 is less than that
        *[(None, 10, 3, 4), (0.3, 10, 4, 3), (0.29, 100, 4, 29), (1 / 3, 10, 3, 4), (1 / 49, 98, 49, 2)],
        *[(0.5, 11, 4, 5), (1, 11, 4, 11), (1.0, 1, 1, 1)],
    ],
)
def test_capacity(alpha, q, n, capacity):
    assert cache_capacity(alpha, q, n) == capacity


@pytest.mark.parametrize("alpha", [0.24, 0, -1, 1.01, math.nan, math.inf, "0.5"])
def test_capacity_refuses_fractions_outside_1_n_to_1(alpha):
    with pytest.raises(InvalidParameter, match=r"cache_fraction=.*number in \[1/4, 1\].*own share"):
        cache_capacity(alpha, 10, 4)
