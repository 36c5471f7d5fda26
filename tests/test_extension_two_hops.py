"""A second delivery of two hops: one file of planning, one transport, and a line in each registry.

`Detour` and `DetourTransport` stand for the two files. Nothing else in dshuffle is changed.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle import Shuffler
from dshuffle.cli import main
from dshuffle.compare import local_cluster, product_of_ways
from dshuffle.exchange.transports import TRANSPORTS, BundleTransport
from dshuffle.pipeline import LocalWorkers, Pipeline, Training
from dshuffle.planning import DELIVERIES, Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.cost import ClusterRates, Work, all_ways, compare_costs, predict
from dshuffle.planning.cost.prediction import loads_of, message_count
from dshuffle.planning.delivery.definition import CHECKSUM_NBYTES, loads_of_hops, messages_of_rows
from dshuffle.planning.delivery.peer import RowsFromPeers, plan_peer
from dshuffle.rows import RowLayout
from dshuffle.runtime.memory import partition_nbytes
from dshuffle.synthetic import keyed_regression


class Detour(RowsFromPeers):
    """Every row goes through the worker after its destination."""

    name = "detour"
    plan = staticmethod(plan_peer)
    transport = "detours"
    demands = 1

    def passed_on(self, n_workers, *, relay, in_chunks, most_incoming):
        return 2 * most_incoming

    def counted_loads(self, demand, plan):
        growth, through = demand.growth, after(plan.destinations, demand.n_workers)
        first = plan.senders != through
        senders = np.concatenate([plan.senders[first], through])
        ends = np.concatenate([through[first], plan.destinations])
        links = loads_of_hops(demand, senders, ends, demand.wire_nbytes * growth)
        return dataclasses.replace(demand.no_loads(packets=plan.n_packets * growth), **links)

    def message_count(self, loads, row_nbytes, relay, rate):
        n = len(loads.worker_in)
        return messages_of_rows(loads, row_nbytes, n * (n - 1) + n, rate)


def after(ranks, n_workers):
    """The next worker of each rank."""
    return (ranks + 1) % n_workers


class DetourRoutes:
    """Every worker forwards to the one before it."""

    def __init__(self, n_workers):
        self.n_columns = n_workers

    def column_of(self, rank):
        return np.array([(rank - 1) % self.n_columns])

    def forwarders_of(self, sender):
        return list(range(self.n_columns))

    def forwarders_to(self, destination):
        return [after(destination, self.n_columns)]

    def senders_through(self, forwarder):
        return np.arange(self.n_columns)


class DetourTransport(BundleTransport):
    """Bundles for the worker after each destination."""

    name = "detours"
    routes = DetourRoutes


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(DELIVERIES, "detour", Detour())
    monkeypatch.setitem(TRANSPORTS, "detours", DetourTransport)


def test_the_cost_model_knows_it():
    n, cluster = 5, ClusterRates(5, link_up=1e6, link_down=1e6, wire_overhead=0.0)
    ways = all_ways(cluster, Work(10_000, 1000), assignments=["global"])
    assert [way.way for way in ways if "detour" in way.way] == ["global + detour"]
    [way] = [way for way in ways if "detour" in way.way]
    # 8,000 rows move. A quarter of them take one hop, the others two.
    moved = 8000 * 1.75 * (1000 + CHECKSUM_NBYTES)
    assert predict(cluster, way).worker_egress == pytest.approx(moved, rel=0.02)
    times = {prediction.work.way: prediction.exchange_seconds for prediction in compare_costs(cluster, ways)}
    assert times["global + detour"] == pytest.approx(1.75 * times["global + peer"], rel=0.03)
    assert message_count(way, loads_of(cluster, way)) == n * n  # a bundle to every other worker, and rows to one


def test_its_forwarders_have_memory():
    layout = RowLayout.of({"x": (np.dtype("u1"), (1000,))})
    direct, through = (
        partition_nbytes(ShuffleSpec(1000, 4, Choices(delivery=delivery)), layout) for delivery in ("peer", "detour")
    )
    assert through - direct > 2 * 1000 * ShuffleSpec(1000, 4, Choices()).max_incoming


def test_the_command_line_knows_it():
    advise = "advise --workers 4 --samples 1000 --bandwidth 1gbit --assignment global --json"
    ran = CliRunner().invoke(main, advise.split(), catch_exceptions=False)
    [row] = [way for way in json.loads(ran.stdout)["ways"] if way["way"] == "global + detour"]
    assert row["packets"] == row["needed"] > 500


def test_rows_take_the_detour_in_a_session(tmp_path):
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", keyed_regression(300), chunk_rows=50)
    n = 3
    planner = EpochPlanner(ShuffleSpec(300, n, Choices(delivery="detour", seed=3)))
    planner.load()
    packets = planner.advance().packets
    hops = int((packets.senders != after(packets.destinations, n)).sum()) + packets.n_packets
    with local_cluster(n, processes=False) as client:
        with Shuffler(client, dataset, delivery="detour", seed=3) as shuffler:
            for epoch in shuffler.epochs(3):
                ids = client.gather(epoch.map(sample_ids))
                assert np.array_equal(np.sort(np.concatenate(ids)), np.arange(300))
        record = shuffler.records[1]
        headers = n * (n - 1)  # a row in each bundle
        assert record.delivery == "detour"
        assert sum(record.wire_sent_bytes) == (hops + headers) * (dataset.row_nbytes + CHECKSUM_NBYTES)
        assert record.recovered_rows == 0


def sample_ids(partition):
    return partition.sample_ids


@pytest.mark.slow
def test_comparisons_know_it(tmp_path):
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", keyed_regression(400), chunk_rows=50)
    ways = product_of_ways(Choices(), ["global"], ["detour", "peer"])
    training, threads = Training("linear_regression", epochs=3, step=0.1), LocalWorkers(3, processes=False)
    comparison = Pipeline(dataset, training, ways, threads, report=tmp_path / "report").run(progress=False).comparison
    detour, peer = comparison.ways
    assert detour.records[1].choices.label == "global + detour"
    assert sum(detour.records[1].wire_received_bytes) > 1.3 * sum(peer.records[1].wire_received_bytes)
    assert [point.error for point in detour.history] == [point.error for point in peer.history]
