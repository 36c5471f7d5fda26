"""Which kept partitions a session reads: every rank once, on the worker that has it where possible."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dshuffle.exchange.kept_partition import KeptFolder, KeptLabel
from dshuffle.planning import Choices, GivenSharding, ShuffleSpec, WorkerHistory
from dshuffle.runtime.scheduler.members import choose_kept
from dshuffle.runtime.session_spec import EarlierWorkers

PLAN = ShuffleSpec(100, 4, Choices())
WORKERS = ["a", "b", "c", "d"]


def kept(rank, *, n_workers=4, epoch=7, shuffle="global", name=""):
    label = KeptLabel("data", shuffle, "1", 8, 5, WorkerHistory(n_workers), rank, epoch)
    return KeptFolder(f"{name}{n_workers}-{epoch}-{rank}", label)


def test_workers_get_the_ranks_whose_partitions_they_have():
    found = {"a": [kept(2)], "b": [kept(0)], "c": [kept(3)], "d": [kept(1)]}
    former, ranks = choose_kept(found, "global", PLAN, WORKERS)
    assert ranks == ["b", "d", "a", "c"]
    assert former.holders == {0: ("b", "4-7-0"), 1: ("d", "4-7-1"), 2: ("a", "4-7-2"), 3: ("c", "4-7-3")}
    assert (former.epoch, former.kept, former.shuffle) == (7, True, dataclasses.replace(PLAN, first_epoch=7))


def test_a_worker_without_a_partition_gets_what_is_left():
    former, ranks = choose_kept({"d": [kept(0)], "b": [kept(2)]}, "global", PLAN, WORKERS)
    assert ranks == ["d", "a", "b", "c"]
    assert sorted(former.holders) == [0, 2]


def test_two_workers_on_a_machine_share_what_is_there():
    first, second = [kept(0), kept(3)], [kept(1), kept(2)]
    former, ranks = choose_kept({"a": second, "b": first, "c": first, "d": second}, "global", PLAN, WORKERS)
    assert set(ranks) == set(WORKERS)
    assert {ranks[0], ranks[3]} == {"b", "c"}
    assert {rank: where for rank, (where, _) in former.holders.items()} == dict(enumerate(ranks))


def test_a_folder_that_all_workers_see_gives_each_a_rank():
    listed = [kept(rank) for rank in range(4)]
    found = {address: listed for address in WORKERS}
    former, ranks = choose_kept(found, "global", PLAN, WORKERS)
    assert sorted(ranks) == WORKERS
    assert {rank: where for rank, (where, _) in former.holders.items()} == dict(enumerate(ranks))


def test_with_another_number_of_workers_the_order_stays_and_readers_are_spread():
    listed = [kept(rank, n_workers=6) for rank in range(6)]
    former, ranks = choose_kept({"a": listed, "b": listed, "c": [], "d": []}, "global", PLAN, WORKERS)
    assert ranks == WORKERS
    assert former.shuffle.n_workers == 6
    assert sorted(where for where, _ in former.holders.values()) == ["a"] * 3 + ["b"] * 3


def test_the_epoch_with_most_of_the_samples_is_taken():
    found = {"a": [kept(0, epoch=8), kept(0)], "b": [kept(1)], "c": [kept(2)], "d": []}
    assert choose_kept(found, "global", PLAN, WORKERS)[0].epoch == 7
    both = {"a": [kept(0), kept(0, epoch=8)], "b": [kept(0, n_workers=1, epoch=9)]}
    assert choose_kept(both, "global", PLAN, WORKERS)[0].shuffle.n_workers == 1  # all samples
    alike = {"a": [kept(0), kept(0, epoch=8)]}
    assert choose_kept(alike, "global", PLAN, WORKERS)[0].epoch == 8


@pytest.mark.parametrize(
    "found",
    [{}, {"a": []}, {"a": [kept(0, shuffle="local")]}, {"a": [kept(4)]}, {"elsewhere": [kept(0)]}],
    ids=["nobody", "nothing", "another shuffle", "no such rank", "not a member"],
)
def test_nothing_of_use(found):
    assert choose_kept(found, "global", PLAN, WORKERS) is None


def test_a_sharding_for_another_number_of_workers_is_of_no_use():
    ranks = np.arange(100) % 4
    plan = ShuffleSpec(100, 4, Choices(sharding=GivenSharding.of("given", ranks)))
    assert choose_kept({"a": [kept(0, n_workers=2)]}, "global", plan, WORKERS) is None
    assert choose_kept({"a": [kept(0)]}, "global", plan, WORKERS) is not None


def test_any_listing_gives_every_worker_one_rank_and_every_partition_a_worker_that_has_it():
    rng = np.random.default_rng(0)
    for _ in range(300):
        n_workers = int(rng.integers(1, 6))
        plan, workers = ShuffleSpec(100, n_workers, Choices()), [f"w{i}" for i in range(n_workers)]
        found = {
            address: [kept(int(rank), n_workers=n_workers) for rank in rng.integers(0, n_workers, rng.integers(0, 4))]
            for address in workers
        }
        choice = choose_kept(found, "global", plan, workers)
        if choice is None:
            assert not any(found.values())
            continue
        former, ranks = choice
        assert sorted(ranks) == workers
        for rank, (address, name) in former.holders.items():
            assert name in {one.name for one in found[address]}
            assert name == f"{n_workers}-7-{rank}"


def test_fewer_workers_go_on_with_the_ranks_that_they_have_kept():
    """Of four workers, the one with rank 1 has left; a new one gets a rank that is left."""
    plan, history = ShuffleSpec(100, 3, Choices("local"), first_epoch=8), WorkerHistory(4)
    found = {"a": [kept(3)], "b": [], "c": [kept(0)]}
    former, ranks = choose_kept(found, "global", plan, ["a", "b", "c"], history)
    carried = EarlierWorkers(history, 7).placed(former, ranks)
    assert carried.places == {"a": 3, "c": 0, "b": 1}
    assert carried.onto(plan, ranks).changes[0].former == tuple(carried.places[address] for address in ranks)
    assert (
        EarlierWorkers(history, 7).placed(former, [*ranks, "d"]).places is None
    )  # as many as before: ranks stay the same


@pytest.mark.parametrize(
    ("places", "addresses", "weights"),
    [
        ({"a": 2, "b": 0, "c": 1}, "abc", (250, 500, 1000)),
        ({"a": 0, "b": 1}, "ab", ()),  # rank 2 was lost, and another worker has trained on its samples
        ({"a": 0, "b": 2}, "ab", ()),  # the worker of rank 1 has left
        ({"a": 0, "b": 1, "c": 2}, "abd", ()),
        ({"a": 0, "b": 1, "c": 2}, "abcd", ()),
        (None, "abc", (500, 1000, 250)),
    ],
)
def test_weights_are_those_of_the_same_workers(places, addresses, weights):
    history = WorkerHistory(3, first_weights=(500, 1000, 250))
    assert EarlierWorkers(history, 5, places).weights_of(list(addresses)) == weights
