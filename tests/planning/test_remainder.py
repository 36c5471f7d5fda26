"""What is left of an epoch: every sample exactly once, whoever had trained on what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, EpochPlanner, GivenSharding, Remainder, ShuffleSpec
from dshuffle.planning.remainder import SampleDigest, training_orders

WAYS = [
    Choices("global"),
    Choices("partial:0.3"),
    Choices("local"),
    Choices("chunks:7"),
    Choices("global", cache_fraction=0.8),
    Choices("partial:0.5", cache_fraction=0.8, caching="recent"),
    Choices("aligned", "leftover"),
    Choices("global", "coded", cache_fraction=0.8),
    Choices("global", every=2, between="reverse"),
    Choices("partial:0.3", every=2),
    Choices("partial:0.5", cache_fraction=0.8, caching="recent", every=3, between="reverse"),
    Choices("aligned", "leftover", every=2),
]


@pytest.mark.parametrize("choices", WAYS, ids=lambda choices: choices.label)
@given(data=st.data())
def test_sessions_one_after_the_other_train_on_every_sample_once(choices: Choices, data: st.DataObject) -> None:
    epoch = data.draw(st.integers(0, 3))
    trained: tuple[tuple[int, ...], ...] = ()
    seen: list[int] = []
    for _ in range(data.draw(st.integers(1, 3))):
        n_workers = data.draw(st.integers(2, 5))
        spec = ShuffleSpec(60, n_workers, choices, first_epoch=epoch)
        orders = list(training_orders(spec, epoch))
        assert Remainder(epoch, trained).trained_digest(spec) == SampleDigest.of(np.array(seen, np.int64), 0)
        left = [Remainder(epoch, trained).left(spec, rank) for rank in range(n_workers)]
        sizes = [int(keep.sum()) for keep, _ in left]
        assert {shares for _, shares in left} == {(min(sizes), max(sizes))}
        counts = [data.draw(st.integers(0, size)) for size in sizes]
        for order, (keep, _), count in zip(orders, left, counts, strict=True):
            seen += order[keep][:count].tolist()
        trained += (tuple(counts),)
    spec = ShuffleSpec(60, 3, choices, first_epoch=epoch)
    assert Remainder(epoch, trained).trained_digest(spec) == SampleDigest.of(np.array(seen, np.int64), 0)
    for rank, order in enumerate(training_orders(spec, epoch)):
        seen += order[Remainder(epoch, trained).left(spec, rank)[0]].tolist()
    assert sorted(seen) == list(range(60))


@pytest.mark.parametrize("choices", WAYS, ids=lambda choices: choices.label)
@pytest.mark.parametrize("first", [0, 2])
def test_a_worker_that_takes_a_rank_reads_what_the_one_before_held(choices: Choices, first: int) -> None:
    spec = ShuffleSpec(60, 3, choices, first_epoch=first)
    planner = EpochPlanner(spec)
    planner.load()
    for epoch in range(first + 1, first + 4):
        planned, loaded = planner.advance(), EpochPlanner(spec).load(epoch)
        for rank in range(3):
            one, other = planned.for_worker(rank), loaded.for_worker(rank)
            np.testing.assert_array_equal(one.order, other.order)
            np.testing.assert_array_equal(one.held, other.held)


def test_samples_that_all_train_on_need_the_same_number_of_workers() -> None:
    ranks = np.arange(60, dtype=np.int32) % 3
    spec = ShuffleSpec(60, 3, Choices("local", sharding=GivenSharding.of("mine", ranks, broadcast=[7, 8])))
    assert Remainder(0, ((5, 5, 5),)).left(spec, 0)[0].sum() == Remainder(0, ()).left(spec, 0)[0].sum() - 5
    with pytest.raises(InvalidParameter, match="n_workers=3 is not allowed; it must be 2, as before"):
        Remainder(0, ((5, 5),)).left(spec, 0)


def test_the_digest_that_was_noted_counts() -> None:
    """It does not depend on what this build draws."""
    spec, noted = ShuffleSpec(60, 3, Choices("global")), SampleDigest.of(np.arange(9), 0)
    remainder = Remainder(0, ()).followed_by((4, 5, 0), noted)
    assert remainder == Remainder(0, ((4, 5, 0),), noted)
    assert remainder.trained_digest(spec) == noted
    assert remainder.followed_by((0, 1), SampleDigest.of(np.array([9]), 0)).digest == SampleDigest.of(np.arange(10), 0)
    assert Remainder(0, ((4, 5, 0),)).followed_by((0, 1), noted).digest is None  # a part is not known
