"""Whatever ends a session: descriptors, maps, room on the disk, threads and shared memory are free, with no collection.

The garbage collector is off in all workers. Every worker process is compared with itself before the session.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import CacheBudgetError, ExchangeError

from .conftest import OPTIONS, address_of

pytestmark = pytest.mark.slow  # real processes

SHARED_BY_ALL = ("dshuffle-files", "dshuffle-plugin")
"""Beginnings of the names of threads that serve all sessions of a process."""

Census = dict[str, Any]


def collect_no_more():
    gc.collect()
    gc.disable()


def census(folder):
    """What this process has open: by the names of files, the maps of those, threads, and objects of a session."""
    descriptors, room = [], 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            room += os.stat(f"/proc/self/fd/{name}").st_blocks * 512 if target.startswith(folder) else 0
        except FileNotFoundError:  # of the list itself
            continue
        if not target.startswith("socket:"):  # Dask opens and closes those between workers as it likes
            descriptors.append(target.split(":")[0] if target.startswith(("pipe:", "anon_inode:")) else target)
    maps = [
        line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
    ]
    session = ("WorkerSession", "RowFile", "SharedMemory", "CachePartition", "ServerRows", "KeptPartition")
    kinds = [type(thing).__name__ for thing in gc.get_objects() if str(type(thing).__module__).startswith("dshuffle.")]
    return {
        "descriptors": sorted(descriptors),
        "maps": sorted(name for name in maps if name.startswith((folder, "/memfd:dshuffle"))),
        "room": room,
        "threads": sorted(
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith("dshuffle") and not thread.name.startswith(SHARED_BY_ALL)
        ),
        "objects": sorted(kind for kind in kinds if kind in session),
    }


def ids(partition):
    return partition.sample_ids.copy()


def fail(partition):
    raise ZeroDivisionError("no")


def kill_itself(partition, mark):
    if partition.rank == 1 and not os.path.exists(mark):
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return len(partition)


@pytest.fixture(scope="module")
def client():
    with LocalCluster(n_workers=3, processes=True, **OPTIONS) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def dataset(tmp_path):
    rows = np.random.default_rng(0).random((3000, 256))
    return create_dataset(str(tmp_path / "d.zarr"), {"x": rows}, chunk_rows=100)


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "cache")


@pytest.fixture
def unchanged(dataset, folder):
    """Let something end a session, and compare all processes with before."""

    @contextlib.contextmanager
    def unchanged(client):
        with Shuffler(client, dataset, cache_directory=folder) as shuffler:  # what is made once in a process
            for epoch in shuffler.epochs(2):
                client.gather(epoch.map(ids))
            # The census sees what it must not see afterwards.
            used = client.run(census, folder)
            assert all(now["room"] and now["maps"] and now["threads"] and now["objects"] for now in used.values())
            assert any("memfd" in name for now in used.values() for name in now["maps"])
        client.run(collect_no_more)
        collect_no_more()
        try:
            before, here = client.run(census, folder), census(folder)
            yield
            check(client, folder, before)
            now = census(folder)
            assert now["threads"] == here["threads"]
            assert not [name for name in now["descriptors"] if name.startswith(os.path.dirname(folder))]
        finally:
            gc.enable()

    return unchanged


def check(client, folder, before):
    """Nothing is left in any worker. Threads take a moment to end, and hold objects until then. Imports open files."""
    for address, now in client.run(census, folder).items():
        assert (now["maps"], now["room"]) == ([], 0), address
        assert not [name for name in now["descriptors"] if name.startswith((folder, "/memfd:dshuffle"))]

    def left():
        """What each worker has beside what it had; the descriptors of a worker that has come since may differ."""
        return {
            address: (now["threads"], now["descriptors"], now["objects"])
            for address, now in client.run(census, folder).items()
            if now["threads"] or now["objects"] or now["descriptors"] != before.get(address, now)["descriptors"]
        }

    deadline = time.monotonic() + 30
    while remains := left():
        assert time.monotonic() < deadline, f"left: {remains}, before: {before}"
        time.sleep(0.02)


@pytest.mark.parametrize("delivery", ["peer", "server", "storage", "clique"])
def test_closed(client, dataset, folder, unchanged, delivery):
    assignment = "aligned" if delivery == "clique" else "global"
    with unchanged(client):
        shuffler = Shuffler(client, dataset, delivery=delivery, assignment=assignment, cache_directory=folder)
        for epoch in shuffler.epochs(2):
            client.gather(epoch.map(ids))
        shuffler.close()


@pytest.mark.parametrize("how", ["Ctrl-C while rows are exchanged and a task runs", "error in a task"])
def test_left_by_an_exception(client, dataset, folder, unchanged, tmp_path, how):
    def slow(partition):
        time.sleep(0.5)
        return int((partition["x"] >= 0).sum())

    def leave():
        checkpoint = tmp_path / "run.json" if how == "error in a task" else None
        with Shuffler(client, dataset, cache_directory=folder, checkpoint=checkpoint) as shuffler:
            for epoch in shuffler.epochs(5):
                if checkpoint:
                    client.gather(epoch.map(fail))
                epoch.map(slow)
                raise KeyboardInterrupt

    with unchanged(client):
        with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
            leave()
        time.sleep(1)  # tasks that run keep their rows until they end


def test_a_lost_worker_that_is_replaced(client, dataset, folder, unchanged, tmp_path):
    with unchanged(client), Shuffler(client, dataset, cache_directory=folder) as shuffler:
        for epoch in shuffler.epochs(3):
            assert sum(client.gather(epoch.map(kill_itself, str(tmp_path / "mark")))) == 3000


def test_an_exchange_that_is_aborted(client, dataset, folder, unchanged, tmp_path):
    with unchanged(client), Shuffler(client, dataset, delivery="storage", cache_directory=folder) as shuffler:
        for epoch in shuffler.epochs(1):
            client.gather(epoch.map(ids))
        files = (tmp_path / "d.zarr" / "x").rglob("*")
        next(path for path in files if path.is_file() and path.name != "zarr.json").write_bytes(b"")
        with pytest.raises(ExchangeError):
            next(shuffler.epochs(1))


def test_a_session_that_does_not_open(client, dataset, folder, unchanged):
    words = "the server needs"  # when the files are there already
    with unchanged(client), pytest.raises(CacheBudgetError, match=words):
        Shuffler(client, dataset, delivery="server", cache_directory=folder, memory_limit=1_000_000)


def test_the_client_is_gone(client, dataset, folder, unchanged, eventually):
    def sessions(dask_worker):
        return len(dask_worker.plugins["dshuffle"].sessions)

    with unchanged(client):
        with Client(client.scheduler.address, set_as_default=False) as other:
            shuffler = Shuffler(other, dataset, cache_directory=folder)
            for epoch in shuffler.epochs(2):
                other.gather(epoch.map(ids))
        shuffler.closed = True  # else its end would warn that it was not closed
        eventually(lambda: not any(client.run(sessions).values()))
        eventually(lambda: not any(now["objects"] for now in client.run(census, folder).values()))


def test_partitions_that_are_kept(client, dataset, folder, unchanged):
    with unchanged(client):
        for _ in range(2):  # the second session reads what the first has kept
            with Shuffler(client, dataset, cache_directory=folder, keep_cache=True) as shuffler:
                for epoch in shuffler.epochs(1):
                    client.gather(epoch.map(ids))
        assert shuffler.records[0].store_bytes == 0
        assert len(os.listdir(folder)) == 3


def test_another_session_follows(new_processes, dataset, folder, unchanged):
    """Because a worker joins and another one retires."""
    with new_processes(3) as cluster, Client(cluster) as client, unchanged(client):
        with Shuffler(client, dataset, cache_directory=folder, elastic=True) as shuffler:
            sizes = []
            for epoch in shuffler.epochs(6):
                client.gather(epoch.map(ids))
                sizes.append(shuffler.n_workers)
                if epoch.number == 0:
                    cluster.scale(4)
                    client.wait_for_workers(4)
                    client.run(collect_no_more)
                if epoch.number == 2:
                    client.retire_workers([address_of(client, "1")])
        assert (sizes[0], max(sizes), sizes[-1]) == (3, 4, 3)
