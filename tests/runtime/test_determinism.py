"""The samples of every rank and their order are a function of (seed, epoch, workers) and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from dshuffle import Shuffler
from dshuffle.errors import InvalidParameter

pytestmark = pytest.mark.slow  # real clusters


def same(first, second):
    return all(
        np.array_equal(a, b)
        for epoch_a, epoch_b in zip(first, second, strict=True)
        for a, b in zip(epoch_a, epoch_b, strict=True)
    )


@pytest.mark.parametrize("assignment", ["local", "partial:0.3", "global"])
def test_the_same_seed_gives_the_same_orders_and_another_does_not(threads, small, check_orders, assignment):
    runs = []
    for seed, delivery in ((5, "peer"), (5, "storage"), (6, "peer")):
        with Shuffler(threads, small, assignment=assignment, delivery=delivery, seed=seed) as shuffler:
            runs.append(check_orders(shuffler, 3))
    assert same(runs[0], runs[1])
    for epoch in range(3):
        assert not same(runs[0][epoch : epoch + 1], runs[2][epoch : epoch + 1])


def test_another_cluster_gives_the_same_orders(processes, small, check_orders, client_of):
    with Shuffler(processes, small, seed=3) as shuffler:
        expected = check_orders(shuffler, 3)
    # Ranks follow names, not the order in which workers have come.
    with client_of({2: {}, 0: {}, 1: {}}) as client, Shuffler(client, small, seed=3) as shuffler:
        assert same(check_orders(shuffler, 3), expected)


def test_a_second_call_of_epochs_goes_on(threads, small, check_orders):
    with Shuffler(threads, small, seed=9) as shuffler:
        at_once = check_orders(shuffler, 4)
    with Shuffler(threads, small, seed=9) as shuffler:
        in_two = check_orders(shuffler, 1) + check_orders(shuffler, 3)
        assert [record.epoch for record in shuffler.records] == [0, 1, 2, 3]
    assert same(at_once, in_two)


@pytest.mark.parametrize("delivery", ["peer", "storage", "server"])
@pytest.mark.parametrize("assignment", ["local", "partial:0.3", "global"])
def test_a_session_can_begin_with_any_epoch(threads, small, check_orders, assignment, delivery):
    with Shuffler(threads, small, assignment=assignment, delivery=delivery, seed=5) as shuffler:
        from_0 = check_orders(shuffler, 6)
    with Shuffler(threads, small, assignment=assignment, delivery=delivery, seed=5, first_epoch=3) as shuffler:
        assert same(check_orders(shuffler, 3), from_0[3:])
        assert [record.epoch for record in shuffler.records] == [3, 4, 5]
        assert shuffler.records[0].delivery == "load"
        assert shuffler.records[0].store_delivered_bytes > 0


def test_an_epoch_too_far_to_replay_is_refused(threads, small, sessions_left):
    with pytest.raises(InvalidParameter, match=r"first_epoch=2000000 .*'partial:0.3' depends on all epochs before"):
        Shuffler(threads, small, assignment="partial:0.3", first_epoch=2_000_000)
    assert not any(sessions_left(threads))
