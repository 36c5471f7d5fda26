"""Sessions that exchange samples for every K-th epoch only: what they train on, what they record, how they go on."""

from __future__ import annotations

import itertools
import json

import pytest

from dshuffle import Shuffler
from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, ShuffleSpec
from dshuffle.planning.remainder import training_orders

from .resuming.stopping import trained

pytestmark = pytest.mark.slow  # real clusters


def expected_orders(n, first, last, **choices):
    spec = ShuffleSpec(1000, n, Choices(**choices))
    return [[order.tolist() for order in training_orders(spec, epoch)] for epoch in range(first, last)]


@pytest.mark.parametrize("delivery", ["peer", "storage", "auto"])
def test_worker_processes_exchange_in_every_second_epoch(processes, small, check_orders, delivery):
    with Shuffler(processes, small, delivery=delivery, every=2, between="reverse", seed=3) as shuffler:
        seen = [[ids.tolist() for ids in epoch] for epoch in check_orders(shuffler, 5)]
        records = shuffler.records
    assert seen[1] == [ids[::-1] for ids in seen[0]]
    assert seen[3] == [ids[::-1] for ids in seen[2]]
    assert seen == expected_orders(3, 0, 5, every=2, between="reverse", seed=3)
    assert [record.exchanged for record in records] == [False, False, True, False, True]
    assert [record.delivery == "none" for record in records] == [False, True, False, True, False]
    for record in records[1:]:
        moved = record.wire_bytes + record.store_delivered_bytes
        assert (moved > 0) == record.exchanged == (record.needed > 0)


@pytest.mark.parametrize(
    "way", [{"assignment": "global", "between": "reverse"}, {"assignment": "partial:0.3"}], ids=str
)
@pytest.mark.parametrize("stop", [1, 2])
def test_more_workers_go_on_in_the_middle_of_an_epoch(processes, threads, small, way, stop):
    """Epoch 1 is between exchanges, and epoch 2 follows one."""
    with Shuffler(processes, small, every=2, **way) as shuffler:
        for epoch in shuffler.epochs(stop + 1):
            if epoch.number < stop:
                trained(processes, epoch, [None] * 3)
        seen = trained(processes, epoch, [5, 9, 12])
        state = json.loads(json.dumps(shuffler.state_dict()))
    with Shuffler.resume(threads, small, state) as shuffler:
        first, later = [trained(threads, epoch, [None] * 5) for epoch in shuffler.epochs(2)]
    assert sorted(itertools.chain(*seen, *first)) == list(range(1000))
    assert sorted(itertools.chain(*later)) == list(range(1000))
    if way["assignment"] == "global":
        assert later == expected_orders(5, stop + 1, stop + 2, every=2, **way)[0]


def test_what_cannot_be_is_refused_before_anything_opens(threads, small, sessions_left):
    for wrong in ({"every": 0}, {"every": 2, "assignment": "local"}, {"between": "reverse"}, {"every": "two"}):
        with pytest.raises(InvalidParameter, match=r"every=|between="):
            Shuffler(threads, small, **wrong)
    assert not any(sessions_left(threads))
