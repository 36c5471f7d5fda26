import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies.bounds import lower_bound

from dshuffle.planning import Global, Packets, first_ranks
from dshuffle.planning.delivery.coded import find_cycles
from dshuffle.planning.exchange_epochs import cache_capacity
from dshuffle.planning.types import group_by

from ...draws import check_plan, first_holders, next_ranks, plan_delivery


def fresh(q, n, alpha, seed=0):
    """Holders with uniformly random excess and the next uniform assignment."""
    previous = first_ranks("random", q, n, seed=seed)
    holders = first_holders(previous, n, cache_capacity(alpha, q, n), seed=seed)
    return holders, next_ranks(Global(), previous, n, seed=seed, epoch=1)


@st.composite
def instances(draw):
    """Masks of any holders, also of none, and destinations."""
    n = draw(st.integers(1, 8))
    q = draw(st.integers(0, 40))
    masks = draw(st.lists(st.integers(0, 2**n - 1), min_size=q, max_size=q))
    destinations = draw(st.lists(st.integers(0, n - 1), min_size=q, max_size=q))
    return n, np.array(masks, dtype=np.uint64), np.array(destinations, dtype=np.int64)


@given(instances(), st.integers())
def test_never_more_packets_than_ubershuffle_nor_fewer_than_possible(instance, seed):
    n, masks, destinations = instance
    plan = plan_delivery("clique", masks, destinations, n, seed=seed)
    check_plan(plan, masks, destinations, n)
    assert plan.n_packets >= lower_bound(masks, destinations, n)
    for depth in (1, 2, n):
        assert plan.n_packets <= plan_delivery("ubershuffle", masks, destinations, n, depth=depth).n_packets


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 40])
@pytest.mark.parametrize("alpha", [0, 0.08, 0.15, 0.35, 0.7])
def test_fewer_packets_than_ubershuffle_where_only_one_is_tried(n, alpha):
    holders, destinations = fresh(30_000, n, max(alpha, 1 / n))
    plan = plan_delivery("clique", holders, destinations, n)
    check_plan(plan, holders, destinations, n)
    assert plan.n_packets <= plan_delivery("ubershuffle", holders, destinations, n).n_packets


@given(st.integers(2, 64), st.data())
def test_cycles_are_cycles(n, data):
    size = data.draw(st.integers(0, 40))
    sets = data.draw(st.lists(st.sets(st.integers(0, n - 1), max_size=3), min_size=size, max_size=size))
    workers = data.draw(st.lists(st.integers(0, n - 1), min_size=size, max_size=size))
    for sample, holders in enumerate(sets):
        holders.discard(workers[sample])
    masks = np.array([sum(1 << worker for worker in holders) for holders in sets], dtype=np.uint64)
    needing = np.array(workers, dtype=np.int64)
    members, offsets = find_cycles(masks, needing, *group_by(needing, n), np.array([2, 3, 4, 6, n]))
    assert len(set(members.tolist())) == len(members)
    for a, b in itertools.pairwise(offsets):
        cycle = members[a:b].tolist()
        assert len(cycle) >= 2
        for sample, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            assert workers[sample] in sets[following]
    # Nothing is left that would close a cycle of two.
    left = set(range(size)) - set(members.tolist())
    assert not any(workers[a] in sets[b] and workers[b] in sets[a] for a, b in itertools.combinations(left, 2))


def test_start_is_kept():
    holders, destinations = fresh(2000, 6, 0.4, seed=7)  # of which no samples are left for a cycle
    first = plan_delivery("clique", holders, destinations, 6, seed=1)
    cut = first.offsets[100]
    start = Packets(first.offsets[:101], first.samples[:cut], first.destinations[:cut], first.senders[:100])
    plan = plan_delivery("clique", holders, destinations, 6, seed=2, start=start)
    check_plan(plan, holders, destinations, 6)
    np.testing.assert_array_equal(plan.offsets[:101], start.offsets)
    np.testing.assert_array_equal(plan.samples[:cut], start.samples)
    assert plan_delivery("clique", holders, destinations, 6, start=first).n_packets == first.n_packets
    other = plan_delivery("peer", holders, destinations, 6, start=start)
    np.testing.assert_array_equal(other.samples, plan_delivery("peer", holders, destinations, 6).samples)
