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


@given(jobs(), st.data())
def test_what_is_balanced_is_told_from_what_is_not(job, data):
    labels, n, seed = job
    classes = Classes.of("y", labels)
    ranks = draw_classes(classes, n, "test", seed)
    for _ in range(data.draw(st.integers(0, 3))):
        ranks[data.draw(st.integers(0, len(ranks) - 1))] = data.draw(st.integers(0, n - 1))
    counts = [np.bincount(ranks[labels == label], minlength=n) for label in np.unique(labels)]
    if max(map(np.ptp, counts)) <= 1:
        classes.check_balanced("sharding", "mine", ranks, n)
    else:
        wrong = int(np.argmax([np.ptp(count) > 1 for count in counts]))
        with pytest.raises(InvalidParameter, match=f"sharding='mine'.*Class {wrong} .*'stratified:y'"):
            classes.check_balanced("sharding", "mine", ranks, n)


@pytest.mark.parametrize("assignment", [Local(), Global()])
@pytest.mark.parametrize("delivery", ["peer", "storage", "clique"])
def test_a_planner_keeps_the_balance_from_the_first_epoch_on(assignment, delivery):
    labels = np.random.default_rng(0).integers(0, 30, 500)
    spec = ShuffleSpec(
        500,
        7,
        Choices(
            assignment=assignment,
            delivery=delivery,
            cache_fraction=0.4,
            sharding="random",
            balance=Classes.of("y", labels),
            seed=3,
        ),
    )
    planner = EpochPlanner(spec)
    last = planner.load()
    for _ in range(4):
        assert is_balanced(labels, last.ranks, 7)
        following = planner.advance()
        assert (np.any(following.ranks != last.ranks)) == (assignment != Local())
        last = following


def test_classes_of_a_part_of_the_samples():
    labels = np.array([5, 3, 5, 4, 3, 5])
    some = Classes.of("y", labels).only(np.array([0, 1, 4, 5]))
    assert some.order.tolist() == [1, 2, 0, 3]
    assert some.offsets.tolist() == [0, 2, 2, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"assignment": Aligned()}, r"balance='y' .*None with the assignment 'aligned'.*Use 'global' or 'local'"),
        ({"assignment": Partial(0.3)}, r"balance='y' .*None with the assignment 'partial:0.3'"),
        ({"assignment": Chunks(2)}, r"balance='y' .*None with the assignment 'chunks:2'.*'chunks' cannot preserve"),
        ({"n_samples": 7}, r"len\(balance 'y'\)=6 is not allowed; it must be 7"),
    ],
)
def test_what_cannot_be_balanced(changes, message):
    classes = Classes.of("y", [0, 0, 0, 0, 1, 1])
    with pytest.raises(InvalidParameter, match=message):
        ShuffleSpec(changes.get("n_samples", 6), 2, Choices(changes.get("assignment", Global()), balance=classes))


def test_a_sharding_without_the_balance_is_refused():
    classes = Classes.of("y", [0, 0, 0, 0, 1, 1])
    spec = ShuffleSpec(
        6, 2, Choices(assignment=Global(), delivery="peer", sharding="contiguous", balance=classes, seed=0)
    )
    with pytest.raises(
        InvalidParameter, match=r"sharding='contiguous' .*counts of each class of 'y' differ by at most one.*'random'"
    ):
        EpochPlanner(spec).load()
    spec = ShuffleSpec(
        6, 2, Choices(assignment=Global(), delivery="peer", sharding="round-robin", balance=classes, seed=0)
    )
    assert EpochPlanner(spec).load().ranks.tolist() == [0, 1] * 3  # it has the balance
