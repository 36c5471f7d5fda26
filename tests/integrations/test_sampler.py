"""The sampler for map-style scripts: every rank by itself, all of them together every sample once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from itertools import repeat
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.integrations import sampler as sampler_module
from dshuffle.integrations.sampler import ExchangeSampler
from dshuffle.planning import Choices, Classes, EpochPlanner, ShuffleSpec

from ..conftest import at_most


def moves(samplers):
    """What comes and what goes on all ranks: samples, with the ranks that they leave and come to."""
    coming, going = Counter(), Counter()
    for number, rank in enumerate(samplers):
        coming.update(zip(rank.arrived.tolist(), rank.sources.tolist(), repeat(number)))
        going.update(zip(rank.departed.tolist(), repeat(number), rank.destinations.tolist()))
    return coming, going


@at_most(30)
@given(
    n_samples=st.integers(5, 60),
    world_size=st.integers(1, 5),
    assignment=st.sampled_from(["partial:0.3", "global", "local", "chunks:1"]),
    sharding=st.sampled_from(["random", "contiguous"]),
    n_classes=st.sampled_from([0, 0, 1, 3]),
    seed=st.integers(-2, 2),
    every=st.integers(1, 3),
    between=st.sampled_from(["redraw", "reverse"]),
)
@pytest.mark.slow
def test_each_epoch_has_the_samples_and_order_of_a_shuffler(
    n_samples, world_size, assignment, sharding, n_classes, seed, every, between
):
    labels = None
    if n_classes and assignment in ("global", "local"):
        sharding, labels = "random", np.arange(n_samples) % n_classes

    options = {"assignment": assignment, "sharding": sharding, "seed": seed}
    options |= {} if assignment == "local" or every == 1 else {"every": every, "between": between}
    samplers = {
        mode: [
            ExchangeSampler(n_samples, world_size, rank, balance=labels, mode=mode, **options)
            for rank in range(world_size)
        ]
        for mode in ("uneven", "pad", "drop")
    }
    classes = None if labels is None else Classes.of("y", labels)
    planner = EpochPlanner(ShuffleSpec(n_samples, world_size, Choices(delivery="peer", balance=classes, **options)))
    held = [set() for _ in range(world_size)]
    for epoch in range(4):
        plan = planner.advance() if epoch else planner.load()
        for all_ranks in samplers.values():
            for sampler in all_ranks:
                sampler.set_epoch(epoch)
        coming, going = moves(samplers["uneven"])
        if epoch:
            assert coming == going
            assert all(sample in held[source] for sample, source, _ in coming)
        else:
            assert {source for _, source, _ in coming} == {-1}
        for rank, sampler in enumerate(samplers["uneven"]):
            order = plan.for_worker(rank).order.tolist()
            assert list(sampler) == order
            assert len(sampler) == len(order)
            if epoch:
                held[rank] -= set(sampler.departed.tolist())
            held[rank] |= set(sampler.arrived.tolist())
            assert held[rank] == set(sampler.held.tolist())
            assert held[rank] == set(order)
            padded, dropped = list(samplers["pad"][rank]), list(samplers["drop"][rank])
            assert padded == (order + order)[: plan.shares[1]]
            assert dropped == order[: plan.shares[0]]


@at_most(40)
@given(
    q=st.integers(12, 60),
    n=st.integers(1, 4),
    every=st.integers(1, 3),
    between=st.sampled_from(["redraw", "reverse"]),
    jump=st.integers(0, 40),
)
def test_samples_are_followed_back_through_few_exchanges(q, n, every, between, jump):
    """After two exchanges, all ranks are drawn anew, and a jump ends where single steps do."""
    options = {"assignment": "partial:0.3", "every": every, "between": between if every > 1 else "redraw"}
    with patch.object(sampler_module, "MOST_STEPS", 2 * q // n):
        ranks = [ExchangeSampler(q, n, rank, mode="uneven", **options) for rank in range(n)]
        length = every * max(1, (2 * q // n) * n // q)
        held = [set(rank.held.tolist()) for rank in ranks]
        for epoch in range(1, jump + 2):
            for rank in ranks:
                rank.set_epoch(epoch)
            coming, going = moves(ranks)
            assert coming == going
            assert all(sample in held[source] for sample, source, _ in coming)
            held = [set(rank.held.tolist()) for rank in ranks]
            orders = [list(rank) for rank in ranks]
            assert [set(order) for order in orders] == held
            assert sorted(sample for order in orders for sample in order) == list(range(q))
        for number in range(n):
            other = ExchangeSampler(q, n, number, mode="uneven", **options)
            other.set_epoch(jump + 1)
            assert list(other) == orders[number]
            assert other.arrived.tolist() == ranks[number].arrived.tolist()
    session = ExchangeSampler(q, n, 0, mode="uneven", **options)
    session.set_epoch(min(jump + 1, length - 1))
    ranks[0].set_epoch(session.epoch)
    assert list(session) == list(ranks[0]), "the first ranks are those of a session"


@pytest.mark.slow
def test_a_late_epoch_takes_no_longer_than_an_early_one():
    """20 million samples on 8 ranks, in processor time."""
    sampler = ExchangeSampler(2 * 10**7, 8, 0, assignment="partial:0.1")
    sampler.set_epoch(1)
    began = time.process_time()
    sampler.set_epoch(503)
    assert time.process_time() - began < 6, "2 s"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 3}, r"rank=3 is not allowed; it must be in \[0, 3\)"),
        ({"dataset": 2}, "n_samples=2 is not allowed.*fewer samples than workers"),
        ({"mode": "all"}, "mode='all'"),
        ({"world_size": 0, "num_replicas": None}, "world_size=0 is not allowed"),
        ({"world_size": 3}, "world_size=3 is not allowed; it must be left out with num_replicas=3"),
        ({"drop_last": True, "mode": "pad"}, "drop_last=True.*mode='pad'"),
        ({"shuffle": False, "assignment": "global"}, "assignment='global'.*shuffle=False"),
        ({"assignment": "aligned"}, "assignment='aligned.*partial:Q"),
        ({"assignment": "chunks"}, "chunks:ROWS"),
        ({"assignment": "half"}, "assignment='half'"),
        ({"sharding": "sorted"}, "sharding='sorted'"),
        ({"seed": 0.5}, r"seed=0\.5"),
        ({"balance": [0, 1]}, r"len\(balance 'given'\)=2 is not allowed"),
        ({"balance": np.arange(10) % 2, "assignment": "chunks:2"}, "balance='given'.*chunks"),
        ({"balance": np.repeat([0, 1], 5), "sharding": "contiguous"}, "sharding='contiguous'.*'random' or"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(InvalidParameter, match=message):
        ExchangeSampler(**{"dataset": 10, "rank": 0, "num_replicas": 3, **options})


def test_a_dataset_that_has_grown_is_refused():
    data = list(range(10))
    sampler = ExchangeSampler(data, 2, 0)
    assert len(list(sampler)) == 5
    data.append(10)
    with pytest.raises(InvalidParameter, match=r"len\(dataset\)=11 .*it must be 10, as before.*new sampler"):
        list(sampler)


def test_it_needs_neither_dask_nor_torch():
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from dshuffle.integrations.sampler import ExchangeSampler
print(len(ExchangeSampler(10, rank=0, num_replicas=2)), {"dask", "distributed", "zarr"} & set(sys.modules))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "5 set()"


CHANGES = {"draw_version": 1, "n_samples": 61, "seed": 5, "assignment": "local", "yielded": 100, "epoch": None}


@pytest.mark.parametrize("name", [*CHANGES, "world_size", "rank", "of"])
def test_states_that_are_not_of_this_sampler(name):
    sampler = ExchangeSampler(60, rank=0, num_replicas=3, mode="uneven")
    state = sampler.state_dict()
    with pytest.raises(InvalidParameter, match=rf"state\['{name}'\]="):
        sampler.load_state_dict({**state, name: CHANGES[name] if name in CHANGES else state[name] + 1})


# -- other numbers of ranks ------------------------------------------------------------------------------------------


def ranks_of(world_size, **options):
    return [ExchangeSampler(options["q"], world_size, rank, **options["sampler"]) for rank in range(world_size)]


@at_most(60)
@given(
    q=st.integers(6, 60),
    worlds=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    assignment=st.sampled_from(["partial:0.3", "global", "local", "chunks:2"]),
    mode=st.sampled_from(["pad", "drop"]),
    epoch=st.integers(0, 2),
    data=st.data(),
)
@patch.object(sampler_module, "MOST_STEPS", 40)  # so that ranks are often drawn anew
def test_other_ranks_go_on_where_the_first_ones_stopped(q, worlds, assignment, mode, epoch, data):
    """Every rank loads the state of rank 0, as scripts save it. The oracle counts what was given."""
    if assignment.startswith("chunks") and -(-q // 2) < max(worlds):
        return
    given, state = [], None
    for number, world_size in enumerate(worlds):
        samplers = ranks_of(world_size, q=q, sampler={"assignment": assignment, "mode": mode})
        for sampler in samplers:
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(state)
            sampler.set_epoch(epoch)  # as a loop does, before it iterates
        assert len({len(sampler) for sampler in samplers}) == 1
        stop = data.draw(st.integers(0, len(samplers[0])), label="stop")
        if number == len(worlds) - 1 or stop == len(samplers[0]):
            for sampler in samplers:
                length = len(sampler)
                ids = list(sampler)
                assert len(ids) == length
                given += ids
            break
        for sampler in samplers:
            ids = iter(sampler)
            given += [next(ids) for _ in range(stop)]
        if stop:
            state = samplers[0].state_dict()
        else:  # nothing was given, so the state is as it was loaded
            state = {**samplers[0].state_dict(), "yielded": samplers[0].num_samples - len(samplers[0])}
    counts = np.bincount(given, minlength=q)
    if mode == "pad":
        assert counts.min() == 1
    else:
        assert counts.max() == 1
    following = ranks_of(world_size, q=q, sampler={"assignment": assignment, "mode": mode})
    for sampler, new in zip(samplers, following, strict=True):
        sampler.set_epoch(epoch + 1)
        new.set_epoch(epoch + 1)
        assert list(sampler) == list(new)


@pytest.mark.parametrize(("before", "now"), [(3, 3), (3, 2), (2, 5)])
def test_nothing_is_left_at_the_end_of_an_epoch(before, now):
    sampler = ExchangeSampler(61, before, 0)
    list(sampler)
    for rank in range(now):
        other = ExchangeSampler(61, now, rank)
        other.load_state_dict(sampler.state_dict())
        assert (len(other), list(other)) == (0, [])
        other.set_epoch(1)
        assert len(other) == -(-61 // now)


@pytest.mark.parametrize("now", [4, 2])
def test_after_what_was_left_whole_epochs_come(now):
    sampler = ExchangeSampler(60, 4, 0)
    ids = iter(sampler)
    for _ in range(5):
        next(ids)
    other = ExchangeSampler(60, now, 1)
    other.load_state_dict(sampler.state_dict())
    assert len(other) == len(list(other)) == 40 // now
    assert list(other) == list(ExchangeSampler(60, now, 1))  # also without set_epoch
    assert (len(other), other.num_samples, other.total_size) == (60 // now, 60 // now, 60)


# -- in place of DistributedSampler ----------------------------------------------------------------------------------


def test_without_shuffling_every_epoch_is_the_same_and_sorted():
    ranks = [ExchangeSampler(range(11), 3, rank, shuffle=False, mode="uneven") for rank in range(3)]
    for epoch in range(3):
        for rank, sampler in enumerate(ranks):
            sampler.set_epoch(epoch)
            assert list(sampler) == list(range(rank, 11, 3))


def test_names_that_say_the_same():
    assert list(ExchangeSampler(12, rank=2, world_size=3)) == list(ExchangeSampler(12, 3, 2))
    assert [len(ExchangeSampler(11, 3, 0, drop_last=drop)) for drop in (False, True)] == [4, 3]


def test_rank_and_number_of_ranks_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InvalidParameter, match=r"rank=None is not allowed.*RANK is not set"):
        ExchangeSampler(12)
    monkeypatch.setenv("RANK", "2")
    assert list(ExchangeSampler(12)) == list(ExchangeSampler(12, 3, 2))


def test_it_is_a_distributed_sampler_of_torch(torch):
    from torch.utils.data import DistributedSampler

    sampler = ExchangeSampler(list("abcdef"), 2, 1, seed=3)
    assert isinstance(sampler, DistributedSampler)
    theirs = DistributedSampler(list("abcdef"), 2, 1, seed=3)
    names = ("dataset", "num_replicas", "rank", "epoch", "drop_last", "shuffle", "seed", "num_samples", "total_size")
    assert vars(theirs).keys() == set(names)
    assert [getattr(sampler, name) for name in names] == [getattr(theirs, name) for name in names]
