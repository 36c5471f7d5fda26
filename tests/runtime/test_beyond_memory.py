"""Partitions that are larger than a worker's memory, on a local disk."""

from __future__ import annotations

import os

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dshuffle
from dshuffle import Shuffler
from dshuffle.errors import CacheBudgetError

pytestmark = pytest.mark.timeout(200)


def look(partition):
    """The ids, and those that the rows themselves contain."""
    found = [batch["x"][:, [0, -1]] for batch in partition.batches(256)]
    return partition.sample_ids.copy(), np.concatenate(found)


def check(results, n_samples):
    ids = np.concatenate([one for one, _ in results])
    rows = np.concatenate([one for _, one in results])
    assert np.array_equal(np.sort(ids), np.arange(n_samples))
    assert np.array_equal(rows, np.stack([ids, ids], axis=1))


@pytest.mark.slow
def test_a_partition_that_does_not_fit_in_memory_is_trained_on_exactly(tmp_path):
    n_samples, width = 40_000, 3072  # rows of 12 KiB, 492 MB
    values = np.arange(n_samples, dtype="f4")
    rows = np.lib.stride_tricks.as_strided(values, (n_samples, width), (4, 0))
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {"x": rows}, chunk_rows=256)
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            memory_limit="750 MiB",
            local_directory=str(tmp_path / "local"),
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        with pytest.raises(CacheBudgetError, match="or rows on a local disk \\(cache_directory\\)"):
            Shuffler(client, dataset)
        with Shuffler(client, dataset, cache_directory=tmp_path / "rows") as shuffler:
            for epoch in shuffler.epochs(3):
                futures = epoch.map(look)
                if epoch.number == 1:
                    [pid] = client.run(os.getpid, workers=[shuffler.addresses[0]]).values()
                    os.kill(pid, 9)  # its replacement makes a file of its own
                check(client.gather(futures), n_samples)
        assert os.listdir(tmp_path / "rows") == []


def test_a_folder_that_workers_cannot_use(threads, small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheBudgetError, match=r"rank \d .* does not fit into cache_directory='.*file/rows'"):
        Shuffler(threads, small, cache_directory=tmp_path / "file" / "rows")
    with Shuffler(threads, small):  # nothing is reserved any more
        pass


def slots_in_order(partition):
    return partition._slots.copy()


def test_rows_on_a_disk_are_in_the_order_of_training(threads, tmp_path):
    values = np.arange(300, dtype="f4")
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {"x": np.stack([values, values], axis=1)})
    with Shuffler(threads, dataset, cache_directory="local") as shuffler:
        for epoch in shuffler.epochs(4):
            check(threads.gather(epoch.map(look)), 300)
            for slots in threads.gather(epoch.map(slots_in_order)):
                assert epoch.number == 0 or np.all(np.diff(slots) == 1)


def in_pieces(partition):
    return partition.sample_ids.copy(), partition["y"], next(partition.batches(7))["y"]


def test_an_array_of_a_partition_on_a_disk_is_read_in_pieces(threads, tmp_path, monkeypatch):
    monkeypatch.setattr("dshuffle.runtime.partition.READ_AHEAD", 1000)  # 30 rows of 32 bytes
    y = np.arange(300, dtype="f8")
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {"x": np.zeros((300, 3)), "y": y})
    with Shuffler(threads, dataset, cache_directory="local") as shuffler:
        for epoch in shuffler.epochs(2):
            for ids, all_of_them, batch in threads.gather(epoch.map(in_pieces)):
                np.testing.assert_array_equal(all_of_them, y[ids])
                np.testing.assert_array_equal(batch, y[ids[:7]])
