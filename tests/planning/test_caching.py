import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import CACHINGS, Global, Local, Partial, first_ranks
from dshuffle.planning.types import held_by

from ..draws import first_holders, next_ranks


@st.composite
def shapes(draw):
    n = draw(st.sampled_from([1, 2, 3, 7, 65]))
    q = draw(st.integers(n, 3 * n + 20))
    return q, n, draw(st.integers(min(q, -(-q // n) + 1), q))  # without excess, sessions have another policy


def held(holders, n):
    return [set(np.flatnonzero(held_by(holders, worker)).tolist()) for worker in range(n)]


def shares(assignment, n):
    return [set(np.flatnonzero(assignment == worker).tolist()) for worker in range(n)]


@pytest.mark.parametrize("caching", CACHINGS)
@pytest.mark.parametrize("assignment", [Local(), Partial(0.5), Global()], ids=str)
@given(shape=shapes(), seed=st.integers())
def test_policy_contract(caching, assignment, shape, seed):
    q, n, capacity = shape
    policy = CACHINGS[caching](n, capacity, seed)
    ranks = first_ranks("random", q, n, seed=seed)
    holders = policy.first(ranks)
    if caching != "even":
        np.testing.assert_array_equal(holders, first_holders(ranks, n, capacity, seed=seed))
    twin = CACHINGS[caching](n, capacity, seed)
    twin.first(ranks)
    for epoch in range(1, 4):
        before, given_away = held(holders, n), holders.copy()
        ranks = next_ranks(assignment, ranks, n, seed=seed, epoch=epoch)
        evolved = policy.evolve(holders, ranks, epoch)
        np.testing.assert_array_equal(holders, given_away)
        np.testing.assert_array_equal(evolved, twin.evolve(holders, ranks, epoch))
        excess = capacity > -(-q // n)
        for share, old, new in zip(shares(ranks, n), before, held(evolved, n), strict=True):
            assert share <= new <= old | share
            if caching == "even" and excess:
                assert len(new) <= capacity
            else:
                assert len(new) == (capacity if excess else len(share))
        holders = evolved


@given(shape=shapes(), seed=st.integers(0, 100), fraction=st.sampled_from([0.3, 1.0]))
def test_recent_keeps_what_was_trained_on_last(shape, seed, fraction):
    q, n, capacity = shape
    policy = CACHINGS["recent"](n, capacity, seed)
    ranks = first_ranks("random", q, n, seed=seed)
    trained = {(int(worker), sample): 0 for sample, worker in enumerate(ranks)}
    holders = policy.first(ranks)
    for epoch in range(1, 6):
        ranks = next_ranks(Partial(fraction), ranks, n, seed=seed, epoch=epoch)
        evolved = policy.evolve(holders, ranks, epoch)
        for worker, (old, new) in enumerate(zip(held(holders, n), held(evolved, n), strict=True)):
            share = set(np.flatnonzero(ranks == worker).tolist())
            kept = [trained.get((worker, sample), -1) for sample in new - share]
            evicted = [trained.get((worker, sample), -1) for sample in old - new]
            assert max(evicted, default=-1) <= min(kept, default=epoch)
        trained |= {(int(worker), sample): epoch for sample, worker in enumerate(ranks)}
        holders = evolved
