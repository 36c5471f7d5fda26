"""The sampler for map-style scripts: every rank by itself, all of them together every sample once."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.integrations.sampler import ExchangeSampler
from dshuffle.planning import Choices, Classes, EpochPlanner, ShuffleSpec, parse_assignment


@settings(max_examples=30, deadline=None)
@given(
    n_samples=st.integers(5, 60),
    world_size=st.integers(1, 5),
    assignment=st.sampled_from(["partial:0.3", "global", "local", "chunks:1"]),
    sharding=st.sampled_from(["random", "contiguous"]),
    n_classes=st.sampled_from([0, 0, 1, 3]),
    seed=st.integers(-2, 2),
)
def test_each_epoch_has_the_samples_and_order_of_a_shuffler(
    n_samples, world_size, assignment, sharding, n_classes, seed
):
    labels = None
    if n_classes and not assignment.startswith("chunks"):
        sharding, labels = "random", np.arange(n_samples) % n_classes

    def ranks(mode):
        options = {"assignment": assignment, "sharding": sharding, "balance": labels, "seed": seed, "mode": mode}
        return [ExchangeSampler(n_samples, rank=rank, world_size=world_size, **options) for rank in range(world_size)]

    spec = ShuffleSpec(
        n_samples,
        world_size,
        Choices(
            assignment=parse_assignment(assignment),
            delivery="peer",
            sharding=sharding,
            balance=None if labels is None else Classes.of("y", labels),
            seed=seed,
        ),
    )
    planner = EpochPlanner(spec)
    samplers = {mode: ranks(mode) for mode in ("uneven", "pad", "drop")}
    held = [set() for _ in range(world_size)]
    for epoch in range(4):
        plan = planner.advance() if epoch else planner.load()
        for all_ranks in samplers.values():
            for sampler in all_ranks:
                sampler.set_epoch(epoch)
        for rank, sampler in enumerate(samplers["uneven"]):
            order = plan.for_worker(rank).order.tolist()
            assert list(sampler) == order
            assert len(sampler) == len(order)
            if epoch:
                held[rank] -= set(sampler.departed.tolist())
            held[rank] |= set(sampler.arrived.tolist())
            assert held[rank] == set(order)
            padded, dropped = list(samplers["pad"][rank]), list(samplers["drop"][rank])
            assert padded == (order + order)[: plan.shares[1]]
            assert dropped == order[: plan.shares[0]]


@pytest.mark.parametrize("assignment", ["partial:0.4", "global"])
def test_classes_stay_in_equal_parts(assignment):
    labels = np.repeat([7, 3, 5], [50, 20, 31])
    options = {"world_size": 4, "assignment": assignment, "balance": labels, "mode": "uneven"}
    ranks = [ExchangeSampler(101, rank=rank, **options) for rank in range(4)]
    for epoch in range(3):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        counts = np.array([np.bincount(labels[list(sampler)]) for sampler in ranks])
        assert np.ptp(counts, axis=0).max() == 1
        assert all(len(sampler.arrived) > 0 for sampler in ranks)


def test_going_back_is_allowed():
    sampler = ExchangeSampler(100, rank=1, world_size=3, assignment="partial:0.5")
    seen = []
    for epoch in (0, 1, 2, 1, 5, 2):
        sampler.set_epoch(epoch)
        seen.append(list(sampler))
    assert seen[1] == seen[3]
    assert seen[2] == seen[5]
    assert len({tuple(order) for order in seen}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 3}, r"rank=3 is not allowed; it must be in \[0, 3\)"),
        ({"n_samples": 2}, "n_samples=2.*fewer samples than ranks"),
        ({"mode": "all"}, "mode='all'"),
        ({"assignment": "aligned"}, "assignment='aligned.*partial:Q"),
        ({"assignment": "chunks"}, "chunks:ROWS"),
        ({"assignment": "half"}, "assignment='half'"),
        ({"sharding": "sorted"}, "sharding='sorted'"),
        ({"seed": 0.5}, r"seed=0\.5"),
        ({"balance": [0, 1]}, r"len\(balance 'given'\)=2 is not allowed"),
        ({"balance": np.arange(10) % 2, "assignment": "chunks:2"}, "balance='given'.*chunks"),
        ({"balance": np.repeat([0, 1], 5), "sharding": "contiguous"}, "sharding='contiguous'.*each class"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(InvalidParameter, match=message):
        ExchangeSampler(**{"n_samples": 10, "rank": 0, "world_size": 3, **options})


def test_it_needs_neither_dask_nor_torch():
    code = """
import sys
from dshuffle.integrations.sampler import ExchangeSampler
print(len(ExchangeSampler(10, rank=0, world_size=2)), {"dask", "distributed", "torch", "zarr"} & set(sys.modules))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "5 set()"


def test_ids_are_plain_integers():
    assert {type(sample) for sample in ExchangeSampler(10, rank=0, world_size=2)} == {int}
    assert np.issubdtype(ExchangeSampler(10, rank=0, world_size=2).arrived.dtype, np.int64)


@given(stop=st.integers(0, 20), epoch=st.integers(0, 3), seed=st.integers(-2, 2))
@settings(max_examples=20, deadline=None)
def test_a_sampler_goes_on_where_another_one_was(stop, epoch, seed):
    options = {"rank": 1, "world_size": 3, "assignment": "partial:0.3", "seed": seed}
    first, second = ExchangeSampler(60, **options), ExchangeSampler(60, **options)
    first.set_epoch(epoch)
    expected = list(first)
    ids = iter(first)
    seen = [next(ids) for _ in range(stop)]
    second.load_state_dict(first.state_dict() if stop else {**first.state_dict(), "yielded": 0})
    assert second.state_dict()["yielded"] == stop
    assert seen + list(second) == expected
    assert list(second) == expected  # only the first iteration begins in the middle
    second.set_epoch(epoch + 1)
    first.set_epoch(epoch + 1)
    assert list(second) == list(first)


@pytest.mark.parametrize(
    "change",
    [
        {"draw_version": 1},
        {"rank": 1},
        {"world_size": 2},
        {"seed": 5},
        {"assignment": "local"},
        {"yielded": 100},
        {"yielded": -1},
        {"epoch": None},
    ],
    ids=str,
)
def test_states_that_are_not_of_this_sampler(change):
    sampler = ExchangeSampler(60, rank=0, world_size=3)
    [name] = change
    with pytest.raises(InvalidParameter, match=rf"state\['{name}'\]="):
        sampler.load_state_dict({**sampler.state_dict(), **change})
