from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dshuffle.planning import randomness
from dshuffle.planning.randomness import below, choose, next_word, permutation, random_words, shuffle


@pytest.mark.parametrize("n", [0, 1, 2, 3, 1000, 70_000])
def test_a_permutation_is_the_same_without_numba(n, monkeypatch):
    values = np.arange(n)
    shuffle(values, "example", n)  # always a kernel
    monkeypatch.setattr(randomness, "worth_a_kernel", lambda n_items: False)
    drawn = permutation(n, "example", n)
    assert drawn.dtype == np.int64
    assert drawn.tolist() == values.tolist()


def test_splitmix64_matches_its_published_stream():
    # The first words for the seed 1234567 as printed by the reference implementation (Vigna, splitmix64.c).
    state, words = np.uint64(1234567), []
    for _ in range(3):
        state, word = next_word(np.uint64(state))
        words.append(int(word))
    assert words == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**32 - 1))
@example(2**33 - 1, 2**32 - 1)  # the low half carries
def test_below_is_the_high_half_of_the_product(word, bound):
    assert below(np.uint64(word), bound) == word * bound >> 64


@given(st.integers(0, 40), st.data())
def test_choose_takes_different_candidates_and_leaves_them_alone(n, data):
    k = data.draw(st.integers(0, n))
    candidates = np.arange(n) * 7
    chosen = choose(candidates, k, "test")
    assert len(chosen) == k == len(set(chosen.tolist()))
    assert set(chosen.tolist()) <= set(candidates.tolist())
    assert candidates.tolist() == [7 * i for i in range(n)]


def test_permutations_are_uniform():
    counts = Counter(tuple(permutation(4, "uniform", i).tolist()) for i in range(4800))
    assert len(counts) == 24
    # Chi-square with 23 degrees of freedom: mean 23, standard deviation 6.8.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 60


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *[(("a", 1), ("a", 2)), (("a", 1), (1, "a")), (("ab",), ("a", "b")), (("1",), (1,)), ((1, 23), (12, 3))],
        *[((1,), (-1,)), ((0,), (2**64,)), (("a",), ("a", ""))],
    ],
)
def test_different_paths_give_different_words(one, other):
    assert not np.isin(random_words(100, *one), random_words(100, *other)).any()
