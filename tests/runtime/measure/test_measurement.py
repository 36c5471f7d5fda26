"""Measuring a cluster by sessions: that rates are those of its links and its store, and who counts as what."""

import asyncio
import math

import numpy as np
import pytest
from distributed import Client

from dshuffle import create_dataset
from dshuffle.compare import EmulatedRates, local_cluster
from dshuffle.errors import ClusterError
from dshuffle.planning.cost import Work, all_ways, recommend
from dshuffle.runtime.measure import measurement
from dshuffle.runtime.measure.measurement import _short_exchanges, measure_cluster, shared_links
from dshuffle.runtime.session_spec import SERVER_RESOURCE


@pytest.mark.slow
def test_all_that_the_model_needs_is_measured(cluster_of, small):
    with (
        cluster_of({0: {}, 1: {}, 2: {}, "s": {"resources": {SERVER_RESOURCE: 1}}}) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(4)
        found = measure_cluster(client, small, seconds=1.0)
    measured = found.cluster
    assert measured.n_workers == 3
    assert measured.machine_workers == 3
    assert measured.server_on_machine
    assert measured.wire_overhead == 0
    assert measured.epoch_seconds > 0
    assert measured.first_message_seconds is not None
    for rate in ("link_up", "server_up", "storage", "storage_client", "send_rate", "read_rate"):
        assert 1e4 < getattr(measured, rate) < math.inf, rate
    assert found.link_alone > 0
    assert found.link_together > 0
    assert found.server == pytest.approx(measured.server_up) or found.busy_network > 0.5
    assert 0 <= found.busy_before <= 1
    advice = recommend(measured, all_ways(measured, Work(small.n_samples, small.row_nbytes)))
    assert advice.best.exchange_seconds > 0


@pytest.mark.slow
def test_rates_are_those_of_the_links_and_the_store(tmp_path):
    """Both are slow enough to be the bottleneck, and a busy machine only makes them slower."""
    rows = np.random.default_rng(0).integers(0, 256, (8192, 1024), np.uint8)
    dataset = create_dataset(tmp_path / "d.zarr", {"x": rows}, chunk_rows=256)
    with local_cluster(2, rates=EmulatedRates(links=6e6, store=12e6)) as client:
        found = measure_cluster(client, dataset, seconds=4.0)
    assert 2e6 < found.link_together < 9e6
    assert found.server is not None
    assert 2e6 < found.server < 9e6
    assert 4e6 < found.cluster.storage < 18e6


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "empty_too"), [("dshuffle_fetch", False), ("dshuffle_begin", True)])
def test_short_exchanges_are_timed_from_the_order_to_the_votes(cluster_of, operation, empty_too):
    """Late answers make them longer: of messages only those that have any, and not by as much for each worker."""
    late = 1.0

    def delay(dask_worker):
        answer = dask_worker.handlers[operation]

        async def delayed(*args, **message):
            await asyncio.sleep(late)
            reply = answer(*args, **message)
            return await reply if asyncio.iscoroutine(reply) else reply

        dask_worker.handlers[operation] = delayed

    with cluster_of({name: {} for name in range(3)}) as cluster, Client(cluster) as client:
        client.wait_for_workers(3)
        workers = list(client.scheduler_info()["workers"])
        measurement.install_plugin(client)
        assert min(_short_exchanges(client, workers, 0.0)[0]) > 0
        client.run(delay)
        empty, short = map(min, _short_exchanges(client, workers, 0.0))
    assert short > late
    assert (empty > late) is empty_too, "an exchange without rows waits for no message"


@pytest.mark.slow
def test_a_worker_that_leaves_ends_the_measurement(cluster_of, monkeypatch):
    with cluster_of({0: {}, 1: {}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(2)
        leaving = next(iter(client.scheduler_info()["workers"]))
        install = measurement.install_plugin

        def leave(client):
            install(client)
            client.retire_workers([leaving])

        monkeypatch.setattr(measurement, "install_plugin", leave)
        with pytest.raises(ClusterError, match=r"^a worker was lost while the cluster was measured"):
            measure_cluster(client, None, seconds=0.3)


def test_no_links_are_shared_on_one_machine_or_with_a_worker_each():
    assert shared_links(["one", "one"]) == (2, 0)
    assert shared_links(["one", "two"])[0] == 1
    assert shared_links(["one", "one", "two"]) == (2, 0)  # machines have equally many
