"""Workers join, retire and are lost, and every sample is trained on exactly once in every epoch."""

from __future__ import annotations

import os
import signal

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import ClusterError

from ..conftest import OPTIONS, address_of, task_that_checks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

WAYS = [
    {},
    {"assignment": "partial:0.3"},
    {"assignment": "local"},
    {"assignment": "chunks"},
    {"delivery": "storage"},
    {"delivery": "server"},
    {"cache_fraction": 0.7},
    {"assignment": "aligned", "delivery": "clique", "cache_fraction": 0.7},
    {"balance": "label"},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())) or "default")
def test_workers_join_and_retire(labelled, checked, way):
    with LocalCluster(n_workers=2, processes=False, memory_limit=0, **OPTIONS) as cluster, Client(cluster) as client:
        with Shuffler(client, labelled, elastic=True, seed=4, **way) as shuffler:
            counts, seen = [], []
            for epoch in shuffler.epochs(9):
                seen.append(client.gather(epoch.map(checked)))
                assert np.array_equal(np.sort(np.concatenate(seen[-1])), np.arange(1000))
                counts.append(shuffler.n_workers)
                if epoch.number == 1:
                    cluster.scale(4)
                    client.wait_for_workers(4)
                elif epoch.number == 5:
                    cluster.scale(3)
        assert counts[:2] == [2, 2]
        assert counts[3:6] == [4, 4, 4]
        assert counts[7:] == [3, 3]
        assert [record.n_workers for record in shuffler.records] == counts
        if way.get("assignment") in ("local", "partial:0.3"):  # see the next test
            return
        # The samples are those of a session that always had three workers.
        with Shuffler(client, labelled, seed=4, first_epoch=7, **way) as shuffler:
            for epoch in shuffler.epochs(2):
                for one, other in zip(client.gather(epoch.map(checked)), seen[epoch.number], strict=True):
                    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("assignment", ["local", "partial:0.1"])
@pytest.mark.parametrize("way", [{}, {"delivery": "server"}, {"sharding": "contiguous"}], ids=str)
def test_workers_that_stay_keep_their_samples(tmp_path, assignment, way):
    """From 6 to 8 workers and back, no more rows move than a rebalance needs."""
    q, row_nbytes = 1200, 8192
    rows = np.random.default_rng(0).integers(0, 256, (q, row_nbytes), dtype=np.uint8)
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": rows}, chunk_rows=50)
    checked = task_that_checks(dataset)
    with LocalCluster(n_workers=6, processes=False, memory_limit=0, **OPTIONS) as cluster, Client(cluster) as client:
        where, counts = [], []
        with Shuffler(client, dataset, elastic=True, assignment=assignment, **way) as shuffler:
            for epoch in shuffler.epochs(8):
                samples = client.gather(epoch.map(checked))
                assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(q))
                where.append(np.empty(q, object))
                for address, ids in zip(shuffler.addresses, samples, strict=True):
                    where[-1][ids] = address
                counts.append(shuffler.n_workers)
                if epoch.number == 1:
                    cluster.scale(8)
                    client.wait_for_workers(8)
                elif epoch.number == 4:
                    client.retire_workers([shuffler.addresses[0], shuffler.addresses[3]])
    changes = [epoch for epoch in range(1, 8) if counts[epoch] != counts[epoch - 1]]
    assert [counts[epoch] for epoch in changes] == [8, 6]
    records = {record.epoch: record for record in shuffler.records}
    for epoch in range(1, 8):
        moved = int((where[epoch] != where[epoch - 1]).sum())
        if epoch not in changes:
            exchanged = 0 if assignment == "local" else q // 10
            assert moved == exchanged
            continue
        assert moved == q // 4  # two of eight workers' shares
        if epoch in records:  # not if a worker left before the epoch was measured
            received = sum(records[epoch].wire_received_bytes)
            assert moved * row_nbytes <= received <= 1.01 * moved * row_nbytes
            assert records[epoch].store_bytes == 0


def test_too_few_workers(labelled):
    with (
        dask.config.set({"dshuffle.timeout": "1s"}),
        LocalCluster(n_workers=1, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
        pytest.raises(ClusterError, match=r"only 1 of min_workers=2 workers .* 1 s\. .*\(dshuffle.timeout\)"),
    ):
        Shuffler(client, labelled, min_workers=2)


def test_a_worker_that_does_not_answer_is_left_out(new_processes, labelled, check_ids, within):
    """It is stopped, and Dask has not noticed. A session that needs all workers would fail."""
    with dask.config.set({"dshuffle.heartbeat": "3s"}), new_processes(3) as cluster, Client(cluster) as client:
        with Shuffler(client, labelled) as shuffler:
            assert shuffler.n_workers == 3
        [pid] = client.run(os.getpid, workers=[address_of(client, "1")]).values()
        os.kill(pid, signal.SIGSTOP)
        try:
            with within(40, lambda: Shuffler(client, labelled, elastic=True, min_workers=2)) as shuffler:
                assert shuffler.n_workers == 2
                for epoch in shuffler.epochs(1):
                    assert len(client.gather(epoch.map(check_ids))) == 2
        finally:
            os.kill(pid, signal.SIGCONT)
