"""The assignment ``chunks`` takes the dataset's chunks, and reads none of them for nothing."""

from __future__ import annotations

import numpy as np
import pytest
import zarr

from dshuffle import Shuffler, create_dataset, open_dataset
from dshuffle.errors import InvalidParameter
from dshuffle.runtime.dataset_inputs import unit_rows

pytestmark = pytest.mark.slow  # real clusters

CHECKSUM_NBYTES = 4


@pytest.mark.parametrize("sharding", ["random", "contiguous"])
def test_re_reading_whole_chunks_fetches_nothing_twice(threads, small, check_orders, sharding):
    with Shuffler(threads, small, assignment="chunks", delivery="storage", sharding=sharding) as shuffler:
        seen = check_orders(shuffler, 4)
    moved = 0
    for ids, record in zip(seen, shuffler.records, strict=True):
        assert str(record.choices.assignment) == "chunks:100"
        assert {len(own) for own in ids} == {200}
        assert all(len(set((own // 100).tolist())) == 2 for own in ids)
        # Every chunk is stored with a checksum; x and y have chunks of their own.
        assert record.store_requests == 2 * record.needed // 100
        assert record.store_bytes == record.needed * 64 + CHECKSUM_NBYTES * record.store_requests
        assert record.store_delivered_bytes == record.needed * 64
        moved += record.needed
    assert 1000 < moved < 4000


def test_other_units_than_the_datasets_chunks(threads, small, check_orders):
    with Shuffler(threads, small, assignment="chunks:30") as shuffler:
        for shares in check_orders(shuffler, 3):
            sizes = [len(own) for own in shares]
            assert max(sizes) - min(sizes) <= 30
            for own in shares:
                assert all(count in (30, 1000 % 30) for count in np.unique(own // 30, return_counts=True)[1])


def test_more_workers_than_chunks_are_refused(threads, tmp_path, sessions_left):
    dataset = create_dataset(tmp_path / "d.zarr", {"x": np.zeros((1000, 3))}, chunk_rows=300)
    with pytest.raises(InvalidParameter, match=r"chunk_rows=300 .*at most 249, .* 1000 samples and 5 workers.*smaller"):
        Shuffler(threads, dataset, assignment="chunks")
    assert sessions_left(threads) == (0, 0)


def test_the_unit_of_a_sharded_array_is_its_inner_chunk(tmp_path):
    group = zarr.create_group(tmp_path / "g.zarr")
    group.create_array("x", shape=(960, 5), dtype="f4", chunks=(40, 5), shards=(320, 5))[:] = 1
    group.create_array("y", shape=(960, 5), dtype="f4", chunks=(30, 5))[:] = 1
    assert unit_rows(open_dataset(tmp_path / "g.zarr")) == 40
