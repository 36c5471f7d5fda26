"""Bad input and things that go wrong: a clear error, everybody still where they were, nothing left behind."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import (
    CacheBudgetError,
    ClusterError,
    DatasetChanged,
    DatasetError,
    DatasetNotFound,
    ExchangeError,
    InvalidParameter,
)
from dshuffle.planning import EpochPlan, EpochPlanner
from dshuffle.planning.planner import OwnPlanner
from dshuffle.runtime import Epoch
from dshuffle.runtime.session_spec import DatasetReference
from dshuffle.runtime.worker.worker_plugin import DShuffleWorker


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"assignment": "globall"}, r"assignment='globall' is not allowed.*'local', 'partial:Q'.*'global', 'aligned'"),
        ({"delivery": "post"}, r"delivery='post' is not allowed.*\['auto', 'clique', 'coded', .*'peer', 'server', "),
        ({"relay": "pigeon"}, r"relay='pigeon' is not allowed.*\['pipelined', 'ring', 'unicast'\]"),
        ({"delivery": "leftover", "cache_fraction": 0.5}, r"delivery='leftover' is not allowed.*Use one of .*'clique'"),
        ({"cache_fraction": 0.1}, r"cache_fraction=0\.1 is not allowed.*1/5|cache_fraction=0\.1.*0\.2"),
        ({"memory_limit": "lots"}, r'memory_limit=\'lots\' is not allowed.*"2 GiB"'),
        ({"server": "nobody", "delivery": "server"}, r"server='nobody' is not allowed.*inproc"),
    ],
)
def test_a_parameter_that_is_not_allowed(threads, small, sessions_left, wrong, message):
    with pytest.raises(InvalidParameter, match=message):
        Shuffler(threads, small, **wrong)
    assert sessions_left(threads) == (0, 0)


@pytest.mark.parametrize("count", [-1, 1.5, None, "3"])
def test_counts_that_are_none(threads, small, count):
    with Shuffler(threads, small) as shuffler:
        with pytest.raises(InvalidParameter, match=r"count=.*is not allowed; it must be an integer >= 0"):
            shuffler.epochs(count)  # at once, not when it is iterated over
        assert len(list(shuffler.epochs(1))) == 1


def test_a_window_without_room_for_a_message(threads, small):
    words = r"dshuffle.window-bytes=.*one message"
    with dask.config.set({"dshuffle.window-bytes": "1 MiB"}), pytest.raises(InvalidParameter, match=words):
        Shuffler(threads, small)


def test_a_budget_that_is_too_small(threads, small, sessions_left):
    # 200 rows and room for 200, of 64 bytes and 28 for their places: 36,800 bytes on each of 5 workers.
    with pytest.raises(CacheBudgetError, match=r"needs 36800 bytes on each of 5 workers.*, more workers, or rows"):
        Shuffler(threads, small, memory_limit=18_400)
    with pytest.raises(CacheBudgetError, match="Use a larger memory_limit, a lower cache_fraction"):
        Shuffler(threads, small, memory_limit=36_800, cache_fraction=1.0)
    assert sessions_left(threads) == (0, 0)
    with Shuffler(threads, small, memory_limit=36_800) as shuffler:
        assert len(list(shuffler.epochs(2))) == 2


def test_the_budget_is_a_part_of_the_workers_own_memory(client_of, small):
    no_pause = {f"distributed.worker.memory.{what}": False for what in ("target", "spill", "pause")}
    with client_of({name: {"memory_limit": 153_333} for name in "abc"}, no_pause) as client:
        # 334 rows and room for as many take 61,456 bytes, and 60 % of the limit is more than that.
        with Shuffler(client, small) as shuffler:
            assert len(list(shuffler.epochs(2))) == 2
        with (
            dask.config.set({"dshuffle.memory-fraction": 0.4}),
            pytest.raises(CacheBudgetError, match=r"needs 61456 bytes on each of 3.*memory_limit allows 61333"),
        ):
            Shuffler(client, small)


def test_fewer_samples_than_workers(threads, tmp_path, sessions_left):
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros(4)})
    with pytest.raises(InvalidParameter, match=r"n_samples=4 is not allowed.*>= 5.*fewer samples than workers"):
        Shuffler(threads, dataset)
    assert sessions_left(threads) == (0, 0)


def test_no_workers(client_of, small):
    with client_of({}) as client, pytest.raises(ClusterError, match="does not have any workers that"):
        Shuffler(client, small)


def test_an_asynchronous_client(threads, small):
    async def try_it():
        async with Client(threads.scheduler.address, asynchronous=True) as client:
            with pytest.raises(InvalidParameter, match=r"client=.*a synchronous Client"):
                Shuffler(client, small)

    threads.sync(try_it)
    assert asyncio.iscoroutinefunction(try_it)


def test_a_closed_client(cluster_of, small):
    with cluster_of({"a": {}}) as cluster:
        client = Client(cluster)
        client.close()
        with pytest.raises(ClusterError, match="client is closed"):
            Shuffler(client, small)


def test_a_worker_that_cannot_be_set_up(cluster_of, small, sessions_left, monkeypatch):
    setup = DShuffleWorker.setup

    async def setup_fails(self, worker):
        if str(worker.name) == "b":
            raise RuntimeError("no room for plugins here")
        await setup(self, worker)

    monkeypatch.setattr(DShuffleWorker, "setup", setup_fails)
    with cluster_of({"a": {}, "b": {}, "c": {}}) as cluster, Client(cluster) as client:
        with (
            dask.config.set({"dshuffle.timeout": "500ms"}),
            pytest.raises(ClusterError, match=r"on 1 of 3 workers, among them .*: its log has the reason"),
        ):
            Shuffler(client, small)
        assert sessions_left(client) == (0, 0)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("removed", DatasetNotFound, r"rank \d \(inproc://.*no dataset exists at"),
        ("removed before", DatasetError, "cannot be read any more"),
        ("written again", DatasetChanged, "is not the one on the client"),
    ],
)
def test_workers_that_see_another_dataset(threads, small, sessions_left, monkeypatch, what, error, message):
    reference = DatasetReference.of(small)
    if what != "removed before":
        monkeypatch.setattr(DatasetReference, "of", lambda dataset: reference)
    if what == "written again":
        create_dataset(small.url, {"x": np.zeros((900, 7)), "y": np.arange(900)}, overwrite=True)
    else:
        shutil.rmtree(small.url)
    with pytest.raises(error, match=message):
        Shuffler(threads, small)
    assert sessions_left(threads) == (0, 0)


def chunk_files(dataset, array):
    return sorted(path for path in (Path(dataset.url) / array / "c").rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "delivery", ["peer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("server", "storage"))]
)
def test_a_chunk_is_corrupted_before_the_first_epoch(threads, small, check_orders, sessions_left, delivery):
    chunk = chunk_files(small, "x")[3]
    good = chunk.read_bytes()
    with Shuffler(threads, small, delivery=delivery) as shuffler:
        chunk.write_bytes(good[:50] + b"!" + good[51:])
        for _ in range(2):
            with pytest.raises(ExchangeError, match=r"epoch 0 could not be exchanged: rank .*chunk \(3, 0\).*'x'"):
                next(shuffler.epochs(3))
        assert shuffler.records == []
        chunk.write_bytes(good)
        check_orders(shuffler, 3)
    assert [record.epoch for record in shuffler.records] == [0, 1, 2]
    assert shuffler.records[0].run_id > 1
    assert sessions_left(threads) == (0, 0)


def test_the_dataset_is_gone_before_an_epoch_that_reads_it_again(threads, small, check_ids, check_orders):
    with Shuffler(threads, small, delivery="storage") as shuffler:
        first = check_orders(shuffler, 1)
        hidden = small.url + ".hidden"
        shutil.move(small.url, hidden)
        with pytest.raises(ExchangeError, match=r"epoch 1 could not be exchanged: rank .*chunk"):
            next(shuffler.epochs(1))
        # All are still on the former epoch, with its rows.
        epoch = Epoch(shuffler, shuffler._calls, shuffler._position.tasks)
        again = threads.gather(epoch.map(check_ids))
        assert all(np.array_equal(a, b) for a, b in zip(first[0], again, strict=True))
        shutil.move(hidden, small.url)
        check_orders(shuffler, 3)
    assert [record.epoch for record in shuffler.records] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "where", "fraction"),
    [
        (EpochPlanner, "advance", 0.5),  # excess is planned for all workers
        (EpochPlan, "for_worker", 0.5),
        (OwnPlanner, "plan", None),
    ],
)
def test_whatever_goes_wrong_while_planning_is_heard_of(
    threads, small, check_orders, monkeypatch, owner, where, fraction
):
    right = getattr(owner, where)

    def wrong(*args):
        raise MemoryError("no more of it")

    with Shuffler(threads, small, delivery="peer", cache_fraction=fraction) as shuffler:
        monkeypatch.setattr(owner, where, wrong)
        with pytest.raises(ExchangeError, match=r"epoch \d could not be exchanged: .*no more of it"):
            for _ in shuffler.epochs(2):
                pass
        monkeypatch.setattr(owner, where, right)
        seen = check_orders(shuffler, 2)
    with Shuffler(threads, small, delivery="peer", cache_fraction=fraction) as shuffler:
        expected = check_orders(shuffler, len(shuffler.records) + 4)
    assert any(np.array_equal(seen[0][0], epoch[0]) for epoch in expected)


@pytest.mark.parametrize("delivery", ["storage", pytest.param("server", marks=pytest.mark.slow)])
def test_a_dataset_written_again_in_mid_session_is_refused(threads, small, check_orders, delivery):
    """Rows of the old and the new dataset are never mixed: the epoch under way is given up."""
    with Shuffler(threads, small, delivery=delivery, memory_limit="1 MiB") as shuffler:
        check_orders(shuffler, 2)
        arrays = small.read_rows(np.arange(1000))
        create_dataset(small.url, {"x": arrays["x"] + 1, "y": arrays["y"]}, chunk_rows=100, overwrite=True)
        if delivery == "server":  # as if not all rows were in memory
            threads.run(_forget_rows)
        with pytest.raises(ExchangeError, match=r"small.zarr was written again while it was in use: its identity was"):
            check_orders(shuffler, 1)
    with Shuffler(threads, small.url, delivery=delivery) as shuffler:
        check_orders(shuffler, 2)


def _forget_rows(dask_worker):
    for session in dask_worker.plugins["dshuffle"].sessions.values():
        if session.server_rows is not None:
            session.server_rows._loaded[:] = False


@pytest.mark.parametrize("protocol", [26])
def test_a_client_of_another_release_is_refused_before_a_session_opens(
    threads, small, sessions_left, monkeypatch, protocol
):
    monkeypatch.setattr("dshuffle.runtime.client.session_client.PROTOCOL", protocol)
    with pytest.raises(ClusterError, match=r"the client uses protocol 26 .* Install the same version"):
        Shuffler(threads, small)
    assert sessions_left(threads) == (0, 0)
