"""The memory of workers: what a session may take, shares with others, and gives back."""

from __future__ import annotations

import gc
import threading
import weakref

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import CacheBudgetError, CorruptChunk, ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.planning import Choices, Remainder, ShuffleSpec
from dshuffle.runtime.process import check_memory
from dshuffle.runtime.session_spec import DatasetReference, SessionOptions, SessionSpec
from dshuffle.runtime.settings import Settings

from .conftest import HTTP

pytestmark = pytest.mark.timeout(90)

NAMES = {"0": {}, "1": {}, "2": {}}


def test_the_room_for_a_partition_is_what_dask_process_and_messages_leave(tmp_path):
    """On a worker that only serves it may be 0. Then the server says how much it needs."""
    dataset = create_dataset(tmp_path / "d.zarr", {"x": np.arange(40.0)})
    spec = SessionSpec(
        session_id="a",
        dataset=DatasetReference.of(dataset),
        shuffle=ShuffleSpec(40, 2, Choices(delivery="server")),
        deliveries=("server",),
        options=SessionOptions(),
        settings=Settings.from_config(),
        start=Remainder(0, ()),
    )
    memory = {"limit": 2**30, "pause_fraction": 0.8, "process_nbytes": 0, "reserved": {"other": 2**28}}
    room = int(0.8 * 2**30) - spec.settings.messages_nbytes
    share = int(spec.settings.memory_fraction * 2**30) - 2**28
    assert check_memory(spec, None, **memory) == (share, 0)
    assert check_memory(spec, None, **memory | {"process_nbytes": room - 5}) == (5, 0)
    assert check_memory(spec, None, **memory | {"process_nbytes": 2**30}) == (0, 0)
    assert check_memory(spec, None, **memory | {"pause_fraction": None, "process_nbytes": 2**30}) == (share, 0)
    assert check_memory(spec, None, **memory | {"limit": None}) == (None, 0)


@pytest.mark.slow
def test_the_process_counts_as_it_is(tmp_path):
    """57 % of a worker's limit is within the budget, but Dask would pause the worker at 80 %."""
    limit = 700 * 2**20
    rows = int(0.55 * limit) // 1024
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((rows, 1024), np.uint8)})
    options = {"threads_per_worker": 1, "dashboard_address": None, "scheduler_kwargs": HTTP, "memory_limit": limit}
    with (
        LocalCluster(n_workers=1, processes=True, **options) as cluster,
        Client(cluster) as client,
        pytest.raises(CacheBudgetError, match=r"Dask would pause it at 80% of its memory limit of 734003200"),
    ):
        Shuffler(client, dataset, assignment="local")


def test_two_sessions_that_open_at_once_share_the_memory(cluster_of, small):
    no_pause = {f"distributed.worker.memory.{what}": False for what in ("target", "spill", "pause")}
    found = []
    with (
        dask.config.set(no_pause),
        cluster_of({"0": {"memory_limit": 400_000}}) as cluster,
        Client(cluster) as first,
        Client(cluster.scheduler_address) as second,
    ):

        def open_one(client):
            try:
                found.append(Shuffler(client, small))
            except CacheBudgetError as error:
                found.append(error)

        both = [threading.Thread(target=open_one, args=(client,)) for client in (first, second)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        refused = [one for one in found if isinstance(one, CacheBudgetError)]
        assert len(refused) == 1
        assert "Open sessions on this worker: " in str(refused[0])
        for one in found:
            if isinstance(one, Shuffler):
                one.close()


def test_partitions_are_freed_at_once_after_a_failure(cluster_of, small, check_orders, monkeypatch, eventually):
    """Nothing waits for a garbage collection, and nothing for the client to close the session."""

    def no_disk(*_):
        raise CorruptChunk("no disk")

    alive = []
    build = CachePartition.__init__

    def counted(self, *args, **kwargs):
        build(self, *args, **kwargs)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(CachePartition, "__init__", counted)
    with cluster_of(NAMES) as cluster, Client(cluster) as client:
        shuffler = Shuffler(client, small)
        check_orders(shuffler, 1)
        assert sum(ref() is not None for ref in alive) == 3
        gc.collect()
        gc.disable()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(CachePartition, "unpack", no_disk)  # no other error: the log would hold its frames
                with pytest.raises(ExchangeError, match="no disk"):
                    check_orders(shuffler, 1)
            shuffler.close()
            eventually(lambda: all(ref() is None for ref in alive))
        finally:
            gc.enable()
