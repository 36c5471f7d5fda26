"""Plans with samples that every worker holds and trains on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import (
    DELIVERIES,
    SERVER,
    STORE,
    Aligned,
    Choices,
    Classes,
    EpochPlanner,
    GivenSharding,
    Global,
    Local,
    Partial,
    ShuffleSpec,
)
from dshuffle.planning.epoch_plan import check_plan


@st.composite
def specs(draw):
    n = draw(st.sampled_from([1, 2, 5, 66]))
    q = draw(st.integers(n, 2 * n + 40))
    n_broadcast = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    broadcast = np.sort(rng.choice(q + n_broadcast, n_broadcast, replace=False))
    ranks = rng.integers(0, n, q + n_broadcast)
    ranks[np.delete(np.arange(q + n_broadcast), broadcast)] = rng.permutation(np.arange(q) % n)
    delivery = draw(st.sampled_from(sorted(DELIVERIES if n <= 64 else {"peer", "server", "storage", "clique"})))
    fraction = draw(st.sampled_from([None] if delivery == "leftover" else [None, (1 + 1 / n) / 2, 1.0]))
    return ShuffleSpec(
        q + n_broadcast,
        n,
        Choices(
            assignment=draw(st.sampled_from([Local(), Partial(0.3), Partial(1), Global(), Aligned(), Aligned(0.4)])),
            delivery=delivery,
            caching=draw(st.sampled_from(["uniform", "recent", "even"])),
            cache_fraction=fraction,
            sharding=GivenSharding.of("mine", ranks, broadcast),
            seed=draw(st.integers()),
        ),
    )


@given(specs())
@pytest.mark.slow
def test_broadcast_samples_are_with_every_worker_and_never_move(spec):
    broadcast = spec.choices.sharding.broadcast
    others = np.delete(np.arange(spec.n_samples), broadcast)
    assert spec.n_broadcast == len(broadcast)
    planner = EpochPlanner(spec)
    before = None
    for epoch in range(4):
        plan = planner.advance() if epoch else planner.load()
        assert plan.epoch == epoch
        parts = [plan.for_worker(rank) for rank in range(spec.n_workers)]
        trained = np.concatenate([part.order for part in parts])
        times = np.bincount(trained, minlength=spec.n_samples)
        assert (times[others] == 1).all()
        assert (times[broadcast] == spec.n_workers).all()
        for part in parts:
            assert (np.diff(part.held) > 0).all()
            assert np.isin(broadcast, part.held).all()
            assert np.isin(part.own, part.held).all()
            assert len(part.held) <= spec.capacity
            assert len(part.own) <= spec.largest_share
            if epoch:
                assert sum(map(len, part.receives.values())) <= spec.max_incoming
            else:
                np.testing.assert_array_equal(part.receives[STORE], part.held)
        sizes = [len(part.own) for part in parts]
        assert plan.shares == (min(sizes), max(sizes))
        assert max(sizes) - min(sizes) <= 1
        assert len(plan.for_worker(SERVER).own) == 0
        if epoch:
            assert not np.isin(plan.packets.samples, broadcast).any()
            # What is dealt out is delivered, seen from the numbers of the dataset as well.
            destinations = np.where(plan.ranks < 0, 0, plan.ranks)
            check_plan(plan.packets, before.holders, destinations, spec.n_workers)
            assert plan.n_needed == len(np.unique(plan.packets.samples)) or plan.packets.coded
        before = plan


@pytest.mark.parametrize("assignment", [Local(), Partial(0.4), Global(), Aligned()])
@pytest.mark.parametrize("delivery", ["peer", "clique"])
def test_others_are_planned_for_as_if_they_were_alone(assignment, delivery):
    rng = np.random.default_rng(0)
    broadcast, ranks = np.array([3, 50, 51, 99]), rng.permutation(np.arange(96) % 4)
    others = np.delete(np.arange(100), broadcast)
    alone = ShuffleSpec(
        96,
        4,
        Choices(
            assignment=assignment,
            delivery=delivery,
            cache_fraction=0.5,
            sharding=GivenSharding.of("mine", ranks),
            seed=7,
        ),
    )
    all_ranks = np.zeros(100, np.int32)
    all_ranks[others] = ranks
    given_ranks = GivenSharding.of("mine", all_ranks, broadcast)
    both = ShuffleSpec(
        100, 4, Choices(assignment=assignment, delivery=delivery, cache_fraction=0.5, sharding=given_ranks, seed=7)
    )
    assert both.capacity == alone.capacity + 4
    assert both.max_incoming == alone.max_incoming
    one, other = EpochPlanner(alone), EpochPlanner(both)
    for epoch in range(3):
        a, b = (planner.advance() if epoch else planner.load() for planner in (one, other))
        np.testing.assert_array_equal(a.ranks, b.ranks[others])
        assert (b.ranks[broadcast] == -1).all()
        if epoch:
            np.testing.assert_array_equal(others[a.packets.samples], b.packets.samples)
            assert a.n_needed == b.n_needed


def test_what_is_broadcast_has_no_part_in_the_balance():
    labels = np.repeat([0, 1, 2], [40, 20, 3])
    ranks = np.concatenate([np.arange(60) % 4, [0, 0, 0]])
    spec = ShuffleSpec(
        63,
        4,
        Choices(
            assignment=Partial(0.5),
            delivery="peer",
            sharding=GivenSharding.of("m", ranks, [60, 61, 62]),
            balance=Classes.of("y", labels),
            seed=0,
        ),
    )
    planner = EpochPlanner(spec)
    for epoch in range(4):
        plan = planner.advance() if epoch else planner.load()
        assert np.bincount(plan.ranks[:40]).tolist() == [10] * 4
        assert np.bincount(plan.ranks[40:60]).tolist() == [5] * 4


@pytest.mark.parametrize(
    ("broadcast", "message"),
    [
        ([2, 1], r"broadcast=array\(\[2, 1\]\) .*ascending samples in \[0, 6\), each once"),
        ([1, 1], "each once"),
        ([6], r"in \[0, 6\)"),
        ([-1], r"in \[0, 6\)"),
        ([0.5], "broadcast is not allowed: it has dtype float64 and shape"),
        ([1, 3], "worker 0 has 3, not counting the broadcast samples"),
        ([0, 1, 2, 3, 4], "samples that are not broadcast=1 is not allowed; it must be an integer >= 2"),
    ],
)
def test_what_cannot_be_broadcast(broadcast, message):
    with pytest.raises(InvalidParameter, match=message):
        GivenSharding.of("mine", [0, 1, 0, 1, 0, 1], broadcast)
