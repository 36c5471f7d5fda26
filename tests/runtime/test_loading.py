"""First partitions are loaded by all workers together: every chunk is read once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import CacheBudgetError, CorruptChunk, ExchangeError
from dshuffle.store.row_blocks import RowBlocks

Q = 6000


def stored_bytes(dataset):
    return sum(path.stat().st_size for path in Path(dataset.url).glob("*/c/**/*") if path.is_file())


@pytest.fixture(scope="module")
def blocks_of_300_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dshuffle.store.row_blocks.SMALLEST_BLOCK", 300 * 72)
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, blocks_of_300_rows):
    x = np.random.default_rng(0).random((Q, 8))
    arrays = {"x": x, "y": np.arange(Q)}
    return create_dataset(str(tmp_path_factory.mktemp("loading") / "d.zarr"), arrays, chunk_rows=100)


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize(
    "choices",
    [
        {"assignment": "local"},
        {"assignment": "partial:0.1"},
        {"assignment": "global"},
        {"assignment": "global", "sharding": "contiguous"},
        {"assignment": "global", "sharding": "stratified:label"},
        {"assignment": "aligned", "cache_fraction": 0.4},
        {"assignment": "global", "cache_fraction": 0.5},
        {"assignment": "chunks", "delivery": "storage"},
        {"assignment": "global", "delivery": "server"},
        {"assignment": "global", "delivery": "clique", "cache_fraction": 0.5},
        {"assignment": "global", "shares": [1, 1, 2, 3, 1]},
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_every_chunk_is_read_once(threads, dataset, choices, on_disk, check_orders, tmp_path, blocks_of_300_rows):
    if choices.get("sharding", "").startswith("stratified"):
        arrays = dataset.read_rows(np.arange(Q)) | {"label": np.arange(Q) // 1000}
        dataset = create_dataset(str(tmp_path / "labelled.zarr"), arrays, chunk_rows=100)
    directory = str(tmp_path) if on_disk else None
    with Shuffler(threads, dataset, cache_directory=directory, **choices) as shuffler:
        check_orders(shuffler, 2)
        first = shuffler.records[0]
    labels = Q * 8 if "label" in dataset.arrays else 0  # read for the sharding, before
    assert first.store_bytes <= 1.02 * stored_bytes(dataset) + labels
    assert first.store_delivered_bytes >= Q * dataset.row_nbytes


def test_what_loading_moves_is_in_the_record(processes, small, check_orders):
    with Shuffler(processes, small, assignment="global") as shuffler:
        check_orders(shuffler, 2)
        first = shuffler.records[0]
    sent, received = sum(first.wire_sent_bytes), sum(first.wire_received_bytes)
    # Each worker holds a third of the rows of every block, and reads some of the blocks.
    assert sent == received
    assert 0 < received <= 1000 * (small.row_nbytes + 4)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("spares", [0, 2])
def test_the_rows_of_lost_workers_are_read_by_all_others(new_processes, tmp_path, check_ids, within, spares):
    """Restarted workers take their ranks, or spare ones do so at once. The rows of both are read once."""
    x = np.random.default_rng(0).random((Q, 100))
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": x, "y": np.arange(Q)}, chunk_rows=100)

    def read(dask_worker):
        sessions = dask_worker.plugins["dshuffle"].sessions
        return os.getpid(), sum(session.dataset.traffic.fetched_bytes for session in sessions.values())

    with (
        new_processes(5) as cluster,
        Client(cluster) as client,
        Shuffler(client, dataset, assignment="global") as shuffler,
    ):
        for epoch in shuffler.epochs(2):
            if epoch.number == 1:
                cluster.scale(5 + spares)
                client.wait_for_workers(5 + spares)
                before = client.run(read)
                for address in shuffler.addresses[1:3]:
                    os.kill(before[address][0], signal.SIGKILL)
            samples = within(90, lambda epoch=epoch: client.gather(epoch.map(check_ids)))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(Q))
        after = client.run(read)
    known = {pid: nbytes for pid, nbytes in before.values()}
    fetched = [nbytes - known.get(pid, 0) for pid, nbytes in after.values()]
    assert sum(fetched) <= 1.02 * stored_bytes(dataset)
    assert sum(nbytes > 0 for nbytes in fetched) >= 3


def test_a_damaged_chunk_is_named_and_no_rank_waits(threads, tmp_path, check_ids):
    dataset = create_dataset(
        str(tmp_path / "d.zarr"),
        {"x": np.random.default_rng(0).random((1000, 7)), "y": np.arange(1000)},
        chunk_rows=100,
    )
    path = Path(dataset.url) / "x" / "c" / "7" / "0"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with Shuffler(threads, dataset) as shuffler:
        with pytest.raises(ExchangeError, match=r"chunk \(7, 0\) of array 'x'.*corrupted"):
            next(shuffler.epochs(1))
        content[100] ^= 1
        path.write_bytes(content)
        epoch = next(shuffler.epochs(1))
        assert np.array_equal(np.sort(np.concatenate(threads.gather(epoch.map(check_ids)))), np.arange(1000))


def test_a_chunk_for_which_there_is_no_memory_is_refused_first(cluster_of, tmp_path, sessions_left):
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((40_000, 1000), np.uint8)}, chunk_rows=40_000)
    no_pause = {f"distributed.worker.memory.{what}": False for what in ("target", "spill", "pause", "terminate")}
    with (
        dask.config.set(no_pause),
        cluster_of({"0": {"memory_limit": 2**27}, "1": {"memory_limit": 2**27}}) as cluster,
        Client(cluster) as client,
    ):
        with pytest.raises(CacheBudgetError, match=r"reading a chunk takes 12\d* bytes"):
            Shuffler(client, dataset, assignment="local")
        assert sessions_left(client) == (0, 0)


def test_a_failure_of_the_store_is_repeated_by_its_reader_alone(threads, small, check_orders, monkeypatch):
    read, failures = RowBlocks.read, []

    def fails_twice(self, block, stop):
        if len(failures) < 2:
            failures.append(block)
            raise OSError("the store is away")
        return read(self, block, stop)

    monkeypatch.setattr(RowBlocks, "read", fails_twice)
    with Shuffler(threads, small) as shuffler:
        check_orders(shuffler, 1)
        assert shuffler.records[0].run_id == 1  # and not another attempt of all workers
    assert len(failures) == 2


def test_an_error_of_the_dataset_is_not_repeated(threads, small, monkeypatch):
    reads = []

    def damaged(self, block, stop):
        reads.append(block)
        raise CorruptChunk("a chunk is damaged")

    monkeypatch.setattr(RowBlocks, "read", damaged)
    with Shuffler(threads, small) as shuffler, pytest.raises(ExchangeError, match="a chunk is damaged"):
        next(shuffler.epochs(1))
    assert len(reads) < 20, "three attempts of five workers would be more"
