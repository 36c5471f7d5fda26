"""The papers' rates against their own sums, against plans, and against brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import DELIVERIES, Global, bounds
from dshuffle.planning.assignment.initial import first_ranks
from dshuffle.planning.delivery import plan_delivery

from ..conftest import at_most
from ..draws import average_lower_bound, first_holders, next_ranks
from ..draws import missing as missing_of


@st.composite
def instances(draw, most_workers, most_samples, most_holders=None):
    n = draw(st.integers(1, most_workers))
    rank = st.integers(0, n - 1)
    sets = draw(st.lists(st.sets(rank, max_size=most_holders), max_size=most_samples))
    destinations = draw(st.lists(rank, min_size=len(sets), max_size=len(sets)))
    masks = np.array([sum(1 << worker for worker in workers) for workers in sets], dtype=np.uint64)
    return n, sets, masks, np.array(destinations, dtype=np.int64)


def counted(order, sets, destinations):
    """The needed samples whose holders all come after their destination."""
    place = {worker: i for i, worker in enumerate(order)}
    return sum(all(place[k] > place[d] for k in workers) for workers, d in zip(sets, destinations, strict=True))


@at_most(60)
@given(instances(6, 15))
def test_lower_bounds_are_those_over_all_orders(instance):
    n, sets, masks, destinations = instance
    counts = [counted(order, sets, destinations) for order in itertools.permutations(range(n))]
    assert bounds.lower_bound(masks, destinations, n) == max(counts)
    assert average_lower_bound(masks, destinations, n) == pytest.approx(sum(counts) / len(counts))


def fewest_linear_packets(sets, destinations):
    """The fewest XORs from which all destinations can solve for what they need: the minrank, by brute force.

    Row j of a matrix stands for what sample j's destination has to find among the combinations sent: sample j,
    plus any samples that it holds. The packets have to span one such row for every needed sample.
    """
    needed = [j for j, d in enumerate(destinations) if d not in sets[j]]
    known = [[i for i, other in enumerate(needed) if destinations[j] in sets[other]] for j in needed]
    choices = [
        [
            (1 << row) | sum(1 << i for i in chosen)
            for size in range(len(ids) + 1)
            for chosen in itertools.combinations(ids, size)
        ]
        for row, ids in enumerate(known)
    ]
    return min(rank(rows) for rows in itertools.product(*choices))


def rank(rows):
    basis = []
    for row in rows:
        for vector in basis:
            row = min(row, row ^ vector)
        if row:
            basis.append(row)
    return len(basis)


@at_most(60)
@given(instances(4, 4))
def test_bound_optimum_and_plans_in_this_order(instance):
    n, sets, masks, destinations = instance
    best = fewest_linear_packets(sets, destinations)
    assert math.ceil(average_lower_bound(masks, destinations, n) - 1e-9) <= best
    assert bounds.lower_bound(masks, destinations, n) <= best
    for name in sorted(DELIVERIES):
        try:
            plan = plan_delivery(name, masks, destinations, n)
        except InvalidParameter:
            assert name in ("leftover", "peer")  # these need a holder, and 'leftover' no more than one
            continue
        assert best <= plan.n_packets


def test_the_bound_is_tight_where_the_brute_force_says_so():
    # Three workers in a circle: two packets, and the average says no more than 1.5.
    assert fewest_linear_packets([{1}, {2}, {0}], [0, 1, 2]) == 2
    assert bounds.lower_bound([0b010, 0b100, 0b001], [0, 1, 2], 3) == 2
    assert average_lower_bound([0b010, 0b100, 0b001], [0, 1, 2], 3) == 1.5


@pytest.mark.parametrize(("n", "capacity"), [(2, 600), (5, 300), (20, 100), (20, 999), (64, 20)])
def test_coded_rate_has_the_papers_closed_form(n, capacity):
    q = 1000
    p = (capacity - q / n) / (q - q / n)
    closed = q / (n * p) ** 2 * ((1 - p) ** (n + 1) + (n - 1) * p * (1 - p) - (1 - p) ** 2)
    assert bounds.coded_rate(q, n, capacity) == pytest.approx(closed, rel=1e-6)


def test_coded_rate_without_excess_is_one_of_pairs():
    # Every pair of workers exchanges q / n**2 samples each way.
    assert bounds.coded_rate(1000, 10, 100) == pytest.approx(45 * 10)
    assert bounds.coded_rate(1000, 10, 1000) == 0
    assert bounds.coded_rate(1000, 1, 1000) == 0


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [5_000, 20_000, 55_000])
def test_rates_are_the_means_of_random_shuffles(capacity):
    q, n = 100_000, 20
    previous = first_ranks("random", q, n, seed=1)
    holders = first_holders(previous, n, capacity, seed=1)
    destinations = next_ranks(Global(), previous, n, seed=1, epoch=1)
    average = average_lower_bound(holders, destinations, n)
    assert average == pytest.approx(bounds.coded_rate(q, n, capacity), rel=0.01)
    missing = missing_of(holders, destinations, n)
    assert len(missing) == pytest.approx(q - capacity, rel=0.01)  # Theorem 1 of Chung et al. (2017)
    bound = bounds.lower_bound(holders, destinations, n)
    assert average <= bound <= 1.1 * average


def test_bad_input():
    with pytest.raises(InvalidParameter, match=r"n_workers=21 .*at most 20"):
        bounds.lower_bound([1, 2], [1, 0], 21)
    with pytest.raises(InvalidParameter, match=r"destinations\[0\]=2"):
        bounds.lower_bound([1, 2], [2, 0], 2)
    with pytest.raises(InvalidParameter, match=r"capacity=4 .*in \[5, 10\]"):
        bounds.coded_rate(10, 2, 4)
    with pytest.raises(InvalidParameter, match=r"capacity=11 .*in \[5, 10\]"):
        bounds.coded_rate(10, 2, 11)
    with pytest.raises(InvalidParameter, match=r"n_samples=1 .*fewer samples than workers"):
        bounds.coded_rate(1, 2, 1)


@pytest.mark.parametrize("held", [1, 3])
def test_theorem_2_for_thousands_of_workers(held):
    """There are more sets of workers than a float can count."""
    rate = bounds.coded_rate(10**6, 4000, held * 250)
    # One over the size of a needed sample's set, on average.
    assert 10**6 * (1 - held / 4000) / (held + 1) <= rate <= 10**6 / 2
