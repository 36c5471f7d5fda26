"""``coded`` and ``ubershuffle`` against the paper: its examples, its algorithms word for word, its figures."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import SERVER, Global, bounds, next_ranks
from dshuffle.planning.assignment.initial import first_ranks
from dshuffle.planning.caching import first_holders
from dshuffle.planning.delivery import plan_delivery
from dshuffle.planning.delivery.leftover import shuffle_matrix
from dshuffle.planning.delivery.packets import Tables
from dshuffle.planning.epoch_plan import check_plan, missing_samples
from dshuffle.planning.randomness import random_words
from dshuffle.planning.types import as_holders, holders_of

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
    assert bounds.lower_bound(masks, ranks, n) <= carpooled.n_packets <= coded.n_packets


@pytest.mark.parametrize("n", [1, 11, 12, 22, 23, 45, 64])
def test_tables_are_sorted(n):
    words = random_words(400, "tables", n) >> np.uint64(64 - n)
    # So few different sets that some have several columns, and columns several samples.
    holders, destinations = words[:100][np.arange(400) % 100], (words % np.uint64(n)).astype(np.int32)
    tables = Tables.of(holders[:, np.newaxis], destinations, n)
    assert (tables.masks[1:] > tables.masks[:-1]).all()
    assert (
        sorted(tables.samples) == missing_samples(as_holders(holders, n), np.asarray(destinations, np.int32)).tolist()
    )
    for table, mask in enumerate(tables.masks.tolist()):
        columns = range(tables.columns[table], tables.columns[table + 1])
        workers = [int(tables.workers[column]) for column in columns]
        assert workers == sorted(set(workers))
        for column, worker in zip(columns, workers, strict=True):
            samples = tables.samples[tables.starts[column] : tables.starts[column + 1]].tolist()
            assert samples == sorted(samples) != []
            for j in samples:
                assert (destinations[j], int(holders[j])) == (worker, mask & ~(1 << worker))


def test_sets_of_64_workers():
    n, q = 64, 3000
    previous = first_ranks("random", q, n, seed=0)
    holders = first_holders(previous, n, 150, seed=0)
    # The highest worker of all, too.
    destinations = next_ranks(Global(), previous, n, seed=0, epoch=1)
    needed = sum(not int(holders[j, 0]) >> int(d) & 1 for j, d in enumerate(destinations))
    counts = [needed]
    for name, options in [("coded", {}), ("ubershuffle", {"depth": 1}), ("ubershuffle", {"depth": 4})]:
        made = plan_delivery(name, holders, destinations, n, **options)
        check_plan(made, holders, destinations, n)
        counts.append(made.n_packets)
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 4


def test_depth_is_how_far_down_a_sample_may_go():
    # Worker 0 needs a sample that 1 to 3 hold; 1 needs one that 0 alone holds.
    holders, destinations = [0b1110, 0b0001], [0, 1]
    for depth, count in [(1, 2), (2, 1), (3, 1), (1000, 1)]:
        assert plan_delivery("ubershuffle", holders, destinations, 4, depth=depth).n_packets == count


def test_many_workers_and_any_depth_take_no_time():
    # The sets of up to 64 workers are too many to go through.
    n = 64
    holders = [2**63 - 1, 1, 2**40 - 1, 2**20 - 1]
    destinations = [63, 1, 63, 63]
    start = time.thread_time()
    made = plan_delivery("ubershuffle", holders, destinations, n, depth=n)
    assert time.thread_time() - start < 10
    check_plan(made, holders, destinations, n)


@pytest.mark.parametrize("name", ["coded", "ubershuffle"])
def test_without_excess_there_are_pairs(name):
    owners, destinations = (first_ranks("random", 500, 6, seed=seed) for seed in (0, 1))
    matrix = shuffle_matrix(owners, destinations, 6)
    made = plan_delivery(name, holders_of(owners, 6), destinations, 6)
    assert np.diff(made.offsets).max() == 2
    assert made.n_packets == np.triu(np.maximum(matrix, matrix.T), k=1).sum()


@pytest.mark.parametrize("name", ["coded", "ubershuffle"])
def test_samples_that_nobody_holds_go_alone(name):
    made = plan_delivery(name, [0, 0, 0b01, 0b10], [0, 0, 1, 0], 2)
    assert sorted(map(sorted, packets(made))) == [[(0, 0)], [(1, 0)], [(2, 1), (3, 0)]]


def fresh(q, alpha, seed=1, n=20):
    previous = first_ranks("random", q, n, seed=seed)
    holders = first_holders(previous, n, round(alpha * q), seed=seed)
    return holders, next_ranks(Global(), previous, n, seed=seed, epoch=1)


FIGURES = [
    (10**4, 0.1, 6174, 4367),
    (10**4, 0.3, 6886, 4558),
    (10**4, 0.5, 4971, 4166),
    (10**5, 0.1, 46494, 37733),
    (10**5, 0.2, 54386, 27206),
    (10**5, 0.5, 48842, 21259),
    (10**6, 0.2, 353898, 218974),
    (10**6, 0.5, 404383, 77989),
]
"""Samples, cache fraction, and the packets of ``coded`` and ``ubershuffle`` for 20 workers at depth 2."""


@pytest.mark.slow
@pytest.mark.parametrize(("q", "alpha", "coded", "carpooled"), FIGURES)
def test_packets_of_fresh_random_caches(q, alpha, coded, carpooled):
    holders, destinations = fresh(q, alpha)
    for name, expected in (("coded", coded), ("ubershuffle", carpooled)):
        made = plan_delivery(name, holders, destinations, 20)
        assert made.n_packets == pytest.approx(expected, rel=0.015)
        check_plan(made, holders, destinations, 20)


@pytest.mark.slow
@pytest.mark.parametrize(("q", "alpha", "gain"), [(10**6, 0.55, 5.35), (10**5, 0.325, 2.59)])
def test_the_papers_claims(q, alpha, gain):
    holders, destinations = fresh(q, alpha)
    coded, carpooled = (plan_delivery(name, holders, destinations, 20).n_packets for name in ("coded", "ubershuffle"))
    assert coded / carpooled == pytest.approx(gain, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "alpha", "seconds"),
    # Three times what is promised on a quiet core.
    [(10**5, 0.1, 0.6), (10**5, 0.5, 0.6), (10**6, 0.2, 3), (10**6, 0.55, 3)],
)
@pytest.mark.parametrize("name", ["coded", "ubershuffle"])
def test_planning_is_fast(name, q, alpha, seconds):
    plan_delivery(name, HOLDERS, DESTINATIONS, 3)
    holders, destinations = fresh(q, alpha)
    # On one core, whatever else the machine does.
    taken = []
    for _ in range(3):
        start = time.process_time()
        plan_delivery(name, holders, destinations, 20)
        taken.append(time.process_time() - start)
    assert min(taken) < seconds


def test_golden_plans():
    holders, destinations = fresh(14, 0.6, seed=9, n=3)
    coded, carpooled = (plan_delivery(name, holders, destinations, 3) for name in ("coded", "ubershuffle"))
    assert list(map(sorted, packets(coded))) == [
        [(10, 2)],
        [(12, 2)],
        [(3, 1)],
        [(1, 0), (6, 2), (9, 1)],
        [(5, 0)],
        [(13, 0)],
    ]
    assert list(map(sorted, packets(carpooled))) == [
        [(1, 0), (10, 2)],
        [(5, 0), (12, 2)],
        [(3, 1), (6, 2)],
        [(9, 1), (13, 0)],
    ]


@pytest.mark.parametrize("depth", [0, -1, 1.5, "2"])
def test_bad_depth(depth):
    with pytest.raises(InvalidParameter, match=f"depth={depth!r} .*integer >= 1"):
        plan("ubershuffle", depth=depth)


@pytest.mark.parametrize("name", ["coded", "ubershuffle"])
def test_too_many_workers(name):
    with pytest.raises(InvalidParameter, match=f"n_workers=65 .*at most 64 .*{name!r}.*'clique'"):
        plan_delivery(name, np.zeros((0, 2), dtype=np.uint64), np.zeros(0, dtype=np.int32), 65)
