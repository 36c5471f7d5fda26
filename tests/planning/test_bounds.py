"""The papers' rates against their own sums, against plans, and against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies.bounds import lower_bound

from dshuffle.planning.delivery import coded_rate

from ..conftest import at_most
from ..draws import average_lower_bound


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
    assert lower_bound(masks, destinations, n) == max(counts)
    assert average_lower_bound(masks, destinations, n) == pytest.approx(sum(counts) / len(counts))


@pytest.mark.parametrize(("n", "capacity"), [(2, 600), (5, 300), (20, 100), (20, 999), (64, 20)])
def test_coded_rate_has_the_papers_closed_form(n, capacity):
    q = 1000
    p = (capacity - q / n) / (q - q / n)
    closed = q / (n * p) ** 2 * ((1 - p) ** (n + 1) + (n - 1) * p * (1 - p) - (1 - p) ** 2)
    assert coded_rate(q, n, capacity) == pytest.approx(closed, rel=1e-6)


def test_coded_rate_without_excess_is_one_of_pairs():
    # Every pair of workers exchanges q / n**2 samples each way.
    assert coded_rate(1000, 10, 100) == pytest.approx(45 * 10)
    assert coded_rate(1000, 10, 1000) == 0
    assert coded_rate(1000, 1, 1000) == 0
