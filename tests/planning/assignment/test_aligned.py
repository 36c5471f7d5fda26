from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import CACHINGS, Aligned, Choices, EpochPlanner, Global, ShuffleSpec, first_ranks
from dshuffle.planning.assignment import Draw
from dshuffle.planning.exchange_epochs import cache_capacity

from ...draws import check_plan, next_ranks, plan_delivery


@st.composite
def situations(draw):
    n = draw(st.sampled_from([1, 2, 3, 8, 20, 70]))
    q = draw(st.integers(n, 3 * n + 60))
    seed = draw(st.integers())
    previous = first_ranks("random", q, n, seed=seed)
    capacity = draw(st.integers(-(-q // n), q))
    caching = draw(st.sampled_from(sorted(CACHINGS)))
    return n, previous, CACHINGS[caching](n, capacity, seed).first(previous)


@given(situations(), st.integers())
@pytest.mark.slow
def test_draws_are_balanced_and_their_packets_perfect(situation, seed):
    n, previous, holders = situation
    assignment = Aligned()
    drawn = assignment.draw(Draw(len(previous), n, seed, 4, previous, holders))
    ranks, packets = drawn.ranks, drawn.packets
    assert ranks.dtype == np.int32
    counts = np.bincount(ranks, minlength=n)
    assert np.ptp(counts) <= 1
    start, length = packets.offsets[:-1], np.diff(packets.offsets)
    np.testing.assert_array_equal(length, np.bitwise_count(holders[packets.samples[start]]).sum(axis=1) + 1)
    for delivery in ("clique", "peer") if n <= 64 else ("peer",):
        plan = plan_delivery(delivery, holders, ranks, n, start=packets)
        check_plan(plan, holders, ranks, n)
    again = next_ranks(assignment, previous, n, seed=seed, epoch=4, holders=holders.copy())
    np.testing.assert_array_equal(ranks, again)


def trace(assignment, q, n, alpha, epochs, caching="even"):
    """``(epochs, q)`` assignments."""
    policy = CACHINGS[caching](n, cache_capacity(alpha, q, n), 0)
    ranks = first_ranks("random", q, n, seed=0)
    holders = policy.first(ranks)
    steps = [ranks]
    for epoch in range(1, epochs):
        ranks = next_ranks(assignment, ranks, n, seed=0, epoch=epoch, holders=holders)
        holders = policy.evolve(holders, ranks, epoch)
        steps.append(ranks)
    return np.array(steps)


def transitions(steps, n, lag):
    counts = np.zeros((len(steps) - lag, n, n))
    for epoch in range(len(steps) - lag):
        np.add.at(counts[epoch], (steps[epoch], steps[epoch + lag]), 1)
    return counts


SHAPES = [(2000, 10, 0.3), (200, 5, 0.4), (1000, 20, 0.2)]


@pytest.fixture(scope="module", params=["aligned", "global"])
def traces(request):
    assignment = {"aligned": Aligned(), "global": Global()}[request.param]
    return {(q, n): trace(assignment, q, n, alpha, 150) for q, n, alpha in SHAPES}


@pytest.mark.parametrize(("q", "n", "_alpha"), SHAPES)
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_sample_comes_back_as_often_as_by_chance(traces, q, n, _alpha, lag):
    counts = transitions(traces[q, n], n, lag).sum(axis=0)
    came_back = np.trace(counts) / counts.sum() * n
    deviation = np.sqrt(n / counts.sum())
    assert abs(came_back - 1) < 0.06 + 3 * deviation


@pytest.mark.parametrize(("q", "n", "_alpha"), SHAPES)
@pytest.mark.parametrize("lag", [1, 2])
def test_two_samples_meet_again_as_often_as_by_chance(traces, q, n, _alpha, lag):
    counts = transitions(traces[q, n], n, lag)
    together = counts.sum(axis=2)
    again = (counts * (counts - 1)).sum() / (together * (together - 1)).sum()
    assert again / ((q / n - 1) / (q - 1)) == pytest.approx(1, abs=0.035)


def test_next_to_all_packets_are_perfect_where_samples_abound():
    made = EpochPlanner(ShuffleSpec(20_000, 20, Choices("aligned", "clique", caching="even", cache_fraction=0.1)))
    made.load()
    for _ in range(5):
        plan = made.advance().packets
    sizes = Counter(np.diff(plan.offsets).tolist())
    assert sizes[3] > 0.97 * plan.n_packets
