"""Sessions that exchange samples for every K-th epoch only: what they train on, what they record, how they go on."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import InvalidParameter
from dshuffle.exchange.comms import LEAST_NBYTES
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


def test_messages_in_shared_memory_come_after_an_epoch_without_any(processes, tmp_path, check_orders):
    arrays = {"x": np.zeros((3000, 4096), np.uint8), "y": np.arange(3000)}
    dataset = create_dataset(str(tmp_path / "long.zarr"), arrays)
    with Shuffler(processes, dataset, every=2) as shuffler:
        check_orders(shuffler, 5)
        assert shuffler.records[4].wire_bytes > 3 * LEAST_NBYTES


def test_rows_on_disk_are_sent_after_the_epochs_between(processes, small, check_orders, tmp_path):
    ways = {"assignment": "partial:0.5", "every": 3, "cache_directory": str(tmp_path)}
    with Shuffler(processes, small, **ways) as shuffler:
        seen = [[ids.tolist() for ids in epoch] for epoch in check_orders(shuffler, 8)]
    assert seen == expected_orders(3, 0, 8, assignment="partial:0.5", every=3)


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


def test_figures_of_a_report_are_per_epoch(threads, small, check_orders):
    from dshuffle.report.summary import WayResult

    def result(every):
        with Shuffler(threads, small, every=every) as shuffler:
            check_orders(shuffler, 5)
            choices = Choices(every=every)
            return WayResult(label="", choices=choices, records=tuple(shuffler.records), history=()).figures

    always, sparse = result(1), result(2)
    assert sparse.needed == pytest.approx(always.needed / 2, rel=0.1)
    assert sparse.wire_bytes == pytest.approx(always.wire_bytes / 2, rel=0.1)
    assert sparse.shuffle_seconds is not None
    assert np.isfinite(sparse.epoch_seconds)
