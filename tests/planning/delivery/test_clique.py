import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import SERVER, Global, Packets
from dshuffle.planning.assignment.initial import first_ranks
from dshuffle.planning.bounds import lower_bound
from dshuffle.planning.delivery import plan_delivery
from dshuffle.planning.delivery.clique import find_cycles
from dshuffle.planning.epoch_plan import check_plan
from dshuffle.planning.exchange_epochs import cache_capacity

from ...draws import first_holders, next_ranks
from ...draws import missing as missing_of


def fresh(q, n, alpha, seed=0):
    """Holders with uniformly random excess and the next uniform assignment."""
    previous = first_ranks("random", q, n, seed=seed)
    holders = first_holders(previous, n, cache_capacity(alpha, q, n), seed=seed)
    return holders, next_ranks(Global(), previous, n, seed=seed, epoch=1)


def needed(holders, destinations, n):
    return len(missing_of(holders, destinations, n))


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


def fewest_cliques(samples, masks, destinations):
    """The least number of packets without cycles, by trying all."""
    if not samples:
        return 0
    first, *others = samples
    best = len(samples)
    for size in range(len(others) + 1):
        for chosen in itertools.combinations(others, size):
            packet = (first, *chosen)
            if all(
                destinations[a] != destinations[b] and masks[a] >> destinations[b] & 1
                for a, b in itertools.permutations(packet, 2)
            ):
                rest = [sample for sample in others if sample not in chosen]
                best = min(best, 1 + fewest_cliques(rest, masks, destinations))
    return best


def test_small_plans_are_nearly_always_the_best():
    rng = np.random.default_rng(0)
    ours = best = 0
    for seed in range(150):
        n, q = 5, 8
        masks, destinations = rng.integers(0, 2**n, q), rng.integers(0, n, q)
        samples = missing_of(masks, destinations, n).tolist()
        ours += plan_delivery("clique", masks, destinations, n, seed=seed).n_packets
        best += fewest_cliques(samples, masks.tolist(), destinations.tolist())
    assert ours <= 1.005 * best


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 40])
@pytest.mark.parametrize("alpha", [0, 0.08, 0.15, 0.35, 0.7])
def test_fewer_packets_than_ubershuffle_where_only_one_is_tried(n, alpha):
    holders, destinations = fresh(30_000, n, max(alpha, 1 / n))
    plan = plan_delivery("clique", holders, destinations, n)
    check_plan(plan, holders, destinations, n)
    assert plan.n_packets <= plan_delivery("ubershuffle", holders, destinations, n).n_packets


@pytest.mark.parametrize(
    ("n", "q", "gain"),
    [
        (256, 20_000, 1.7),
        pytest.param(256, 10**6, 2.2, marks=pytest.mark.slow),
        pytest.param(1024, 10**6, 1.9, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_more_than_64_workers_gain_too(n, q, gain):
    holders, destinations = fresh(q, n, 4 / n)
    plan = plan_delivery("clique", holders, destinations, n)
    check_plan(plan, holders, destinations, n)
    assert needed(holders, destinations, n) >= gain * plan.n_packets


@given(st.integers(2, 70), st.data())
def test_cycles_are_cycles(n, data):
    size = data.draw(st.integers(0, 40))
    sets = data.draw(st.lists(st.sets(st.integers(0, n - 1), max_size=3), min_size=size, max_size=size))
    workers = data.draw(st.lists(st.integers(0, n - 1), min_size=size, max_size=size))
    masks = np.zeros((size, -(-n // 64)), dtype=np.uint64)
    for sample, holders in enumerate(sets):
        holders.discard(workers[sample])
        for worker in holders:
            masks[sample, worker // 64] |= np.uint64(1 << worker % 64)
    members, offsets = find_cycles(masks, np.array(workers, dtype=np.int64), n)
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


@pytest.mark.parametrize("samples", [[0, 0], [2], [7]])
def test_a_start_that_delivers_something_else_is_refused(samples):
    start = Packets.uncoded(samples, [1] * len(samples), [SERVER] * len(samples))
    with pytest.raises(InvalidParameter, match=r"start is not allowed: .*twice"):
        plan_delivery("clique", [1, 1, 2], [1, 1, 1], 2, start=start)
