"""Keyed bijections have an inverse that agrees, and as far as tests see they are as random as Fisher-Yates.

Every statistical test is also run on a network with too few rounds, which must fail it.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning.assignment.slots import Blocks
from dshuffle.planning.randomness import LARGEST_TABLE, ROUNDS, Bijection, random_words

SURE = 1e-6
"""A test of a good bijection fails with this probability; the keys are fixed, so it does not fail by chance."""


@given(size=st.integers(1, 3000), seed=st.integers(), is_network=st.booleans())
def test_it_is_a_bijection_and_its_inverse_undoes_it(size, seed, is_network):
    bijection = network(size, seed) if is_network else Bijection.of(size, "test", seed)
    points = np.arange(size)
    mapped = bijection.forward(points)
    assert np.sort(mapped).tolist() == points.tolist()
    assert bijection.inverse(mapped).tolist() == points.tolist()


def p_of_permutations(draw):
    """The p value of all permutations of five points being equally likely."""
    names = {order: i for i, order in enumerate(itertools.permutations(range(5)))}
    counts = np.bincount([names[tuple(draw(seed).tolist())] for seed in range(12_000)], minlength=120)
    return scipy.stats.chisquare(counts).pvalue


@pytest.mark.slow
def test_small_domains_are_uniform_over_all_permutations():
    assert p_of_permutations(lambda seed: Bijection.of(5, seed).forward(np.arange(5))) > SURE
    # A network with as many rounds as large domains have is not: hence the table.
    assert p_of_permutations(lambda seed: network(5, seed).forward(np.arange(5))) < SURE


def network(size, seed):
    return Bijection.network(np.array([size]), random_words(ROUNDS, "network", seed))


N = 20
SIZE = LARGEST_TABLE + 1


def z_of_pairs(offset, draws=150):
    """How far pairs of samples at a distance meet in one block more or less often than by chance, in deviations."""
    met, total = 0, 0
    samples = np.arange(SIZE - offset)
    for seed in range(draws):
        bijection = Bijection.of(SIZE, "pairs", seed)
        blocks = bijection.forward(np.arange(SIZE)) * N // SIZE
        met += int((blocks[samples] == blocks[samples + offset]).sum())
        total += len(samples)
    chance = (SIZE / N - 1) / (SIZE - 1)
    return (met - total * chance) / np.sqrt(total * chance * (1 - chance))


@pytest.mark.slow
@pytest.mark.parametrize("offset", [1, 256, 257, 258, SIZE // 2])  # neighbours; the network's rows; the equal halves
def test_structured_pairs_meet_as_often_as_by_chance(offset):
    assert abs(z_of_pairs(offset)) < 5


@given(st.data())
def test_blocks_agree_with_a_list_of_all_ranks(data):
    n, unit = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    q = data.draw(st.integers(n * unit, n * unit + 60))
    drawn = data.draw(st.booleans())
    blocks = Blocks.drawn(q, n, unit, "test", data.draw(st.integers())) if drawn else Blocks.contiguous(q, n, unit)
    ranks = blocks.all_ranks()
    for rank in range(n):
        assert blocks.samples_of(rank).tolist() == np.flatnonzero(ranks == rank).tolist()
    sizes = np.bincount(ranks, minlength=n)
    assert blocks.shares == (sizes.min(), sizes.max())
    assert sizes.max() - sizes.min() <= unit
    whole = ranks[: q // unit * unit].reshape(-1, unit)
    assert (whole == whole[:, :1]).all()
