"""Measuring a cluster: that figures are there, that nothing is left behind, and who counts as what."""

import asyncio
import math
import subprocess
import sys
import time

import dask
import numpy as np
import pytest
from distributed import Client

from dshuffle import create_dataset
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.planning.cost import all_ways, recommend
from dshuffle.planning.cost.job import Work
from dshuffle.runtime.measure import probe_tasks
from dshuffle.runtime.measure.probe import measure_cluster
from dshuffle.runtime.measure.short_exchanges import time_short_exchanges
from dshuffle.runtime.measure.task_results import task_results
from dshuffle.runtime.server_resource import SERVER_RESOURCE


def handlers_left(client):
    def left(dask_worker):
        return [name for name in dask_worker.handlers if "probe" in name]

    return [name for names in client.run(left).values() for name in names]


@pytest.mark.slow
def test_all_that_the_model_needs_is_measured(cluster_of, small):
    with (
        cluster_of({0: {}, 1: {}, 2: {}, "s": {"resources": {SERVER_RESOURCE: 1}}}) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(4)
        found = measure_cluster(client, small, seconds=1.0)
        assert handlers_left(client) == []
    measured = found.cluster
    assert measured.n_workers == 3
    assert measured.machine_workers == 3
    assert measured.server_on_machine
    assert measured.wire_overhead == 0
    assert measured.epoch_seconds > 0
    assert measured.first_message_seconds is not None
    assert measured.index_seconds > 0
    for rate in ("link_up", "server_up", "storage", "storage_client", "send_rate", "encode_rate", "read_rate"):
        assert 1e4 < getattr(measured, rate) < math.inf, rate
    assert found.link_alone > 0
    assert found.link_together > 0
    assert found.server == pytest.approx(measured.server_up) or found.busy_network > 0.5
    assert 0 <= found.busy_before <= 1
    assert found.seconds < 20
    advice = recommend(measured, all_ways(measured, Work(small.n_samples, small.row_nbytes)))
    assert advice.best.exchange_seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("shares_memory", [False, True])
def test_every_byte_counts(cluster_of, shares_memory):
    """Several messages are under way at a time, and none may be lost from the sum."""

    def count(dask_worker):
        give = dask_worker.handlers[probe_tasks.HANDLER]
        dask_worker.given = 0

        async def counted(nbytes, host):
            dask_worker.given += nbytes
            return await give(nbytes, host)

        dask_worker.handlers[probe_tasks.HANDLER] = counted

    with cluster_of({0: {}, 1: {}, 2: {}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(3)
        workers = list(client.scheduler_info()["workers"])
        client.run(probe_tasks.install)
        client.run(count)
        asked = {"senders": workers, "receivers": workers, "seconds": 0.2, "shares_memory": shares_memory}
        done = client.run(probe_tasks.pull, **asked)
        given = sum(client.run(lambda dask_worker: dask_worker.given).values())
        client.run(probe_tasks.remove, "no name")
    assert sum(traffic.nbytes for traffic in done.values()) == given


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
        fast = time_short_exchanges(client, workers, None, 0.0)
        client.run(delay)
        slow = time_short_exchanges(client, workers, None, 0.0)
    assert fast.empty > 0
    assert slow.short > late
    assert (slow.empty > late) is empty_too, "an exchange without rows waits for no message"


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
def test_tasks_of_others_are_waited_for_longer_than_answers(cluster_of, monkeypatch, caplog):
    monkeypatch.setattr("dshuffle.runtime.client.bounded_calls.ANSWER_WITHIN", 3.0)
    monkeypatch.setattr("dshuffle.runtime.measure.task_results.LOG_AFTER", 0.1)
    with cluster_of({0: {}}) as cluster, Client(cluster) as client, dask.config.set({"dshuffle.timeout": "3s"}):
        client.wait_for_workers(1)
        task = client.submit(time.sleep, 6, pure=False)
        assert measure_cluster(client, None, seconds=0.3).seconds > 3
        task.result()
        assert handlers_left(client) == []
    assert "the measurement waits for its tasks on the workers. They begin after the tasks" in caplog.text
    assert "has not answered" not in caplog.text


@pytest.mark.slow
def test_a_worker_that_leaves_ends_the_wait_for_its_tasks(cluster_of, monkeypatch):
    monkeypatch.setattr("dshuffle.runtime.measure.task_results.LOOK", 0.1)
    with cluster_of({0: {}, 1: {}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(2)
        leaving, _ = workers = list(client.scheduler_info()["workers"])
        tasks = [client.submit(len, "abc", workers=[worker], pure=False) for worker in workers]
        assert task_results(client, tasks, workers) == [3, 3]
        client.retire_workers([leaving])
        task = client.submit(len, "abc", workers=[leaving], pure=False)
        with pytest.raises(ClusterError, match=f"^a worker was lost while the cluster was measured: {leaving}$"):
            task_results(client, [task], workers)


@pytest.mark.slow
def test_a_worker_that_leaves_with_its_result_ends_the_wait(cluster_of, monkeypatch):
    """The scheduler would wait for a worker at this address, to compute the result again."""
    monkeypatch.setattr("dshuffle.runtime.measure.task_results.LOOK", 0.1)
    with cluster_of({0: {}, 1: {}}) as cluster, Client(cluster) as client:
        client.wait_for_workers(2)
        workers = list(client.scheduler_info()["workers"])
        tasks = [client.submit(len, "abc", workers=[worker], pure=False) for worker in workers]
        assert task_results(client, tasks, workers) == [3, 3]
        monkeypatch.setattr("dshuffle.runtime.measure.task_results._have_ended", lambda futures: asyncio.sleep(0))
        cluster.sync(cluster.workers[0].close)
        with pytest.raises(ClusterError, match=r"^a worker was lost while the cluster was measured: "):
            task_results(client, tasks, workers)


@pytest.mark.slow
def test_an_error_of_a_task_is_not_taken_for_a_lost_worker(cluster_of):
    def fails():
        raise PermissionError("/data/x.zarr")

    with cluster_of({"a": {}}) as cluster, Client(cluster) as client:
        message = r"a task of the measurement has failed on a worker \(PermissionError: /data/x\.zarr\)"
        with pytest.raises(ClusterError, match=message):
            task_results(client, [client.submit(fails)], list(client.scheduler_info()["workers"]))


def test_chunks_are_read_whole_and_once(small):
    probe_tasks.keep("a name", small)
    before = small.traffic
    traffic = probe_tasks.read_chunks("a name", seconds=60, seed=1)
    assert traffic.nbytes == 1000 * small.row_nbytes
    assert (small.traffic - before).requests == 20  # ten of each of two arrays
    assert probe_tasks.read_chunks("a name", seconds=0, seed=1).nbytes == 0
    assert 0 < probe_tasks.request_seconds("a name", 0) < 5


def test_the_rate_of_a_store_is_that_of_its_long_reads(monkeypatch):
    """A request takes 50 ms, and then the store gives 100 MB/s."""
    dataset = create_dataset("memory://long-reads", {"x": np.zeros((3000, 1000), "u1")}, chunk_rows=100, overwrite=True)
    clock, calls = [0.0], []

    def read_into(rows, slots, ids):
        calls.append(len(ids))
        clock[0] += 0.05 + len(ids) * 1000 / 100e6

    monkeypatch.setattr(type(dataset), "read_into", lambda self, *given: read_into(*given))
    monkeypatch.setattr(probe_tasks.time, "perf_counter", lambda: clock[0])
    monkeypatch.setitem(probe_tasks._opened, "a name", (dataset, dataset.layout.empty(3000)))
    traffic = probe_tasks.read_chunks("a name", seconds=60, seed=1)
    assert calls == [500, 2500]
    assert traffic.nbytes == 3_000_000
    assert traffic.rate == pytest.approx(2.5e6 / (0.05 + 0.025))

    calls.clear()
    clock[0] = 0.0
    traffic = probe_tasks.read_chunks("a name", seconds=0.01, seed=1)
    assert calls == [500]
    assert traffic.rate == pytest.approx(0.5e6 / (0.05 + 0.005))


@pytest.mark.slow
def test_reading_loads_no_code_once_a_dataset_is_kept(tmp_path):
    """In a new process, as in a new cluster. What is loaded later would count as time of the storage."""
    url = str(tmp_path / "d.zarr")
    create_dataset(url, {"x": np.zeros((20_000, 50), "f4"), "y": np.arange(20_000)})
    code = f"""
import sys
from dshuffle import open_dataset
from dshuffle.runtime.measure import probe_tasks
probe_tasks.keep("a name", open_dataset({url!r}))
packages = lambda: {{name.partition(".")[0] for name in sys.modules}}
before = packages()
assert probe_tasks.read_chunks("a name", 60, 1).nbytes > 0
print(sorted(packages() - before))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "[]\n", ran.stderr


def test_kernels_have_rates():
    found = probe_tasks.kernels(1000)
    assert min(found.gather, found.scatter, found.encode, found.decode) > 1e6
    assert 0 < found.index_seconds < 1e-3
