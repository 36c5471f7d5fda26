"""Coded deliveries on workers: what is recorded of them, and a server that lacks what it needs or goes."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import CacheBudgetError, CorruptChunk, ExchangeError, WorkerLost
from dshuffle.exchange.transports import PacketDecoder
from dshuffle.planning import DELIVERIES, RELAYS, Choices, EpochPlanner, ShuffleSpec, parse_assignment
from dshuffle.runtime.worker.loading import ServerRows

pytestmark = pytest.mark.slow  # real clusters

CODED = sorted(name for name, delivery in DELIVERIES.items() if delivery.coded)
RESOURCE = {"resources": {"dshuffle-server": 1}}
CHECKSUM_NBYTES, ROW_NBYTES = 4, 64


@pytest.fixture(scope="module")
def with_server(cluster_of):
    """Four workers that train, and one that serves."""
    workers = {str(rank): {} for rank in range(4)} | {"extra": RESOURCE}
    with cluster_of(workers) as cluster, Client(cluster) as client:
        yield client


@pytest.mark.parametrize("relay", sorted(RELAYS))
@pytest.mark.parametrize("delivery", CODED)
def test_records_say_what_was_planned_and_moved(with_server, small, check_orders, delivery, relay):
    fraction = None if delivery == "leftover" else 0.5
    way = {"delivery": delivery, "relay": relay, "cache_fraction": fraction, "seed": 3, "sharding": "random"}
    with Shuffler(with_server, small, **way) as shuffler:
        check_orders(shuffler, 3)
    planner = EpochPlanner(ShuffleSpec(1000, 4, Choices(assignment=parse_assignment("global"), **way)))
    planner.load()
    load, *records = shuffler.records
    assert (load.relay, load.encode_seconds, load.decode_seconds) == ("", 0.0, 0.0)
    for record in records:
        plan = planner.advance().packets
        assert plan.coded
        assert (record.delivery, record.relay, record.server) == (delivery, relay, "dedicated")
        assert (record.packets, record.components) == (plan.n_packets, plan.n_components)
        assert record.mean_degree == plan.n_components / plan.n_packets > 1.2
        assert record.coded_load_bytes == plan.n_packets * ROW_NBYTES
        item = ROW_NBYTES + CHECKSUM_NBYTES
        # Each packet comes in once at each of its destinations, whoever sends it there.
        assert sum(record.wire_received_bytes) == plan.n_components * item
        from_server = plan.n_components if relay == "unicast" else plan.n_packets
        assert record.server_sent_bytes == from_server * item
        assert sum(record.wire_sent_bytes) == (plan.n_components - from_server) * item
        assert record.metadata_bytes == plan.n_components * CHECKSUM_NBYTES
        assert record.encode_seconds > 0
        assert record.decode_seconds > 0
        assert record.store_requests == 0 or record.epoch == 1  # the server may have been reading what it serves


def test_the_server_beside_training_needs_no_wire_to_itself(threads, small, check_orders):
    with Shuffler(threads, small, delivery="clique", cache_fraction=0.6, relay="unicast") as shuffler:
        check_orders(shuffler, 3)
    for record in shuffler.records[1:]:
        assert record.server == "beside rank 0"
        assert record.wire_received_bytes[0] == 0 < min(record.wire_received_bytes[1:])


def test_packets_to_hand_on_count_in_the_budget(with_server, small, check_orders, sessions_left):
    # 500 rows, room for 250 that come in and for 250 packets, 64 bytes each and 28 for their places: 92,000 bytes.
    # Plans take 110 bytes for each of 1,000 samples, and 25 for each of 2,000 copies.
    told = r"needs 252000 bytes on each of 4 workers.*250 packets to pass on, 160000 bytes of plans"
    with pytest.raises(CacheBudgetError, match=told):
        Shuffler(with_server, small, delivery="clique", cache_fraction=0.5, memory_limit=251_999)
    assert sessions_left(with_server) == (0, 0)
    with Shuffler(with_server, small, delivery="peer", cache_fraction=0.5, memory_limit=229_000) as shuffler:
        check_orders(shuffler, 2)


def test_a_server_that_cannot_hold_all_rows(with_server, tmp_path, sessions_left):
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((60_000, 1000), np.uint8)})
    with pytest.raises(CacheBudgetError, match=r"coded delivery needs \d+ blocks of .* bytes in the server's memory"):
        Shuffler(with_server, dataset, delivery="clique", memory_limit="55 MB")
    assert sessions_left(with_server) == (0, 0)


def test_a_server_that_cannot_read(with_server, small, check_orders, monkeypatch):
    async def fail(self, bring, stop):
        raise CorruptChunk("block 0 cannot be read")

    load = ServerRows.load
    monkeypatch.setattr(ServerRows, "load", fail)
    with Shuffler(with_server, small, delivery="clique", cache_fraction=0.5) as shuffler:
        with pytest.raises(ExchangeError, match=r"epoch 0 could not be .*the server.*block 0 cannot be read"):
            check_orders(shuffler, 1)
        monkeypatch.setattr(ServerRows, "load", load)
        check_orders(shuffler, 3)
    assert [record.epoch for record in shuffler.records] == [0, 1, 2]


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
def test_a_corrupted_packet_that_is_one_of_several_for_a_row(with_server, small, check_orders, monkeypatch, always):
    """It costs another run, and in the end rows of the store replace the packets."""
    add, spoilt = PacketDecoder._add, []

    def spoil(self, first, last, rows, checksums):
        if always or not spoilt:
            spoilt.append(first)
            rows = rows ^ np.uint8(1)
        add(self, first, last, rows, checksums)

    with Shuffler(with_server, small, delivery="leftover") as shuffler:
        monkeypatch.setattr(PacketDecoder, "_add", spoil)
        check_orders(shuffler, 3)
    runs = [(record.run_id, record.delivery) for record in shuffler.records[1:]]
    assert runs == ([(4, "storage"), (7, "storage")] if always else [(3, "leftover"), (4, "leftover")])


def test_the_server_is_killed(small, within):
    options = {"threads_per_worker": 1, "dashboard_address": None}
    http = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    with (
        LocalCluster(n_workers=3, processes=True, scheduler_kwargs=http, **options) as cluster,
        Client(cluster) as client,
    ):
        shuffler = Shuffler(client, small, delivery="clique", cache_fraction=0.5, server="2", on_loss="raise")
        epochs = shuffler.epochs(5)
        client.gather(next(epochs).map(len))
        address = shuffler._membership.current.addresses[-1]
        [pid] = client.run(os.getpid, workers=[address]).values()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="the server"):
            within(20, lambda: list(epochs))
        within(20, shuffler.close)
