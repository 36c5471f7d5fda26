from __future__ import annotations

import numpy as np
import pytest

from dshuffle.compare.simulated import StoredOrder
from dshuffle.errors import InvalidParameter

ARRAYS = {"x": np.arange(20.0), "y": np.arange(20) % 3}


def check_seen(partition, size):
    batches = list(partition.batches(size))
    assert [len(batch["x"]) for batch in batches] == [size] * (len(partition) // size) + [len(partition) % size]
    joined = np.concatenate([batch["x"] for batch in batches])
    np.testing.assert_array_equal(joined, partition["x"])
    np.testing.assert_array_equal(joined, partition.sample_ids)
    return joined.tolist()


def test_every_epoch_is_in_stored_order(fake_shuffler):
    shuffler = StoredOrder(fake_shuffler(ARRAYS, n_workers=3, assignment="local", sharding="contiguous"))
    for epoch in shuffler.epochs(2):
        found = [future.result() for future in epoch.map(check_seen, 5)]
        assert found == [list(range(7)), list(range(7, 14)), list(range(14, 20))]


def check_short(partition):
    assert [len(batch["y"]) for batch in partition.batches(4, drop_last=True)] == [4, 4]
    assert (partition.names, len(partition), partition.shares) == (("x", "y"), 10, (10, 10))
    with pytest.raises(InvalidParameter, match="batch_size"):
        next(partition.batches(11, drop_last=True))
    return partition.rank


def test_it_is_used_as_a_partition(fake_shuffler):
    for epoch in StoredOrder(fake_shuffler(ARRAYS, n_workers=2)).epochs(1):
        assert epoch.map(check_short)[0].result() == 0
