"""Shuffle quality against brute force, and what is known of it for every assignment."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Aligned, Choices, Chunks, EpochPlanner, GivenSharding, Global, Local, Partial, ShuffleSpec
from dshuffle.planning.mixing import (
    ShuffleQuality,
    mean_deviation,
    orders_of_first_epochs,
    planned_quality,
    shuffle_quality,
)

from ..conftest import at_most


@st.composite
def histories(draw):
    """Some epochs of any orders, a chunk size, a batch size and classes."""
    q = draw(st.integers(2, 14))
    n = draw(st.integers(1, 4))
    epochs = []
    for _ in range(draw(st.integers(1, 3))):
        samples = draw(st.permutations(range(q)))
        cuts = sorted(draw(st.lists(st.integers(0, q), min_size=n - 1, max_size=n - 1)))
        epochs.append([np.array(samples[a:b], dtype=np.int64) for a, b in itertools.pairwise([0, *cuts, q])])
    classes = draw(st.lists(st.integers(0, 3), min_size=q, max_size=q))
    return epochs, draw(st.integers(1, q)), draw(st.integers(1, 5)), classes


def brute_force(epochs, chunk_rows, batch_rows, classes):
    q = len(classes)
    pairs = list(itertools.combinations(range(q), 2))
    workers = [{j: rank for rank, order in enumerate(orders) for j in order.tolist()} for orders in epochs]
    once, again = 0, 0
    for before, after in itertools.pairwise(workers):
        for i, j in pairs:
            if i // chunk_rows == j // chunk_rows and before[i] == before[j]:
                once += 1
                again += after[i] == after[j]
    chance = np.mean([np.mean([ranks[i] == ranks[j] for i, j in pairs]) for ranks in workers])
    distances, spread, expected = [], 0.0, 0.0
    for orders in epochs:
        batches = [
            [order[start : start + batch_rows].tolist() for start in range(0, len(order), batch_rows)]
            for order in orders
        ]
        steps = itertools.chain.from_iterable(itertools.zip_longest(*batches, fillvalue=[]))
        place = {j: at for at, j in enumerate(itertools.chain.from_iterable(steps))}
        distances.append(np.mean([abs(place[j] - place[j + 1]) for j in range(q - 1)]))
        for batch in itertools.chain.from_iterable(batches):
            for one in set(classes):
                share = classes.count(one) / q
                spread += abs(sum(classes[j] == one for j in batch) / len(batch) - share)
                counts = range(len(batch) + 1)
                ways = [
                    math.comb(classes.count(one), k) * math.comb(q - classes.count(one), len(batch) - k) for k in counts
                ]
                expected += sum(way * abs(k / len(batch) - share) for k, way in zip(counts, ways, strict=True)) / sum(
                    ways
                )
    every = np.mean([abs(i - j) for i, j in pairs])
    return (
        again / once if once else None,
        chance,
        np.mean(distances) / every,
        spread / expected if expected > 1e-12 else None,
    )


@at_most(150)
@given(histories())
def test_figures_are_those_of_brute_force(history):
    epochs, chunk_rows, batch_rows, classes = history
    found = shuffle_quality(epochs, chunk_rows=chunk_rows, batch_rows=batch_rows, classes=classes)
    meets_again, by_chance, distance, spread = brute_force(*history)
    assert found.meets_again == (None if meets_again is None else pytest.approx(meets_again))
    assert found.by_chance == pytest.approx(by_chance)
    assert found.neighbour_distance == pytest.approx(distance)
    assert found.class_spread == (None if spread is None else pytest.approx(spread))


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 12))
def test_mean_deviation_is_that_of_all_draws(n, marked, drawn):
    marked, drawn = min(marked, n), min(drawn, n)
    counts = [sum(place < marked for place in draw) for draw in itertools.combinations(range(n), drawn)]
    mean = drawn * marked / n
    assert mean_deviation(n, marked, drawn) == pytest.approx(np.mean([abs(k - mean) for k in counts]), abs=1e-12)


def quality(assignment, sharding="random", n=4, cache_fraction=None, **changes):
    spec = ShuffleSpec(
        8000,
        n,
        Choices(assignment=assignment, delivery="peer", cache_fraction=cache_fraction, sharding=sharding, seed=3),
    )
    options = {"epochs": 4, "chunk_rows": 100, "batch_rows": 50, "classes": np.arange(8000) // 800}
    return planned_quality(spec, **options | changes)


def test_local_rows_meet_for_ever():
    once, never = quality(Local()), quality(Local(), "contiguous")
    assert once.meets_again == never.meets_again == 1
    assert once.class_spread == pytest.approx(1, abs=0.03)
    assert never.class_spread > 3  # a worker sees two and a half of ten classes


@pytest.mark.parametrize("assignment", [Global(), Aligned()])
def test_uniform_draws_are_as_random_as_chance(assignment):
    found = quality(assignment)
    assert found.meets_again == pytest.approx(found.by_chance, abs=0.01)
    assert found.by_chance == pytest.approx(0.25, abs=0.001)
    assert found.neighbour_distance == pytest.approx(1, abs=0.02)
    assert found.class_spread == pytest.approx(1, abs=0.03)


def test_partial_lies_between():
    # Both of two rows of one worker stay with probability 0.49, else they seldom meet: a third of 0.09.
    assert quality(Partial(0.3), "contiguous", epochs=2).meets_again == pytest.approx(0.49 + 0.03, abs=0.01)


def test_chunks_keep_rows_together_and_classes_apart():
    found = quality(Chunks(100))
    assert found.meets_again == 1
    assert found.neighbour_distance == pytest.approx(1, abs=0.05)  # a worker mixes the rows of its chunks
    assert 1.1 < found.class_spread < quality(Local(), "contiguous").class_spread
    assert quality(Chunks(1000)).class_spread > found.class_spread  # fewer chunks a worker, fewer classes


def test_rows_in_the_order_of_the_store_are_neighbours():
    orders = [[np.arange(0, 50), np.arange(50, 100)]]
    found = shuffle_quality(orders, chunk_rows=10, batch_rows=100)
    assert found.neighbour_distance == pytest.approx(3 / 101)
    assert found.class_spread is None
    assert found.meets_again is None  # of one epoch nobody can tell
    stratified = shuffle_quality(orders, chunk_rows=10, batch_rows=10, classes=np.arange(100) % 10)
    assert stratified.class_spread == 0


def test_orders_are_those_that_workers_train_in():
    for cache_fraction in (None, 0.5):
        spec = ShuffleSpec(
            200,
            3,
            Choices(
                assignment=Aligned(),
                delivery="clique",
                caching="even",
                cache_fraction=cache_fraction,
                sharding="random",
                seed=1,
            ),
        )
        planner = EpochPlanner(spec)
        for epoch, orders in enumerate(orders_of_first_epochs(spec, 3)):
            plan = planner.advance() if epoch else planner.load()
            for rank, order in enumerate(orders):
                np.testing.assert_array_equal(order, plan.for_worker(rank).order)


def test_samples_that_all_train_on_have_no_quality():
    sharding = GivenSharding.of("mine", np.arange(40) % 4, np.arange(4))
    spec = ShuffleSpec(40, 4, Choices(assignment=Global(), delivery="peer", sharding=sharding, seed=0))
    with pytest.raises(InvalidParameter, match=r"sharding='mine'.*without broadcast samples.*only the ranks"):
        planned_quality(spec, epochs=2, chunk_rows=4, batch_rows=4)


def test_random_orders_come_out_as_chance_has_it():
    rng = random.Random(0)
    epochs = [np.split(np.array(rng.sample(range(3000), 3000)), 3) for _ in range(3)]
    found = shuffle_quality(epochs, chunk_rows=30, batch_rows=40, classes=[rng.randrange(5) for _ in range(3000)])
    assert found.meets_again == pytest.approx(found.by_chance, abs=0.01)
    assert found.neighbour_distance == pytest.approx(1, abs=0.03)
    assert found.class_spread == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 1}, "epochs=1 .* >= 2.*meet again"),
        ({"chunk_rows": 0}, "chunk_rows=0"),
        ({"batch_rows": 2.5}, r"batch_rows=2\.5"),
        ({"classes": np.arange(7999)}, "epochs is not allowed: an epoch has 8000 samples.*one class per sample"),
        ({"classes": np.full(8000, 0.5)}, "classes is not allowed: it has dtype float64 .*integers >= 0"),
        ({"classes": np.full(8000, -1)}, "classes is not allowed: it has dtype int64 .*integers >= 0"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(InvalidParameter, match=message):
        quality(Global(), **changes)


def test_no_epochs_and_figures_that_cannot_be():
    with pytest.raises(InvalidParameter, match=r"epochs is not allowed.*at least one epoch"):
        shuffle_quality([], chunk_rows=1, batch_rows=1)
    with pytest.raises(InvalidParameter, match=r"by_chance=1.5 .*\[0, 1.0\]"):
        ShuffleQuality(meets_again=1.0, by_chance=1.5, neighbour_distance=1.0, class_spread=None)
