import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import (
    CACHINGS,
    Aligned,
    EpochPlanner,
    Global,
    Local,
    Partial,
    ShufflePlanSpec,
    first_assignment,
    held_by,
    next_assignment,
)

ASSIGNMENTS = [Local(), Partial(0.3), Global(), Aligned(), Aligned(0.3)]


def epochs(q, n, capacity, assignment, count, seed=0):
    """(assignment, holders) of epoch 0 and each after it."""
    policy = CACHINGS["even"](n, capacity, seed)
    ranks = first_assignment("random", q, n, seed=seed)
    holders = policy.first(ranks)
    yield ranks, holders
    for epoch in range(1, count):
        ranks = next_assignment(assignment, ranks, n, seed=seed, epoch=epoch, holders=holders)
        holders = policy.evolve(holders, ranks, epoch)
        yield ranks, holders


def loads(holders, n):
    return np.array([held_by(holders, worker).sum() for worker in range(n)])


def sizes(holders):
    return np.bitwise_count(holders).sum(axis=1)


@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=str)
@given(st.data())
def test_30_epochs_stay_within_the_capacity_and_near_it(assignment, data):
    n = data.draw(st.sampled_from([1, 2, 3, 8, 20, 70]))
    q = data.draw(st.integers(n, 4 * n + 40))
    capacity = data.draw(st.integers(-(-q // n), q))
    if capacity == -(-q // n):
        return
    for ranks, holders in epochs(q, n, capacity, assignment, 30, seed=data.draw(st.integers(0, 99))):
        assert held_by(holders, 0).sum() <= capacity
        assert loads(holders, n).max() <= capacity
        assert all(held_by(holders, worker)[ranks == worker].all() for worker in range(n))
        assert sizes(holders).sum() >= 0.8 * n * capacity - n


@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=str)
@pytest.mark.parametrize(
    ("n", "q", "capacity", "expected"),
    [
        (10, 2000, 600, {3}),
        (20, 4000, 800, {4}),
        (8, 2000, 625, {2, 3}),
        (100, 5000, 150, {3}),
    ],
)
def test_every_sample_has_as_many_holders(assignment, n, q, capacity, expected):
    for _, holders in epochs(q, n, capacity, assignment, 8):
        counts = sizes(holders)
        # All but a few samples that wait for a holder.
        assert np.isin(counts, list(expected)).mean() > 0.99
        assert counts.max() <= max(expected)
        assert counts.sum() >= 0.998 * n * capacity
        assert loads(holders, n).max() <= capacity
    if len(expected) == 2:
        assert abs((counts == 2).mean() - 0.5) < 0.02


@pytest.mark.parametrize("assignment", [Global(), Aligned(), Partial(0.5)], ids=str)
def test_sets_are_evenly_filled(assignment):
    n, q = 8, 5600
    spread = {}
    for caching in ("even", "uniform"):
        spec = ShufflePlanSpec(q, n, 0, assignment, "server", "random", caching, 3 / 8)
        planner = EpochPlanner(spec)
        planner.load()
        for _ in range(10):
            holders = planner.advance().holders.ravel()
        counts = Counter(holders.tolist())
        filled = [counts[sum(1 << worker for worker in group)] for group in itertools.combinations(range(n), 3)]
        spread[caching] = np.std(filled)
    # 100 in each of 56 sets; by chance a standard deviation of 10.
    assert spread["even"] < 2.5
    assert spread["uniform"] > 7


def test_who_leaves_is_drawn_among_equals():
    # Four workers hold the one sample that a fifth gets; no set is rarer than another.
    left = Counter()
    for seed in range(800):
        policy = CACHINGS["even"](5, 5, seed)
        holders = np.array([[0b01111], [0b10001], [0b00110], [0b01010], [0b10001], [0b10100]], dtype=np.uint64)
        evolved = policy.evolve(holders, np.array([4, 0, 1, 3, 4, 2]), 1)
        left[int(holders[0, 0] & ~evolved[0, 0])] += 1
    assert sorted(left) == [1, 2, 4, 8]
    assert max(abs(count - 200) for count in left.values()) < 60


def test_the_rarest_set_is_preferred():
    # Sets {1, 2} and {0, 2} are taken by others; if 0 or 1 leaves, one of them gets another sample.
    holders = np.array([[0b011]] + [[0b110]] * 3 + [[0b101]], dtype=np.uint64)
    policy = CACHINGS["even"](3, 5, 0)
    evolved = policy.evolve(holders, np.array([2, 1, 1, 2, 0]), 1)
    assert evolved[0, 0] == 0b101


def test_a_lost_holder_is_replaced():
    holders = np.array([[0b0001], [0b0011], [0b0110], [0b1100], [0b1001], [0b0110], [0b1010], [0b0101]], np.uint64)
    policy = CACHINGS["even"](4, 4, 0)
    evolved = policy.evolve(holders, np.array([1, 0, 1, 2, 3, 2, 3, 0]), 1)
    assert evolved[0, 0] == 0b0011
    np.testing.assert_array_equal(evolved[1:], holders[1:])


def test_golden_values():
    (_, first), (_, second) = epochs(12, 4, 6, Global(), 2, seed=5)
    assert first.ravel().tolist() == []
    assert second.ravel().tolist() == []
