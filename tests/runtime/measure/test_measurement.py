"""Measuring a cluster by sessions: that rates are those of its links and its store, and who counts as what."""

import asyncio
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import Client

from dshuffle import create_dataset
from dshuffle.compare import EmulatedRates, local_cluster
from dshuffle.errors import CacheBudgetError, ClusterError, InvalidParameter
from dshuffle.planning.cost import Work, all_ways, recommend
from dshuffle.runtime.measure import measurement
from dshuffle.runtime.measure.measurement import _short_exchanges, measure_cluster, shared_links
from dshuffle.runtime.scheduler.members import in_rank_order
from dshuffle.runtime.session_spec import SERVER_RESOURCE

LINK = 125e6


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
def test_a_cluster_of_one(cluster_of, small):
    with cluster_of({0: {}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(1)
        found = measure_cluster(client, small, seconds=0.3)
        assert (found.cluster.n_workers, found.link_alone, found.link_together, found.server) == (1, 0, 0, None)
        with pytest.raises(InvalidParameter, match=r"seconds=60.*\(0, 20\]"):
            measure_cluster(client, small, seconds=60)


@pytest.mark.slow
def test_somebody_must_train(cluster_of, small):
    with cluster_of({0: {"resources": {SERVER_RESOURCE: 1}}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(1)
        with pytest.raises(ClusterError, match="workers can train"):
            measure_cluster(client, small, seconds=0.3)


@pytest.mark.slow
def test_tasks_of_others_are_not_waited_for(cluster_of):
    with cluster_of({0: {}, 1: {}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(2)
        tasks = client.map(time.sleep, [600.0] * 8, pure=False)
        assert measure_cluster(client, None, seconds=0.3).link_together > 0
        client.cancel(tasks, force=True)


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


@pytest.mark.slow
def test_long_rows(cluster_of):
    """Generated rows are shorter, so that some of them move in every exchange."""
    with cluster_of({0: {}, 1: {}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(2)
        assert measure_cluster(client, None, row_nbytes=2**30, seconds=0.3).link_together > 0


@pytest.mark.slow
def test_what_does_not_fit_is_not_measured_with(cluster_of, monkeypatch):
    """Where the first rows fit and more do not, the first ones count."""
    session, sizes = measurement._session, []

    def limited(client, workers, dataset, *args):
        sizes.append(dataset.n_samples * dataset.row_nbytes)
        if sizes[-1] > 2 << 20:
            raise CacheBudgetError("no room")
        return session(client, workers, dataset, *args)

    monkeypatch.setattr(measurement, "_session", limited)
    with cluster_of({0: {}, 1: {}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(2)
        assert measure_cluster(client, None, seconds=20.0).link_together > 0
        assert sizes[1] == 2 << 20 < sizes[2]  # 1 MiB for each worker at first
        client.run(lambda dask_worker: setattr(dask_worker.memory_manager, "memory_limit", 1000))
        with pytest.raises(ClusterError, match="cannot be measured: rank "):
            measure_cluster(client, None, seconds=0.3)


def test_no_links_are_shared_on_one_machine_or_with_a_worker_each():
    assert shared_links(["one", "one"]) == (2, 0)
    assert shared_links(["one", "two"])[0] == 1
    assert shared_links(["one", "one", "two"]) == (2, 0)  # machines have equally many


def test_the_workers_of_a_host_have_consecutive_ranks():
    names = {"0": "x", "1": "y", "10": "x", "2": "x", "3": "y", "late": "z"}
    workers = [SimpleNamespace(name=name, host=host, address=f"tcp://{host}:{name}") for name, host in names.items()]
    assert [worker.name for worker in in_rank_order(reversed(workers))] == ["0", "2", "10", "1", "3", "late"]


@pytest.mark.slow
def test_a_cluster_of_two_machines(cluster_of, small, monkeypatch):
    pairs, session, look = [], measurement._session, measurement.run_on_workers

    def two(client, function, *args, **kwargs):
        found = look(client, function, *args, **kwargs)
        return {where: (f"machine {i // 2}", *found[where][1:]) for i, where in enumerate(sorted(found))}

    def watched(client, workers, *args):
        if len(workers) == 2:
            pairs.append({*workers})
        return session(client, workers, *args)

    monkeypatch.setattr(measurement, "run_on_workers", two)
    monkeypatch.setattr(measurement, "_session", watched)
    with cluster_of({0: {}, 1: {}, 2: {}, 3: {}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(4)
        addresses = sorted(client.scheduler_info()["workers"])
        found = measure_cluster(client, small, seconds=0.5)
    assert found.cluster.machine_workers == 2
    assert len(pairs) == 2
    assert all(len(pair & {*addresses[:2]}) == 1 for pair in pairs)
