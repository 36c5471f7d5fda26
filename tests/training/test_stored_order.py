from __future__ import annotations

import numpy as np
from studies.stored_order import StoredOrder

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
