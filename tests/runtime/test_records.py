"""What an epoch needed, moved and took, as recorded."""

from __future__ import annotations

import dataclasses
import re
import time

import dask
import numpy as np
import pytest

from dshuffle import Shuffler, create_dataset
from dshuffle.planning import DELIVERIES, Choices, EpochPlanner, ShuffleSpec
from dshuffle.records import EpochRecord, slow_rank_of

pytestmark = pytest.mark.slow  # real clusters

CHECKSUM_NBYTES = 4


@pytest.mark.parametrize("delivery", [name for name, delivery in DELIVERIES.items() if not delivery.coded])
@pytest.mark.parametrize("assignment", ["local", "partial:0.25", "global"])
@pytest.mark.parametrize("cache_fraction", [None, 0.5])
def test_records_say_what_was_planned_and_moved(threads, small, check_ids, delivery, assignment, cache_fraction):
    started = time.perf_counter()
    way = {"assignment": assignment, "delivery": delivery, "cache_fraction": cache_fraction}
    way |= {"caching": "recent", "sharding": "contiguous", "seed": 4}
    with Shuffler(threads, small, **way) as shuffler:
        for epoch in shuffler.epochs(3):
            threads.gather(epoch.map(check_ids))
    seconds = time.perf_counter() - started
    planner = EpochPlanner(ShuffleSpec(1000, 5, Choices(**way)))
    first, *others = shuffler.records
    assert [record.epoch for record in shuffler.records] == [0, 1, 2]
    assert [record.run_id for record in shuffler.records] == [1, 2, 3]

    load = planner.load()
    assert first.delivery == "load"
    assert first.needed == load.n_needed == 1000
    assert first.packets == load.packets.n_packets
    assert first.store_delivered_bytes == 1000 * 64  # each row is read once, whoever holds it
    assert first.store_requests > 0
    assert first.store_bytes > 0
    assert first.coded_load_bytes == first.server_sent_bytes == 0
    assert first.wire_bytes == sum(first.wire_received_bytes) <= 6 * 1000 * (64 + CHECKSUM_NBYTES)

    for record in others:
        planned = planner.advance()
        moved = planned.packets.n_packets * (64 + CHECKSUM_NBYTES)
        assert record.delivery == delivery
        assert str(record.choices.assignment) == assignment
        assert (record.choices.caching, record.choices.sharding) == ("recent", "contiguous")
        assert (record.n_workers, record.n_samples, record.row_nbytes) == (5, 1000, 64)
        assert record.cache_fraction == (cache_fraction or 0.2)
        assert record.needed == planned.n_needed
        assert record.packets == planned.packets.n_packets
        assert record.coded_load_bytes == record.packets * 64
        assert (record.needed == 0) == (assignment == "local")
        assert len(record.wire_sent_bytes) == len(record.wire_received_bytes) == 5
        if delivery == "peer":
            assert sum(record.wire_sent_bytes) == sum(record.wire_received_bytes) == moved
            assert record.server_sent_bytes == record.store_bytes == record.store_requests == 0
            assert record.server == ""
        elif delivery == "storage":
            assert record.wire_bytes == sum(record.wire_sent_bytes) == record.server_sent_bytes == 0
            assert record.store_delivered_bytes == record.needed * 64
            assert (record.store_bytes > 0) == (record.store_requests > 0) == (record.needed > 0)
        else:
            to_rank_0 = len(planned.for_worker(0).receives.get(-1, ()))
            assert record.server == "beside rank 0"
            assert sum(record.wire_sent_bytes) == 0
            assert record.wire_received_bytes[0] == 0
            assert record.server_sent_bytes == record.wire_bytes == moved - to_rank_0 * (64 + CHECKSUM_NBYTES)
        for field in dataclasses.fields(record):
            if field.name.endswith("_seconds") and field.name != "rank_training_seconds":
                value = getattr(record, field.name)
                assert isinstance(value, float), field.name
                # Packing and unpacking add up over a worker's two threads.
                assert 0 <= value < 2 * seconds, field.name

    for record in shuffler.records:
        line = record.to_json()
        assert "\n" not in line
        assert EpochRecord.from_json(line) == record


@pytest.mark.parametrize("last", [1, 2])
def test_an_epoch_is_recorded_when_it_has_ended(threads, small, check_ids, last):
    """Also if the iteration is left."""
    with Shuffler(threads, small) as shuffler:
        for number, epoch in enumerate(shuffler.epochs(3)):
            threads.gather(epoch.map(check_ids))
            assert [record.epoch for record in shuffler.records] == list(range(number))
            if number == last == 1:
                break
        else:
            assert len(shuffler.records) == 3
    assert [record.epoch for record in shuffler.records] == list(range(last + 1))


def test_training_seconds_are_those_of_the_slowest_worker(threads, small):
    def work(partition):
        time.sleep(0.3 if partition.rank == 2 else 0.05)

    with Shuffler(threads, small) as shuffler:
        for epoch in shuffler.epochs(2):
            threads.gather(epoch.map(work))
            threads.gather(epoch.map(work))
    assert all(0.6 <= record.training_seconds < 1.8 for record in shuffler.records)
    for record in shuffler.records:
        assert max(record.rank_training_seconds) == record.training_seconds == record.rank_training_seconds[2]
        assert len(record.rank_training_seconds) == shuffler.n_workers
    words = slow_rank_of(shuffler.records)
    assert re.fullmatch(
        r"rank 2 trained \d+\.\d times as long as the median of the others, which waited .* an epoch", words
    )


def test_waiting_is_recorded(threads, tmp_path):
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((30_000, 1024), np.uint8)})
    with Shuffler(threads, dataset, delivery="storage") as shuffler:
        for _ in shuffler.epochs(3):
            pass  # nothing hides the exchange
    for record in shuffler.records:
        assert 0 < record.waited_seconds <= record.exchange_seconds + 0.5
    assert sum(record.waited_seconds for record in shuffler.records[1:]) > 0.01


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("delivery", ["peer", "server"])
def test_processes_of_a_host_share_the_memory_of_long_messages(processes, tmp_path, delivery, shares_memory):
    x = np.random.default_rng(0).integers(0, 256, (120, 2**16), np.uint8)
    dataset = create_dataset(str(tmp_path / "long.zarr"), {"x": x}, chunk_rows=40)

    def rows(partition):
        return partition.sample_ids.copy(), partition["x"].copy()

    with (
        dask.config.set({"dshuffle.shared-memory": shares_memory}),
        Shuffler(processes, dataset, delivery=delivery) as shuffler,
    ):
        for epoch in shuffler.epochs(3):
            for sample_ids, found in processes.gather(epoch.map(rows)):
                np.testing.assert_array_equal(found, x[sample_ids])
        records = shuffler.records
    assert records[0].shared_memory_bytes == 0
    for record in records[1:]:
        assert record.wire_bytes > 0
        if shares_memory:
            assert 0.5 * record.wire_bytes < record.shared_memory_bytes <= record.wire_bytes
        else:
            assert record.shared_memory_bytes == 0
