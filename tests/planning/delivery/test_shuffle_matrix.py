"""Shuffle and leftover matrix of Attia and Tandon (2016), and what they conserve."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.leftover import leftover_matrix, shuffle_matrix


@st.composite
def shuffles(draw):
    """Workers, and the same shares before and after in any order."""
    n = draw(st.integers(1, 6))
    shares = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    owners = [worker for worker, share in enumerate(shares) for _ in range(share)]
    return n, owners, draw(st.permutations(owners))


@given(shuffles())
def test_entries_count_samples(shuffle):
    n, owners, destinations = shuffle
    matrix = shuffle_matrix(np.array(owners, dtype=np.int64), np.array(destinations, dtype=np.int64), n)
    for i in range(n):
        for j in range(n):
            assert matrix[i, j] == sum(1 for pair in zip(owners, destinations, strict=True) if pair == (i, j))


@given(shuffles())
def test_what_is_conserved(shuffle):
    n, owners, destinations = shuffle
    matrix = shuffle_matrix(np.array(owners, dtype=np.int64), np.array(destinations, dtype=np.int64), n)
    shares = np.bincount(np.array(owners, dtype=np.int64), minlength=n)
    # Equation 13, and 14, which follows.
    np.testing.assert_array_equal(matrix.sum(axis=1), shares)
    np.testing.assert_array_equal(matrix.sum(axis=0), shares)
    leftovers = leftover_matrix(matrix)
    # Equations 15, 17 and 27.
    assert (np.diag(leftovers) == 0).all()
    assert (leftovers >= 0).all()
    np.testing.assert_array_equal(leftovers.sum(axis=0), leftovers.sum(axis=1))
    np.testing.assert_array_equal(leftovers + leftovers.T, abs(matrix - matrix.T))
    assert (np.minimum(leftovers, leftovers.T) == 0).all()


def test_example_1():
    matrix = [[2, 1, 2], [2, 1, 2], [1, 3, 1]]
    owners = np.repeat(np.arange(3), 5)
    destinations = np.repeat(np.tile(np.arange(3), 3), np.ravel(matrix))
    assert shuffle_matrix(owners, destinations, 3).tolist() == matrix
    assert leftover_matrix(matrix).tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_bad_input():
    with pytest.raises(InvalidParameter, match=r"destinations.shape=\(1,\) .*\(2,\), to match owners"):
        shuffle_matrix([0, 1], [0], 2)
    with pytest.raises(InvalidParameter, match=r"owners\[1\]=2 .*in \[0, 2\), the range of the ranks"):
        shuffle_matrix([0, 2], [0, 0], 2)
    with pytest.raises(InvalidParameter, match="n_workers=0"):
        shuffle_matrix([], [], 0)
    for shape in ((2, 3), (4,), (0, 0)):
        with pytest.raises(InvalidParameter, match=r"shuffle.shape=.*\(n_workers, n_workers\)"):
            leftover_matrix(np.zeros(shape, dtype=np.int64))
    with pytest.raises(InvalidParameter, match=r"shuffle.dtype='float64'"):
        leftover_matrix([[0.5]])
    with pytest.raises(InvalidParameter, match=r"shuffle=-1 .*counts >= 0"):
        leftover_matrix([[0, -1], [0, 0]])
