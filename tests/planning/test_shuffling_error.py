"""The distance of one partial exchange from uniform, against enumerations of Algorithm 1 of Nguyen et al. (2022)."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import shuffling_error as module
from dshuffle.planning.shuffling_error import nguyen_equation_11, shuffling_error

from ..conftest import at_most


def lower_bound(q, n, rounds):
    """The bound if counts are not enumerated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ways", lambda n_workers, rounds: None)
        return shuffling_error(q, n, rounds * n / q).value


def exchanges(shares, rounds):
    """Every partition that Algorithm 1 can lead to, once for each of its equally probable random choices."""
    first = list(itertools.accumulate(shares, initial=0))
    own = [range(first[rank], first[rank + 1]) for rank in range(len(shares))]
    orders = itertools.product(*(itertools.permutations(samples, rounds) for samples in own))
    rounds_of_ranks = list(itertools.product(itertools.permutations(range(len(shares))), repeat=rounds))
    for order, destinations in itertools.product(orders, rounds_of_ranks):
        after = [set(samples) for samples in own]
        for i, destination in enumerate(destinations):
            for rank, samples in enumerate(order):
                after[rank].remove(samples[i])
                after[destination[rank]].add(samples[i])
        yield after


def distance_of_partitions(shares, rounds):
    q = sum(shares)
    counts = Counter(tuple(map(frozenset, after)) for after in exchanges(shares, rounds))
    uniform = Fraction(math.prod(map(math.factorial, shares)), math.factorial(q))
    distances = sum(abs(Fraction(n, counts.total()) - uniform) for n in counts.values())
    return (distances + 1 - len(counts) * uniform) / 2


@pytest.mark.parametrize(
    ("q", "n", "rounds"),
    [
        *[(4, 1, 0), (6, 2, 2), (8, 2, 2), (5, 2, 2), (6, 3, 0), (6, 3, 1), (9, 3, 1), (5, 3, 1), (8, 3, 2)],
        *[(8, 4, 1), (8, 4, 2), (5, 5, 1), (10, 5, 1)],
    ],
)
def test_distance_of_partitions(q, n, rounds):
    shares = [len(range(rank, q, n)) for rank in range(n)]
    distance = float(distance_of_partitions(shares, rounds))
    assert shuffling_error(q, n, rounds * n / q) == (pytest.approx(distance, abs=1e-12), True)
    if n > 1:
        assert lower_bound(q, n, rounds) <= distance + 1e-12


@pytest.mark.parametrize(("q", "rounds"), [(400, 200), (400, 130), (401, 200), (1200, 590)])
def test_two_workers_in_whole_numbers(q, rounds):
    share = -(-q // 2)
    distance = Fraction(0)
    for kept in range(share + 1):
        returned = kept - share + rounds
        after = Fraction(math.comb(rounds, returned), 2**rounds) if returned >= 0 else 0
        distance += abs(
            after - Fraction(math.comb(share, kept) * math.comb(q - share, share - kept), math.comb(q, share))
        )
    error = shuffling_error(q, 2, rounds / (q / 2))
    assert error == (pytest.approx(float(distance / 2), abs=1e-12), True)


@pytest.mark.parametrize(("n", "share"), [(2, 40), (3, 10), (4, 4), (5, 2), (6, 1), (7, 1)])
def test_bound_is_below_and_more_exchange_is_nearer(n, share):
    """Not a law for all q and n, but it holds for these."""
    before = 1.0
    for rounds in range(share + 1):
        distance, is_exact = shuffling_error(n * share, n, rounds / share)
        assert is_exact
        assert 0 <= lower_bound(n * share, n, rounds) <= distance + 1e-12
        assert distance <= before + 1e-12
        before = distance


@at_most(40)
@given(st.integers(1, 40), st.integers(0, 10_000), st.floats(0, 1))
def test_error_is_a_probability(n, more, fraction):
    assert 0 <= shuffling_error(n + more, n, fraction).value <= 1


def test_what_is_exact_says_so():
    assert shuffling_error(54, 3, 1.0).exact
    assert not shuffling_error(57, 3, 1.0).exact
    assert not shuffling_error(1_200_000, 4, 0.3).exact


@pytest.mark.parametrize(("n", "exchanged"), [(1, 0), *itertools.product([2, 3, 4, 6, 12], [0, 1]), (2, 6), (3, 4)])
def test_equation_11_in_whole_numbers(n, exchanged):
    q = 12
    share, rest = q // n, q - q // n
    f = math.factorial
    sigma = f(share) * f(rest) // f(rest - exchanged) * f(share) // f(share - exchanged) * f(rest)
    assert nguyen_equation_11(q, n, exchanged / share) == pytest.approx(float(1 - Fraction(sigma, f(q))), rel=1e-9)


def test_bad_input():
    for error in (shuffling_error, nguyen_equation_11):
        with pytest.raises(InvalidParameter, match=r"fraction=1.5 .*in \[0, 1\]"):
            error(7, 2, 1.5)
        with pytest.raises(InvalidParameter, match=r"n_samples=1 .*fewer samples than workers"):
            error(1, 2, 0.5)
    with pytest.raises(InvalidParameter, match=r"fraction=0.5 .*single worker"):
        nguyen_equation_11(7, 1, 0.5)
