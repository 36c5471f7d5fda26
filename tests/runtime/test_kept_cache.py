"""Partitions that outlive their session (``keep_cache``): a later session reads them, and nothing wrong or foreign."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import threading
import time

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dshuffle
from dshuffle import Shuffler
from dshuffle.errors import CacheBudgetError, InvalidParameter
from dshuffle.exchange.kept_partition import KeptFolder
from dshuffle.runtime.worker import worker_plugin as opening
from dshuffle.store import Dataset

from .conftest import OPTIONS, task_that_checks

QUICK = [{"assignment": "global"}, {"cache_fraction": 0.6, "delivery": "clique"}]
WAYS = [
    {"assignment": "chunks", "delivery": "storage"},
    {"delivery": "server"},
    {"balance": "label", "sharding": "stratified:label"},
]


@pytest.fixture
def labelled(tmp_path):
    x = np.random.default_rng(0).random((1000, 7))
    arrays = {"x": x, "y": np.arange(1000), "label": np.arange(1000) % 3}
    return dshuffle.create_dataset(tmp_path / "labelled.zarr", arrays, chunk_rows=100)


@pytest.fixture
def workers():
    """A client of a new cluster of some workers, in this process."""
    return lambda n_workers: LocalCluster(n_workers=n_workers, processes=False, memory_limit=0, **OPTIONS)


def one_epoch(shuffler, task, client):
    """Train on one epoch, and return the samples of every rank, and the record."""
    for epoch in shuffler.epochs(1):
        samples = client.gather(epoch.map(task))
    return samples, shuffler.records[0]


def check_first_record(shuffler, ids, client):
    """Train on all samples, and return the record."""
    samples, record = one_epoch(shuffler, ids, client)
    assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
    return record


@pytest.mark.parametrize(
    "way",
    [*QUICK, *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS)],
    ids=lambda way: "-".join(map(str, way.values())),
)
def test_a_session_that_resumes_reads_nothing_from_the_store(threads, workers, labelled, check_ids, tmp_path, way):
    """The workers of the new cluster have other addresses. Its ranks train on what is left of the epoch."""
    kept = {"cache_directory": tmp_path / "rows", "keep_cache": True}

    def some(partition):
        partition.mark_trained(10)
        return partition.sample_ids[:10].copy()

    with Shuffler(threads, labelled, seed=4, **way, **kept) as shuffler:
        epochs = shuffler.epochs(9)
        for _ in range(3):
            epoch = next(epochs)
        seen = threads.gather(epoch.map(some))
        order = threads.gather(epoch.map(check_ids))
        state = shuffler.state_dict()
    with (
        workers(5) as cluster,
        Client(cluster) as client,
        Shuffler.resume(client, labelled, state, delivery=way.get("delivery", "peer"), **kept) as shuffler,
    ):
        samples, record = one_epoch(shuffler, check_ids, client)
    for then, before, now in zip(order, seen, samples, strict=True):
        assert np.array_equal(then, np.concatenate([before, now]))
    assert record.store_delivered_bytes == 0  # labels are read, but no rows
    # Rows beyond a share come from the workers that train on them, and so do those of a server.
    if "cache_fraction" not in way and way.get("delivery") not in ("server", "leftover"):
        assert sum(record.wire_received_bytes) == 0  # every worker got the rank whose partition it has


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [2, 7])
def test_another_number_of_workers_reads_from_those_that_have_a_row(
    threads, workers, small, check_ids, tmp_path, n_workers
):
    kept = {"cache_directory": tmp_path / "rows", "keep_cache": True}
    with Shuffler(threads, small, **kept) as shuffler:
        for epoch in shuffler.epochs(2):
            threads.gather(epoch.map(check_ids))
    with workers(n_workers) as cluster, Client(cluster) as client, Shuffler(client, small, **kept) as shuffler:
        record = check_first_record(shuffler, check_ids, client)
        assert record.store_bytes == 0
        assert sum(record.wire_received_bytes) > 0
        one_epoch(shuffler, check_ids, client)  # nobody reads the former partitions any more
    assert len(os.listdir(tmp_path / "rows")) == n_workers


@pytest.mark.parametrize(
    "change", ["dataset", *(pytest.param(change, marks=pytest.mark.slow) for change in ("seed", "part", "arrays"))]
)
def test_what_is_of_something_else_is_not_used(threads, small, check_ids, tmp_path, change):
    kept = {"cache_directory": tmp_path / "rows", "keep_cache": True}
    with Shuffler(threads, small, **kept) as shuffler:
        check_first_record(shuffler, check_ids, threads)
    before, options = small, {}
    if change == "seed":
        options = {"seed": 1}
    elif change == "dataset":
        x = np.random.default_rng(0).random((1000, 7))
        small = dshuffle.create_dataset(small.url, {"x": x, "y": np.arange(1000)}, chunk_rows=100, overwrite=True)
    elif change == "part":
        small = small.select(np.arange(1000))
    else:
        small = dshuffle.open_dataset(small.url, arrays=["y"])
    with Shuffler(threads, small, **kept, **options) as shuffler:
        assert check_first_record(shuffler, check_ids, threads).store_bytes > 0
    same = {folder.label.dataset for folder in KeptFolder.all_in(str(tmp_path / "rows"), before.identity)}
    assert same == ({before.identity} if small.identity != before.identity or change in ("seed", "arrays") else set())


@pytest.mark.parametrize("harm", ["gone", "rows", pytest.param("index", marks=pytest.mark.slow)])
def test_what_is_damaged_is_read_from_the_store(threads, small, check_ids, tmp_path, harm, monkeypatch):
    kept = {"cache_directory": tmp_path / "rows", "keep_cache": True}
    with Shuffler(threads, small, **kept) as shuffler:
        check_first_record(shuffler, check_ids, threads)
    folder = tmp_path / "rows" / min(os.listdir(tmp_path / "rows"))
    if harm == "gone":  # after it was listed
        all_in = KeptFolder.all_in.__func__

        def and_then_removed(cls, directory, dataset):
            found = all_in(cls, directory, dataset)
            (folder / "rows").unlink(missing_ok=True)
            return found

        monkeypatch.setattr(KeptFolder, "all_in", classmethod(and_then_removed))
    else:
        path = folder / ("rows" if harm == "rows" else "index")
        path.write_bytes(bytes(path.stat().st_size))
    with Shuffler(threads, small, **kept) as shuffler:
        record = check_first_record(shuffler, check_ids, threads)
    # The chunks that hold rows of one partition of five: each is read once.
    assert 0 < record.store_delivered_bytes <= 1000 * small.row_nbytes
    assert sum(record.wire_received_bytes) <= 201 * (small.row_nbytes + 4)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_partitions_survive_that_all_workers_are_killed(new_processes, small, tmp_path):
    checked = task_that_checks(small)
    kept = {"cache_directory": tmp_path / "rows", "keep_cache": True}
    url = str(tmp_path / "run.json")
    with new_processes(3) as cluster, Client(cluster) as client:
        shuffler = Shuffler(client, small, checkpoint=url, on_loss="raise", **kept)
        epochs = shuffler.epochs(9)
        for _ in range(3):
            expected = client.gather(next(epochs).map(checked))
        shuffler.save(url)
        time.sleep(1.0)  # the exchange for the next epoch, and the index of this one
        for pid in client.run(os.getpid).values():
            os.kill(pid, signal.SIGKILL)
        shuffler.close()
    assert len(os.listdir(tmp_path / "rows")) == 3
    with (
        new_processes(3) as cluster,
        Client(cluster) as client,
        Shuffler.resume(client, small, url, **kept) as shuffler,
    ):
        samples, record = one_epoch(shuffler, checked, client)
        assert record.store_bytes == 0
        for now, then in zip(samples, expected, strict=True):
            np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("keeps", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_worker_that_takes_a_rank_reads_what_the_lost_one_left(
    workers, small, check_ids, within, tmp_path, monkeypatch, keeps
):
    directory = tmp_path / "rows"
    read_rows, lock = [], threading.Lock()
    read_into = Dataset.read_into

    def counting(self, out, slots, sample_ids, **options):
        with lock:
            read_rows.append(len(sample_ids))
        read_into(self, out, slots, sample_ids, **options)

    kept_here = opening.kept_here

    def later(*args):  # when the session is closed on the worker that was given up
        deadline = time.monotonic() + 10
        while keeps and not KeptFolder.all_in(str(directory), small.identity) and time.monotonic() < deadline:
            time.sleep(0.01)
        return kept_here(*args)

    def lose(address, dask_scheduler):
        [coordinator] = dask_scheduler.extensions["dshuffle"].coordinators.values()
        coordinator.candidates.refused[address] = math.inf
        coordinator.lose(address)

    monkeypatch.setattr(opening, "kept_here", later)
    with (
        workers(3) as cluster,
        Client(cluster) as client,
        Shuffler(client, small, cache_directory=directory, keep_cache=keeps) as shuffler,
    ):
        cluster.scale(4)
        client.wait_for_workers(4)
        epochs = shuffler.epochs(3)
        next(epochs)
        client.gather(next(epochs).map(check_ids))
        monkeypatch.setattr(Dataset, "read_into", counting)
        client.run_on_scheduler(lose, shuffler.addresses[1])
        samples = within(40, lambda: client.gather(next(epochs).map(check_ids)))
        assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
    assert bool(read_rows) != keeps


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [5, 3])
def test_a_disk_without_room_for_two_sets_gives_up_the_first(
    threads, workers, small, check_ids, tmp_path, monkeypatch, n_workers
):
    """The session could use the partitions, but they fill the disk. Its rows come from the dataset instead."""
    directory = tmp_path / "rows"
    kept = {"cache_directory": directory, "keep_cache": True}
    with Shuffler(threads, small, **kept) as shuffler:
        check_first_record(shuffler, check_ids, threads)
    fallocate, most = os.posix_fallocate, 2400 * small.row_nbytes  # two slots for each sample, and a bit more

    def full(fd, offset, length):
        used = 0
        for path in directory.glob("*/rows"):
            with contextlib.suppress(FileNotFoundError):  # another worker removes it
                used += path.stat().st_size
        if used + length > most:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with workers(n_workers) as cluster, Client(cluster) as client, Shuffler(client, small, **kept) as shuffler:
        assert check_first_record(shuffler, check_ids, client).store_bytes > 0
        one_epoch(shuffler, check_ids, client)
    assert len(os.listdir(directory)) == n_workers


@pytest.mark.slow
def test_an_index_that_does_not_fit_is_refused(threads, small, tmp_path, monkeypatch, within, eventually):
    directory = tmp_path / "rows"
    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(CacheBudgetError, match="cache_directory="):
        within(30, lambda: Shuffler(threads, small, cache_directory=directory, keep_cache=True))
    eventually(lambda: os.listdir(directory) == [])


def no_space(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_an_index_that_cannot_be_written_does_not_end_the_session(
    threads, small, check_orders, tmp_path, monkeypatch, caplog
):
    directory = tmp_path / "rows"
    with Shuffler(threads, small, cache_directory=directory, keep_cache=True) as shuffler:
        check_orders(shuffler, 1)
        monkeypatch.setattr(os, "replace", no_space)
        check_orders(shuffler, 2)
    assert "cannot be kept" in caplog.text
    monkeypatch.undo()
    assert {one.label.epoch for one in KeptFolder.all_in(str(directory), small.identity)} == {0}


@pytest.mark.parametrize("directory", [None, "local"])
def test_a_cache_that_cannot_outlive_the_job_is_refused(threads, small, directory):
    with pytest.raises(InvalidParameter, match=r"keep_cache=True.*does not outlive a job"):
        Shuffler(threads, small, cache_directory=directory, keep_cache=True)
    with pytest.raises(InvalidParameter, match="keep_cache='yes'"):
        Shuffler(threads, small, cache_directory="/tmp/rows", keep_cache="yes")


def test_nothing_is_left_without_keep_cache(threads, small, check_orders, tmp_path):
    with Shuffler(threads, small, cache_directory=tmp_path / "rows") as shuffler:
        check_orders(shuffler, 2)
    assert os.listdir(tmp_path / "rows") == []
