"""Assignments that keep classes in equal parts."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Aligned, Choices, Chunks, Classes, EpochPlanner, Global, Local, Partial, ShuffleSpec
from dshuffle.planning.assignment.balance import draw_classes, exchange_in_classes

from ...draws import next_ranks


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


@given(jobs(), st.decimals(0, 1, places=3).map(float))
def test_an_exchange_keeps_the_balance_and_every_worker_sends_and_receives_the_same(job, fraction):
    labels, n, seed = job
    classes = Classes.of("y", labels)
    ranks = draw_classes(classes, n, "test", seed)
    count = Partial(fraction).n_exchanged(len(labels), n)
    for epoch in range(4):
        following = next_ranks(Partial(fraction), ranks, n, seed=seed, epoch=epoch, classes=classes)
        moved = following != ranks
        assert np.bincount(ranks[moved], minlength=n).tolist() == [count] * n
        assert np.bincount(following[moved], minlength=n).tolist() == [count] * n
        assert is_balanced(labels, following, n)
        again = next_ranks(Partial(fraction), ranks, n, seed=seed, epoch=epoch, classes=classes)
        np.testing.assert_array_equal(following, again)
        ranks = following


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


def every_balanced(labels, n):
    return {
        ranks for ranks in itertools.product(range(n), repeat=len(labels)) if is_balanced(labels, np.array(ranks), n)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("labels", "n"), [([0, 0, 0, 1, 1, 2], 2), ([0, 0, 1, 1, 2], 3), ([0, 0, 0, 0, 1, 1, 2], 3)])
def test_every_balanced_assignment_is_drawn_and_no_worker_is_favoured(labels, n):
    labels = np.array(labels)
    classes = Classes.of("y", labels)
    possible = every_balanced(labels, n)
    rounds = 40 * len(possible)
    drawn = Counter(tuple(draw_classes(classes, n, "test", seed).tolist()) for seed in range(rounds))
    assert drawn.keys() == possible
    counts = np.zeros((len(labels), n))
    for ranks, count in drawn.items():
        counts[np.arange(len(labels)), ranks] += count
    assert np.abs(counts - rounds / n).max() < 5 * np.sqrt(rounds / n)
    # Those with the same counts of classes are equally likely: 40 or so each, or some other number.
    alike = {}
    for ranks in possible:
        key = tuple(np.bincount(labels * n + ranks, minlength=n * (labels.max() + 1)).tolist())
        alike.setdefault(key, []).append(drawn[ranks])
    for found in alike.values():
        assert np.abs(np.array(found) - np.mean(found)).max() < 5 * np.sqrt(np.mean(found))


@pytest.mark.slow
@pytest.mark.parametrize(("labels", "n", "count"), [([0, 0, 0, 0, 1, 1], 2, 1), ([0, 0, 1, 1, 2, 3], 3, 1)])
def test_exchanges_reach_every_balanced_assignment_with_the_same_sizes(labels, n, count):
    labels = np.array(labels)
    classes = Classes.of("y", labels)
    ranks = draw_classes(classes, n, "test")
    possible = every_balanced(labels, n)
    seen = Counter()
    for epoch in range(60 * len(possible)):
        ranks = exchange_in_classes(ranks, classes, n, count, 0, epoch)
        seen[tuple(ranks.tolist())] += 1
    assert seen.keys() == possible


@pytest.mark.parametrize("assignment", [Local(), Partial(0.3), Partial(1), Global()])
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
        ({"assignment": Aligned()}, r"balance='y' .*None with the assignment 'aligned'.*Use 'global', 'partial:Q'"),
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
