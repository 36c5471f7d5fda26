"""``coded`` and ``ubershuffle`` against the paper: its examples, its algorithms word for word, its figures."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies.bounds import lower_bound

from dshuffle.planning import SERVER, Global, first_ranks

from ...draws import first_holders, next_ranks, plan_delivery

# Chung et al. (2017), examples 1 to 3, with samples and workers counted from 0.
CACHES = [{1, 2, 3, 7}, {5, 6, 7, 8}, {0, 2, 3, 4}]
HOLDERS = np.array([sum(1 << k for k in range(3) if j in CACHES[k]) for j in range(9)], dtype=np.uint64)
DESTINATIONS = np.array([1, 2, 0, 1, 0, 2, 2, 0, 1])


def packets(plan):
    """The (sample, destination) pairs of every packet."""
    pairs = list(zip(plan.samples.tolist(), plan.destinations.tolist(), strict=True))
    return [frozenset(pairs[a:b]) for a, b in itertools.pairwise(plan.offsets.tolist())]


def plan(name, **options):
    return packets(plan_delivery(name, HOLDERS, DESTINATIONS, 3, **options))


def test_the_papers_examples():
    assert len(plan("server")) == 6
    assert set(plan("coded")) == {
        frozenset([(1, 2), (4, 0)]),
        frozenset([(0, 1), (5, 2)]),
        frozenset([(6, 2)]),
        frozenset([(3, 1)]),
    }
    reallocated = {frozenset([(1, 2), (4, 0)]), frozenset([(0, 1), (5, 2)]), frozenset([(3, 1), (6, 2)])}
    assert set(plan("ubershuffle")) == set(plan("ubershuffle", depth=1)) == reallocated
    for name in ("coded", "ubershuffle"):
        assert set(plan_delivery(name, HOLDERS, DESTINATIONS, 3).senders.tolist()) == {SERVER}


def subsets(n, size):
    """Sets of so many workers by ascending mask."""
    return sorted(
        map(frozenset, itertools.combinations(range(n), size)), key=lambda workers: sum(1 << k for k in workers)
    )


def algorithms_1_2_and_4(n, sets, destinations, depth):
    """The packets of the paper's pseudocode, line by line; depth 0 leaves out Algorithm 4."""
    z = {(workers, i): [] for size in range(1, n + 1) for workers in subsets(n, size) for i in workers}
    for j, d in enumerate(destinations):
        if d not in sets[j]:
            z[frozenset(sets[j] | {d}), d].append(j)
    for i in range(2, n + 1):
        for workers in subsets(n, i):
            longest = max(len(z[workers, k]) for k in workers)
            for k in workers:
                m = longest - len(z[workers, k])
                for size in range(i + 1, min(i + depth, n) + 1):
                    for superset in subsets(n, size):
                        if superset > workers and m > 0:
                            count = min(m, len(z[superset, k]))
                            z[workers, k] += z[superset, k][:count]
                            del z[superset, k][:count]
                            m -= count
    made = []
    for size in range(1, n + 1):
        for workers in subsets(n, size):
            columns = [[(j, k) for j in z[workers, k]] for k in workers]
            made += [frozenset(filter(None, row)) for row in itertools.zip_longest(*columns)]
    return made


@st.composite
def instances(draw, most_workers=5, most_samples=40):
    n = draw(st.integers(1, most_workers))
    rank = st.integers(0, n - 1)
    sets = draw(st.lists(st.sets(rank), max_size=most_samples))
    destinations = draw(st.lists(rank, min_size=len(sets), max_size=len(sets)))
    return n, sets, destinations


def as_masks(sets):
    return np.array([sum(1 << worker for worker in workers) for workers in sets], dtype=np.uint64)


@given(instances(), st.integers(0, 5))
def test_plans_are_those_of_the_papers_algorithms(instance, depth):
    n, sets, destinations = instance
    name, options = ("ubershuffle", {"depth": depth}) if depth else ("coded", {})
    made = plan_delivery(name, as_masks(sets), np.array(destinations, dtype=np.int64), n, **options)
    assert sorted(map(sorted, packets(made))) == sorted(map(sorted, algorithms_1_2_and_4(n, sets, destinations, depth)))


@given(instances(most_workers=10, most_samples=60), st.integers(1, 10))
def test_every_packet_is_a_clique_and_there_are_no_more_than_before(instance, depth):
    n, sets, destinations = instance
    masks, ranks = as_masks(sets), np.array(destinations, dtype=np.int64)
    coded = plan_delivery("coded", masks, ranks, n)
    carpooled = plan_delivery("ubershuffle", masks, ranks, n, depth=depth)
    for made in (coded, carpooled):
        for packet in packets(made):
            assert all(d in sets[i] for j, d in packet for i, _ in packet if i != j)
    assert lower_bound(masks, ranks, n) <= carpooled.n_packets <= coded.n_packets


def fresh(q, alpha, seed=1, n=20):
    previous = first_ranks("random", q, n, seed=seed)
    holders = first_holders(previous, n, round(alpha * q), seed=seed)
    return holders, next_ranks(Global(), previous, n, seed=seed, epoch=1)


@pytest.mark.slow
@pytest.mark.parametrize(("q", "alpha", "gain"), [(10**6, 0.55, 5.35), (10**5, 0.325, 2.59)])
def test_the_papers_claims(q, alpha, gain):
    holders, destinations = fresh(q, alpha)
    coded, carpooled = (plan_delivery(name, holders, destinations, 20).n_packets for name in ("coded", "ubershuffle"))
    assert coded / carpooled == pytest.approx(gain, rel=0.03)
