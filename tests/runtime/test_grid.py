"""The delivery ``grid`` on a cluster: what forwarders carry, and faults on the way."""

from __future__ import annotations

import asyncio

import dask
import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler, create_dataset
from dshuffle.exchange.bundles import ForwardedRows, Forwarder
from dshuffle.planning.delivery.definition import CHECKSUM_NBYTES
from dshuffle.planning.delivery.grid import WorkerGrid
from dshuffle.runtime.worker.run import ExchangeRun

ROW = 64
"""Bytes of a row of `small`."""


def test_rows_take_two_hops_and_reach_the_workers_that_peers_would_send_them_to(threads, small, check_orders):
    with Shuffler(threads, small, seed=3) as shuffler:
        expected = check_orders(shuffler, 3)
    with Shuffler(threads, small, seed=3, delivery="grid") as shuffler:
        for now, then in zip(check_orders(shuffler, 3), expected, strict=True):
            assert all(map(np.array_equal, now, then))
    grid = WorkerGrid(5)
    holder = {int(sample): rank for rank, samples in enumerate(expected[0]) for sample in samples}
    sent = 0
    for rank, samples in enumerate(expected[1]):
        for sender in (holder[int(sample)] for sample in samples):
            if sender != rank:
                through = grid.forwarder(sender, rank)
                sent += (sender != through) + (through != rank)
    record = shuffler.records[1]
    headers = sum(rank != through for rank in range(5) for through in grid.forwarders_of(rank))  # a row each
    assert sum(record.wire_sent_bytes) == (sent + headers) * (ROW + CHECKSUM_NBYTES)
    assert sum(record.wire_received_bytes) == sum(record.wire_sent_bytes)


@pytest.mark.slow
def test_short_messages(threads, small, check_orders):
    with (
        dask.config.set({"dshuffle.message-bytes": 100, "dshuffle.window-bytes": 300}),
        Shuffler(threads, small, delivery="grid", assignment="partial:0.4") as shuffler,
    ):
        check_orders(shuffler, 4)
    assert [record.delivery for record in shuffler.records[1:]] == ["grid"] * 3


@pytest.fixture
def corrupt(monkeypatch):
    """Flip a bit in one row of the first bundle that has another row than its header, or of all bundles."""

    def corrupt(row, *, always=False):
        unpack, spoilt = ForwardedRows.unpack, []

        def spoil(self, first, last, rows, checksums):
            if always or (not spoilt and len(rows) > 1):
                spoilt.append(first)
                rows = rows.copy()
                rows[row, 3] ^= 1
            unpack(self, first, last, rows, checksums)

        monkeypatch.setattr(ForwardedRows, "unpack", spoil)

    return corrupt


def test_a_corrupted_header_is_asked_for_again(threads, small, check_orders, corrupt):
    corrupt(0)
    with Shuffler(threads, small, delivery="grid") as shuffler:
        check_orders(shuffler, 3)
    assert [(record.run_id, record.recovered_rows) for record in shuffler.records] == [(1, 0), (2, 0), (3, 0)]


def test_bundles_that_are_always_corrupted_are_replaced_by_rows_of_the_store(threads, small, check_orders, corrupt):
    corrupt(0, always=True)
    with Shuffler(threads, small, delivery="grid") as shuffler:
        check_orders(shuffler, 3)
    for record in shuffler.records[1:]:
        assert record.recovered_rows == record.needed
        assert sum(record.wire_sent_bytes) == sum(record.wire_received_bytes)


def test_a_row_that_is_corrupted_on_the_way_is_read_from_the_store(threads, small, check_orders, corrupt):
    corrupt(-1)
    with Shuffler(threads, small, delivery="grid") as shuffler:
        check_orders(shuffler, 3)
    assert shuffler.records[1].recovered_rows > 0
    assert [record.delivery for record in shuffler.records[1:]] == ["grid"] * 2


