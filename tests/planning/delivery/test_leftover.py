"""``leftover`` against Attia and Tandon (2016): its example, and Theorem 1's rate for every shuffle."""

import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies.bounds import shuffle_matrix

from dshuffle.planning import SERVER
from dshuffle.planning.types import holders_of

from ...draws import check_plan, plan_delivery

WORST = runpy.run_path(str(Path(__file__).parents[3] / "pipelines/worst_case.py"))


def shuffle(matrix):
    """Owners and destinations with this shuffle matrix."""
    n = len(matrix)
    return np.divmod(np.repeat(np.arange(n * n), np.ravel(matrix)), n)


def check_and_plan(owners, destinations, n, seed=0):
    holders = holders_of(owners, n)
    made = plan_delivery("leftover", holders, destinations, n, seed=seed)
    check_plan(made, holders, destinations, n)
    assert set(made.senders.tolist()) <= {SERVER}
    assert np.diff(made.offsets).max(initial=1) <= 2
    return made


def packets(made):
    pairs = list(zip(made.samples.tolist(), made.destinations.tolist(), strict=True))
    return [pairs[a:b] for a, b in itertools.pairwise(made.offsets.tolist())]


def test_example_1():
    matrix = np.array([[2, 1, 2], [2, 1, 2], [1, 3, 1]])
    owners, destinations = shuffle(matrix)
    assert plan_delivery("server", holders_of(owners, 3), destinations, 3).n_packets == 11
    assert plan_delivery("coded", holders_of(owners, 3), destinations, 3).n_packets == 7
    assert check_and_plan(owners, destinations, 3).n_packets == 6
    assert WORST["leftover_lower_bound"](matrix) == WORST["leftover_rate"](matrix) == 6


@pytest.mark.parametrize("n", range(1, 13))
def test_worst_case(n):
    owners, destinations = WORST["worst_case_shuffle"](12 * n, n)
    matrix = shuffle_matrix(owners, destinations, n)
    assert matrix.tolist() == [[12 * (j == (i + 1) % n) for j in range(n)] for i in range(n)]
    assert WORST["leftover_rate"](matrix) == WORST["leftover_lower_bound"](matrix) == 12 * (n - 1)
    assert check_and_plan(owners, destinations, n).n_packets == 12 * (n - 1)


@st.composite
def shuffles(draw):
    """Workers, and the same shares before and after in any order."""
    n = draw(st.integers(1, 7))
    shares = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    owners = [worker for worker, share in enumerate(shares) for _ in range(share)]
    return n, np.array(owners, dtype=np.int64), np.array(draw(st.permutations(owners)), dtype=np.int64)


@given(shuffles(), st.integers())
def test_the_rate_is_theorem_1s(instance, seed):
    n, owners, destinations = instance
    assert check_and_plan(owners, destinations, n, seed).n_packets == WORST["leftover_rate"](
        shuffle_matrix(owners, destinations, n)
    )


def test_samples_that_nobody_holds_go_alone():
    holders, destinations = [0, 0b010, 0b100, 0b001, 0, 0, 0b010], [0, 0, 1, 2, 2, 1, 0]
    made = plan_delivery("leftover", holders, destinations, 3)
    check_plan(made, holders, destinations, 3)
    assert made.n_packets == 6
    assert [packet for packet in packets(made) if len(packet) == 1] == [[(6, 0)], [(0, 0)], [(5, 1)], [(4, 2)]]
