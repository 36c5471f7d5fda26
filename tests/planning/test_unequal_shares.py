"""Every assignment and every delivery with unequal shares: exactly once, in the right numbers, or a clear refusal."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import DELIVERIES, Choices, Classes, EpochPlanner, GivenSharding, Remainder, ShuffleSpec
from dshuffle.planning.assignment import ASSIGNMENTS
from dshuffle.planning.planner import OwnPlanner, plans_own_parts
from dshuffle.planning.remainder import SampleDigest, training_orders, workers_of

from ..conftest import at_most, written
from ..draws import check_plan

Q = 211
WEIGHTS = (1000, 250, 1000, 700)
# The proportions of 211 samples, by hand: 71.52, 17.88, 71.52 and 50.06.
SIZES = [72, 18, 71, 50]


def spec_of(rule="global", delivery="peer", sharding="random", cache_fraction=None, every=1, **more):
    """Unequal shares, or equal ones of a rule that does not draw others."""
    text = written(rule, fraction=0.2, rows=3)
    choices = Choices(text, delivery, sharding=sharding, cache_fraction=cache_fraction, every=every)
    weights = WEIGHTS if choices.assignment.can_weigh else ()
    return ShuffleSpec(Q, len(WEIGHTS), choices, first_weights=weights, **more)


def check_sizes(spec, sizes):
    if not spec.weights:
        assert max(sizes) - min(sizes) <= spec.chunk_rows
    elif spec.choices.assignment.in_chunks:  # whole chunks, and one sample at the end
        assert np.abs(np.subtract(sizes, SIZES)).max() <= 4
        assert sorted(size % 3 for size in sizes) == [0, 0, 0, 1]
    else:
        assert list(sizes) == SIZES


@pytest.mark.parametrize(("sharding", "every"), [("random", 1), ("contiguous", 2)])
@pytest.mark.parametrize("rule", ASSIGNMENTS)
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_contract(rule, delivery, sharding, every):
    if every > 1 and not ASSIGNMENTS[rule].moves:
        pytest.skip("it has no exchange in any epoch")
    check_contract(rule, delivery, sharding, every)


def check_contract(rule, delivery, sharding="random", every=1):
    """What every assignment and delivery promises."""
    fractions = [None] if not DELIVERIES[delivery].supports(4, excess=True) else [None, 0.5]
    for cache_fraction in fractions:
        spec = spec_of(rule, delivery, sharding, cache_fraction, every)
        planner = EpochPlanner(spec)
        plans = [planner.load(), *(planner.advance() for _ in range(3))]
        for before, plan in itertools.pairwise(plans):
            if spec.choices.has_exchange(plan.epoch):
                check_plan(plan.packets, before.holders, plan.ranks, 4)
        for plan in plans:
            parts = [plan.for_worker(rank) for rank in range(4)]
            np.testing.assert_array_equal(np.sort(np.concatenate([part.own for part in parts])), np.arange(Q))
            check_sizes(spec, [len(part.own) for part in parts])
            assert plan.shares == (min(len(part.own) for part in parts), max(len(part.own) for part in parts))
            assert max(len(part.own) for part in parts) <= spec.largest_share <= spec.capacity
            np.testing.assert_array_equal(workers_of(spec, plan.epoch, np.arange(Q)), plan.ranks)
            for part, order in zip(parts, training_orders(spec, plan.epoch), strict=True):
                np.testing.assert_array_equal(part.order, order)
        if plans_own_parts(spec, delivery):
            for rank, plan in itertools.product(range(4), plans):
                alone = OwnPlanner(spec, rank)
                own = alone.plan(plan.epoch, delivery)
                np.testing.assert_array_equal(own.own, plan.for_worker(rank).own)
                assert alone.shares(plan.epoch) == plan.shares
                assert own.n_received <= spec.max_incoming or plan.epoch == 0
        later = EpochPlanner(dataclasses.replace(spec, first_epoch=2))
        for plan in plans[2:]:
            begun = later.load() if plan.epoch == 2 else later.advance()
            np.testing.assert_array_equal(begun.ranks, plan.ranks)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"balance": Classes("y")}, r"shares='2,1' is not allowed; it must be 'even' with balance='y'"),
        ({"sharding": "round-robin"}, r"it must be 'even' with sharding='round-robin'.*'random' or 'contiguous'"),
        (
            {"sharding": GivenSharding.of("mine", [0, 1])},
            r"it must be 'even' with sharding='mine'.*, use the assignment 'chunks'",
        ),
    ],
)
def test_refused_choices(changes, words):
    with pytest.raises(InvalidParameter, match=words):
        Choices(shares=[2, 1], **changes)


def test_a_rule_that_draws_equal_shares_refuses_others(monkeypatch):
    monkeypatch.setattr(ASSIGNMENTS["global"], "can_weigh", False)
    with pytest.raises(InvalidParameter, match=r"shares='measured'.*'even' with the assignment 'global'.*such as"):
        Choices(shares="measured")


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (Choices("partial:0.5"), r"the smallest share has 18 samples, and 'partial:0.5' exchanges 27 of each rank"),
        (Choices(cache_fraction=0.3), r"the largest share has 72 of 211 samples, and cache_fraction=0.3.*larger cache"),
        (Choices("chunks:60"), r"n_samples=3 is not allowed.*a whole chunk for each worker"),
    ],
)
def test_shares_that_do_not_fit(choices, words):
    with pytest.raises(InvalidParameter, match=words):
        ShuffleSpec(Q, 4, choices, first_weights=WEIGHTS)


@pytest.mark.parametrize("rule", ["local", "partial"])
def test_few_samples_move_when_shares_change(rule):
    """Ranks keep their samples, as far as their new shares have room."""
    before = dataclasses.replace(spec_of(rule), first_weights=())
    history = before.history.changed(range(4), epoch=3, carried=2, weights=WEIGHTS)
    after = before.with_history(history, 3)
    assert after.weights == WEIGHTS
    old, new = (workers_of(spec, epoch, np.arange(Q)) for spec, epoch in ((before, 2), (after, 3)))
    sizes = np.bincount(old)
    assert np.bincount(new).tolist() == SIZES
    assert np.count_nonzero(old != new) == sum(max(0, had - has) for had, has in zip(sizes, SIZES, strict=True))
    assert history.changed(range(4), epoch=6, carried=5, weights=WEIGHTS) == history


@at_most(25)
@given(data=st.data())
@pytest.mark.parametrize("rule", ASSIGNMENTS)
def test_what_is_left_of_an_epoch(rule, data):
    check_what_is_left(rule, data)


def check_what_is_left(rule, data):
    """Sessions with other shares and other numbers of ranks go on with what earlier ones left, exactly once."""
    base, epoch = spec_of(rule), data.draw(st.integers(1, 2))
    remainder, trained, spec = Remainder(epoch, ()), [], base
    keeps, history = spec.keeps_samples, spec.history
    for _ in range(3):
        n_workers = data.draw(st.integers(2, 4))
        weights = tuple(data.draw(st.lists(st.integers(300, 1000), min_size=n_workers, max_size=n_workers)))
        weights = data.draw(st.sampled_from([(), weights])) if ASSIGNMENTS[rule].can_weigh else ()
        if keeps:
            former = [rank if rank < history.n_workers else -1 for rank in range(n_workers)]
            history = history.changed(former, epoch=epoch, carried=epoch, weights=weights)
            spec = base.with_history(history, epoch)
        else:
            spec = dataclasses.replace(base.with_workers(n_workers), first_weights=weights, first_epoch=epoch)
        left = []
        for rank, order in enumerate(training_orders(spec, epoch)):
            keep, shares = remainder.left(spec, rank)
            left.append(order[keep])
        assert shares == (min(map(len, left)), max(map(len, left)))
        assert sorted([*trained, *np.concatenate(left).tolist()]) == list(range(Q))
        counts = tuple(data.draw(st.integers(0, len(own))) for own in left)
        done = np.concatenate([own[:count] for own, count in zip(left, counts, strict=True)]).tolist()
        trained += done
        if done:
            remainder = remainder.followed_by(counts, SampleDigest.of(np.array(done), 0), spec.weights)
        elif keeps and remainder.trained:  # as a state is read
            last_counts, last_weights = remainder.sessions[-1]
            history = history.trained_in(epoch, len(last_counts), last_weights)
    assert remainder.digest is None or remainder.digest == SampleDigest.of(np.array(trained), 0)
