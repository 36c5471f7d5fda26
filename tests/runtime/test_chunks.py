"""The assignment ``chunks`` takes the dataset's chunks, and reads none of them for nothing."""

from __future__ import annotations

import numpy as np
import pytest
import zarr

from dshuffle import Shuffler, create_dataset, open_dataset
from dshuffle.errors import CacheBudgetError, InvalidParameter
from dshuffle.planning import Chunks, Global
from dshuffle.runtime.dataset_inputs import unit_rows, with_chunks_of

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


def test_a_worker_mixes_the_rows_of_all_its_chunks(threads, small, check_orders):
    with Shuffler(threads, small, assignment="chunks") as shuffler:
        [own, *_] = check_orders(shuffler, 1)[0]
    chunks = own // 100
    # Two chunks in random order change 100 times on average, with a standard deviation of 5.
    assert 70 < np.count_nonzero(np.diff(chunks)) < 130


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


def test_budgets_count_the_largest_share(threads, tmp_path):
    # Six chunks for five workers: 400 rows and room for 400 that come in, of 56 bytes and 28 for their places.
    dataset = create_dataset(tmp_path / "d.zarr", {"x": np.zeros((1200, 7))}, chunk_rows=200)
    with pytest.raises(CacheBudgetError, match=r"needs 67200 bytes on each of 5 workers.*, more workers"):
        Shuffler(threads, dataset, assignment="chunks", memory_limit=67_199)
    with Shuffler(threads, dataset, assignment="chunks", memory_limit=67_200) as shuffler:
        assert len(list(shuffler.epochs(3))) == 3


def test_the_unit_is_the_chunk_of_the_widest_rows(tmp_path):
    dataset = create_dataset(tmp_path / "d.zarr", {"x": np.zeros((3000, 1024)), "y": np.zeros(3000)})
    assert {name: info.chunk_rows for name, info in dataset.arrays.items()} == {"x": 512, "y": 3000}
    assert with_chunks_of(dataset, Chunks()) == Chunks(512)
    assert with_chunks_of(dataset, Chunks(7)) == Chunks(7)
    assert with_chunks_of(dataset, Global()) == Global()


def test_the_unit_of_a_sharded_array_is_its_inner_chunk(tmp_path):
    group = zarr.create_group(tmp_path / "g.zarr")
    group.create_array("x", shape=(960, 5), dtype="f4", chunks=(40, 5), shards=(320, 5))[:] = 1
    group.create_array("y", shape=(960, 5), dtype="f4", chunks=(30, 5))[:] = 1
    assert unit_rows(open_dataset(tmp_path / "g.zarr")) == 40
