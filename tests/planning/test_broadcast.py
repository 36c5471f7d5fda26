"""Plans with samples that every worker holds and trains on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import DELIVERIES, SERVER, STORE, Choices, EpochPlanner, GivenSharding, ShuffleSpec

from ..draws import check_plan


@st.composite
def specs(draw):
    n = draw(st.sampled_from([1, 2, 5, 66]))
    q = draw(st.integers(n, 2 * n + 40))
    n_broadcast = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    broadcast = np.sort(rng.choice(q + n_broadcast, n_broadcast, replace=False))
    ranks = rng.integers(0, n, q + n_broadcast)
    ranks[np.delete(np.arange(q + n_broadcast), broadcast)] = rng.permutation(np.arange(q) % n)
    delivery = draw(st.sampled_from(sorted(DELIVERIES if n <= 64 else {"peer", "server", "storage"})))
    fraction = draw(st.sampled_from([None] if delivery == "leftover" else [None, (1 + 1 / n) / 2, 1.0]))
    choices = Choices(
        draw(st.sampled_from(["local", "partial:0.3", "partial:1", "global", "aligned"])),
        delivery,
        draw(st.sampled_from(["uniform", "recent", "even"])),
        fraction,
        sharding=GivenSharding.of("mine", ranks, broadcast),
        seed=draw(st.integers()),
    )
    return ShuffleSpec(q + n_broadcast, n, choices)


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


@pytest.mark.parametrize(
    ("broadcast", "message"),
    [
        ([2, 1], r"broadcast=array\(\[2, 1\]\) .*ascending samples, each once"),
        ([1, 1], "each once"),
        ([6], r"in \[0, 6\)"),
        ([-1], r"in \[0, 6\)"),
        ([0.5], "broadcast.dtype='float64'"),
        ([1, 3], "worker 0 has 3, not counting the broadcast samples"),
        ([0, 1, 2, 3, 4], "samples that are not broadcast=1 is not allowed; it must be an integer >= 2"),
    ],
)
def test_what_cannot_be_broadcast(broadcast, message):
    with pytest.raises(InvalidParameter, match=message):
        GivenSharding.of("mine", [0, 1, 0, 1, 0, 1], broadcast)
