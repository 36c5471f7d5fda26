"""Assignments that keep classes in equal parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Aligned, Choices, Chunks, Classes, EpochPlanner, Global, Local, Partial, ShuffleSpec
from dshuffle.planning.assignment.balance import draw_classes


@st.composite
def jobs(draw):
    """Labels, workers and a seed; classes of any size, among them many that are smaller than the workers are many."""
    n = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(1, draw(st.sampled_from([2, n, 3 * n]))), min_size=1, max_size=12))
    if sum(sizes) < n or max(sizes) == 1:
        sizes.append(n + 1)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    seed = draw(st.integers())
    return np.random.default_rng(seed % 2**32).permutation(labels), n, seed


def is_balanced(labels, ranks, n):
    return np.ptp(np.bincount(ranks, minlength=n)) <= 1 and all(
        np.ptp(np.bincount(ranks[labels == label], minlength=n)) <= 1 for label in np.unique(labels)
    )


@given(jobs())
def test_counts_of_classes_and_sizes_differ_by_one_at_most(job):
    labels, n, seed = job
    classes = Classes.of("y", labels)
    ranks = draw_classes(classes, n, "test", seed)
    assert ranks.dtype == np.int32
    assert is_balanced(labels, ranks, n)
    np.testing.assert_array_equal(ranks, draw_classes(classes, n, "test", seed))


@pytest.mark.parametrize("assignment", [Local(), Global()])
@pytest.mark.parametrize("delivery", ["peer", "storage", "clique"])
def test_a_planner_keeps_the_balance_from_the_first_epoch_on(assignment, delivery):
    labels = np.random.default_rng(0).integers(0, 30, 500)
    choices = Choices(assignment, delivery, cache_fraction=0.4, balance=Classes.of("y", labels), seed=3)
    planner = EpochPlanner(ShuffleSpec(500, 7, choices))
    last = planner.load()
    for _ in range(4):
        assert is_balanced(labels, last.ranks, 7)
        following = planner.advance()
        assert (np.any(following.ranks != last.ranks)) == (assignment != Local())
        last = following


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"assignment": Aligned()}, r"balance='y' .*None with the assignment 'aligned'.*Use 'global' or 'local'"),
        ({"assignment": Partial(0.3)}, r"balance='y' .*None with the assignment 'partial:0.3'"),
        ({"assignment": Chunks(2)}, r"balance='y' .*None with the assignment 'chunks:2'.*'chunks' cannot preserve"),
    ],
)
def test_what_cannot_be_balanced(changes, message):
    classes = Classes.of("y", [0, 0, 0, 0, 1, 1])
    with pytest.raises(InvalidParameter, match=message):
        Choices(balance=classes, **changes)
