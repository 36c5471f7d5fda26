import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Aligned, Chunks, Global, Local, Partial, first_ranks, parse_assignment
from dshuffle.planning.exchange_epochs import EVERY_EPOCH

from ...draws import next_ranks

workers = st.integers(1, 9)
seeds = st.integers(-(2**70), 2**70)
fractions = st.decimals(0, 1, places=3).map(float)


def sizes(assignment, n):
    return np.bincount(assignment, minlength=n)


def balanced(assignment, n):
    return np.ptp(sizes(assignment, n)) <= 1 and len(sizes(assignment, n)) == n


@st.composite
def shapes(draw):
    n = draw(workers)
    return draw(st.integers(n, 80)), n


@given(shape=shapes(), seed=seeds, epoch=st.integers(1, 10**6))
def test_global_is_balanced_and_does_not_depend_on_the_past(shape, seed, epoch):
    q, n = shape
    one = next_ranks(Global(), first_ranks("random", q, n, seed=1), n, seed=seed, epoch=epoch)
    other = next_ranks(Global(), first_ranks("contiguous", q, n, seed=2), n, seed=seed, epoch=epoch)
    assert one.dtype == np.int32
    assert balanced(one, n)
    np.testing.assert_array_equal(one, other)


@given(shape=shapes(), seed=seeds, fraction=fractions)
def test_partial_sends_and_receives_exactly_k(shape, seed, fraction):
    q, n = shape
    previous = first_ranks("random", q, n, seed=seed)
    assignment = next_ranks(Partial(fraction), previous, n, seed=seed, epoch=3)
    # Algorithm 1's Q * N / M, rounded up in exact decimal arithmetic.
    k = 0 if n == 1 else min(math.ceil(Fraction(str(fraction)) * q / n), q // n)
    moved = previous != assignment
    np.testing.assert_array_equal(np.bincount(previous[moved], minlength=n), np.full(n, k))
    np.testing.assert_array_equal(np.bincount(assignment[moved], minlength=n), np.full(n, k))
    np.testing.assert_array_equal(sizes(assignment, n), sizes(previous, n))


def test_partial_counts_are_not_off_by_a_float():
    assert Partial(0.1).n_exchanged(1000, 10) == 10
    assert Partial(0.1 + 0.2).n_exchanged(1000, 10) == 30
    assert Partial(1 / 3).n_exchanged(900, 3) == 100
    assert Partial(1e-15).n_exchanged(1000, 10) == 1
    assert Partial(0).n_exchanged(1000, 10) == 0
    assert Partial(1).n_exchanged(1003, 10) == 100


def test_global_is_uniform():
    q, n, epochs = 30, 5, 2000
    start = first_ranks("contiguous", q, n, seed=0)
    counts = np.zeros((q, n))
    together = 0
    for epoch in range(epochs):
        assignment = next_ranks(Global(), start, n, seed=0, epoch=epoch)
        counts[np.arange(q), assignment] += 1
        together += assignment[0] == assignment[1]
    # 400 of each with a standard deviation of 18; two samples share a worker with probability 5/29.
    assert np.abs(counts - 400).max() < 100
    assert abs(together / epochs - 5 / 29) < 0.04


@given(ids=st.sets(st.integers(0, 1000)), seed=seeds, epoch=st.integers(0, 99), rank=st.integers(0, 99))
def test_epoch_order_depends_on_the_set_alone(ids, seed, epoch, rank):
    ascending = np.array(sorted(ids), dtype=np.int64)
    order = EVERY_EPOCH.order(ascending[::-1], seed=seed, epoch=epoch, rank=rank)
    np.testing.assert_array_equal(np.sort(order), ascending)
    np.testing.assert_array_equal(order, EVERY_EPOCH.order(ascending, seed=seed, epoch=epoch, rank=rank))


@pytest.mark.parametrize(
    "assignment",
    [Local(), Global(), *map(Partial, (0.3, 1 / 3, 0, 1e-7)), Aligned(), Chunks(), Chunks(64)],
)
def test_parsing_is_the_inverse_of_str(assignment):
    assert parse_assignment(str(assignment)) == assignment
    assert parse_assignment(assignment) is assignment


@pytest.mark.parametrize(
    "text",
    [
        *("locals", "", "a:1", 3, "partial", "partial:", "partial:x", "partial:1.5", "partial:nan"),
        *("aligned:", "aligned:0.3", "chunks:", "chunks:0", "chunks:-3", "chunks:2.5"),
    ],
)
def test_unknown_assignments_list_the_known(text):
    with pytest.raises(
        InvalidParameter,
        match=r"assignment=.*'local', 'partial:Q' .*'aligned'.*'chunks:ROWS'",
    ) as error:
        parse_assignment(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("fraction", [-0.1, 1.0001, math.nan, math.inf, "0.3", None])
def test_fractions_outside_0_1_are_refused(fraction):
    with pytest.raises(InvalidParameter, match=r"assignment.fraction=.*number in \[0, 1\]"):
        Partial(fraction)