def test_an_aborted_run_keeps_the_bundles_that_have_arrived(threads, small, check_orders, monkeypatch):
    begin, resumed = Forwarder.begin, []

    def fail_once(self, run_id, rows, **options):
        resumed.append(options["resumed"])
        begin(self, run_id, rows, **options)

    received, failed = ExchangeRun.received, []

    def fail(self, run_id, reason, again):
        if not failed and self.epoch == 1:
            failed.append(run_id)
            reason, again = "on purpose", True
        received(self, run_id, reason, again)

    with Shuffler(threads, small, delivery="grid") as shuffler:
        monkeypatch.setattr(Forwarder, "begin", fail_once)
        monkeypatch.setattr(ExchangeRun, "received", fail)
        check_orders(shuffler, 3)
    assert shuffler.records[1].run_id == failed[0] + 1
    assert any(resumed)
    assert [record.delivery for record in shuffler.records[1:]] == ["grid"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["at once", "when all else is done"])
def test_a_forwarder_that_fails_late_ends_nothing(cluster_of, small, check_orders, monkeypatch, within, fails):
    """Ranks vote when their own rows are here, whatever their forwarders do."""
    received = Forwarder._received

    def fail(self, run_id, reason, again):
        if run_id == 2 and fails == "when all else is done":
            asyncio.get_running_loop().call_later(1.0, received, self, run_id, "on purpose", True)
        else:
            received(self, run_id, "on purpose" if run_id == 2 else reason, again)

    monkeypatch.setattr(Forwarder, "_received", fail)
    with cluster_of({str(rank): {} for rank in range(7)}) as cluster, Client(cluster) as client:
        client.wait_for_workers(7)
        with Shuffler(client, small, delivery="grid") as shuffler:
            within(60, lambda: check_orders(shuffler, 3))
    assert shuffler.records[1].recovered_rows == shuffler.records[1].needed
    assert [record.delivery for record in shuffler.records[1:]] == ["grid"] * 2


@pytest.mark.slow
def test_bundles_that_are_acknowledged_stay_what_they_are(threads, tmp_path):
    """Within a process, Dask hands over the very arrays that were packed."""
    rows = np.random.default_rng(0).integers(0, 255, (3000, 4096), np.uint8)
    dataset = create_dataset(str(tmp_path / "long.zarr"), {"x": rows, "y": np.arange(3000)})
    with (
        dask.config.set({"dshuffle.window-bytes": 2**21, "dshuffle.message-bytes": 2**19}),
        Shuffler(threads, dataset, delivery="grid") as shuffler,
    ):
        for epoch in shuffler.epochs(4):
            threads.gather(epoch.map(lambda partition: partition["y"].copy()))
    assert [record.recovered_rows for record in shuffler.records] == [0, 0, 0, 0]
    assert sum(shuffler.records[1].wire_sent_bytes) > 1.1 * shuffler.records[1].needed * 4100


def test_rows_take_one_hop_where_bundles_would_be_too_long(threads, tmp_path):
    dataset = create_dataset(str(tmp_path / "long.zarr"), {"x": np.zeros((1000, 4096), np.uint8)})
    with (
        dask.config.set({"dshuffle.window-bytes": 2**17, "dshuffle.message-bytes": 2**16}),
        Shuffler(threads, dataset, delivery="grid") as shuffler,
    ):
        for epoch in shuffler.epochs(2):
            threads.gather(epoch.map(lambda partition: None))
    assert sum(shuffler.records[1].wire_sent_bytes) == shuffler.records[1].needed * 4100


@pytest.mark.parametrize("delivery", ["grid", "peer"])
def test_rows_without_bytes(threads, tmp_path, delivery):
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.empty((100, 0))})
    with Shuffler(threads, dataset, delivery=delivery) as shuffler:
        for epoch in shuffler.epochs(3):
            ids = np.concatenate(threads.gather(epoch.map(lambda partition: partition.sample_ids.copy())))
            assert np.array_equal(np.sort(ids), np.arange(100))


@pytest.mark.parametrize("n_workers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 7))])
def test_few_workers(cluster_of, small, check_orders, n_workers):
    with cluster_of({str(rank): {} for rank in range(n_workers)}) as cluster, Client(cluster) as client:
        client.wait_for_workers(n_workers)
        with Shuffler(client, small, delivery="grid") as shuffler:
            check_orders(shuffler, 3)
