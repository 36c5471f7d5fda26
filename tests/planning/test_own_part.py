"""What a worker plans alone is what the plan for everybody says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.planner import OwnPlanner, plans_own_parts

ASSIGNMENTS = ["local", "global", "chunks:1", "chunks:3", "partial:0.3", "partial:1"]


def check_same(one, other):
    assert one.keys() == other.keys()
    for who in one:
        np.testing.assert_array_equal(one[who], other[who])


@given(st.data())
def test_own_parts_are_those_of_the_whole_plan(data):
    n = data.draw(st.integers(1, 6))
    assignment = data.draw(st.sampled_from(ASSIGNMENTS))
    delivery = data.draw(st.sampled_from(["peer", "storage"]))
    sharding = data.draw(st.sampled_from(["random", "contiguous"]))
    q = data.draw(st.integers(3 * n, 200))
    every = 1 if assignment == "local" else data.draw(st.integers(1, 3))
    choices = Choices(assignment, delivery, sharding=sharding, every=every, seed=data.draw(st.integers()))
    first = data.draw(st.sampled_from([0, 0, 3]))
    spec = ShuffleSpec(q, n, choices, first_epoch=first)
    assert plans_own_parts(spec, delivery)
    planner = EpochPlanner(spec)
    alone = [OwnPlanner(spec, rank) for rank in range(n)]
    for epoch in range(first, first + 4):
        plan = planner.advance() if epoch > first else planner.load()
        received = sent = 0
        for rank in range(n):
            # A planner that goes on from the epoch before, or one that starts here.
            planner_of_rank = alone[rank] if (epoch + rank) % 3 else OwnPlanner(spec, rank)
            own = planner_of_rank.plan(epoch, delivery)
            part = plan.for_worker(rank)
            for name in ("own", "permutation", "held"):
                np.testing.assert_array_equal(getattr(own, name), getattr(part, name))
            check_same(own.receives, part.receives)
            check_same(own.sends, part.sends)
            assert planner_of_rank.shares(epoch) == plan.shares
            received, sent = received + own.n_received, sent + own.n_sent
        assert received == plan.packets.n_components
        assert sent == (received if epoch > first and delivery == "peer" else 0)
        if epoch > first and epoch % every:
            assert received == 0


@pytest.mark.parametrize(
    ("choices", "n_workers"),
    [
        (Choices("global", cache_fraction=0.5), 4),
        (Choices("global", "server"), 4),
        (Choices("global", "leftover"), 4),
        (Choices("partial:0.5", sharding="round-robin"), 4),
        (Choices("partial:0.5", cache_fraction=0.5), 4),
        (Choices("aligned"), 4),
        (Choices("global", sharding="round-robin"), 4),
    ],
)
def test_what_depends_on_others_is_planned_for_everybody(choices, n_workers):
    assert not plans_own_parts(ShuffleSpec(100, n_workers, choices), choices.delivery)
