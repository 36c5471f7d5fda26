"""Workers join, retire and are lost, and every sample is trained on exactly once in every epoch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, Status

from dshuffle import Dataset, PerRank, Shuffler, create_dataset
from dshuffle.errors import ClusterError, InvalidParameter, WorkerLost
from dshuffle.planning import Choices, ShuffleSpec
from dshuffle.runtime.cluster_view import starts_no_more
from dshuffle.runtime.memory import member_nbytes
from dshuffle.runtime.scheduler import participants
from dshuffle.runtime.session_spec import SAMPLED_ROWS
from dshuffle.runtime.worker.former_partitions import FormerPartitions

from .conftest import OPTIONS, task_that_checks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

WAYS = [
    {},
    {"assignment": "partial:0.3"},
    {"assignment": "local"},
    {"assignment": "chunks"},
    {"delivery": "storage"},
    {"delivery": "server"},
    {"cache_fraction": 0.7},
    {"assignment": "aligned", "delivery": "clique", "cache_fraction": 0.7},
    {"balance": "label"},
]


@pytest.fixture
def labelled(tmp_path):
    arrays = {"x": np.random.default_rng(0).random((1000, 7)), "y": np.arange(1000), "label": np.arange(1000) % 3}
    return create_dataset(str(tmp_path / "labelled.zarr"), arrays, chunk_rows=50)


@pytest.fixture
def checked(labelled):
    return task_that_checks(labelled)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())) or "default")
def test_workers_join_and_retire(labelled, checked, way):
    with LocalCluster(n_workers=2, processes=False, memory_limit=0, **OPTIONS) as cluster, Client(cluster) as client:
        with Shuffler(client, labelled, elastic=True, seed=4, **way) as shuffler:
            counts, seen = [], []
            for epoch in shuffler.epochs(9):
                seen.append(client.gather(epoch.map(checked)))
                assert np.array_equal(np.sort(np.concatenate(seen[-1])), np.arange(1000))
                counts.append(shuffler.n_workers)
                if epoch.number == 1:
                    cluster.scale(4)
                    client.wait_for_workers(4)
                elif epoch.number == 5:
                    cluster.scale(3)
        assert counts[:2] == [2, 2]
        assert counts[3:6] == [4, 4, 4]
        assert counts[7:] == [3, 3]
        assert [record.n_workers for record in shuffler.records] == counts
        if way.get("assignment") in ("local", "partial:0.3"):  # see the next test
            return
        # The samples are those of a session that always had three workers.
        with Shuffler(client, labelled, seed=4, first_epoch=7, **way) as shuffler:
            for epoch in shuffler.epochs(2):
                for one, other in zip(client.gather(epoch.map(checked)), seen[epoch.number], strict=True):
                    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("assignment", ["local", "partial:0.1"])
@pytest.mark.parametrize("way", [{}, {"delivery": "server"}, {"sharding": "contiguous"}], ids=str)
def test_workers_that_stay_keep_their_samples(tmp_path, assignment, way):
    """From 6 to 8 workers and back, no more rows move than a rebalance needs."""
    q, row_nbytes = 1200, 8192
    rows = np.random.default_rng(0).integers(0, 256, (q, row_nbytes), dtype=np.uint8)
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": rows}, chunk_rows=50)
    checked = task_that_checks(dataset)
    with LocalCluster(n_workers=6, processes=False, memory_limit=0, **OPTIONS) as cluster, Client(cluster) as client:
        where, counts = [], []
        with Shuffler(client, dataset, elastic=True, assignment=assignment, **way) as shuffler:
            for epoch in shuffler.epochs(8):
                samples = client.gather(epoch.map(checked))
                assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(q))
                where.append(np.empty(q, object))
                for address, ids in zip(shuffler.addresses, samples, strict=True):
                    where[-1][ids] = address
                counts.append(shuffler.n_workers)
                if epoch.number == 1:
                    cluster.scale(8)
                    client.wait_for_workers(8)
                elif epoch.number == 4:
                    client.retire_workers([shuffler.addresses[0], shuffler.addresses[3]])
    changes = [epoch for epoch in range(1, 8) if counts[epoch] != counts[epoch - 1]]
    assert [counts[epoch] for epoch in changes] == [8, 6]
    records = {record.epoch: record for record in shuffler.records}
    for epoch in range(1, 8):
        moved = int((where[epoch] != where[epoch - 1]).sum())
        if epoch not in changes:
            exchanged = 0 if assignment == "local" else q // 10
            assert moved == exchanged
            continue
        assert moved == q // 4  # two of eight workers' shares
        if epoch in records:  # not if a worker left before the epoch was measured
            received = sum(records[epoch].wire_received_bytes)
            assert moved * row_nbytes <= received <= 1.01 * moved * row_nbytes
            assert records[epoch].store_bytes == 0


def test_rows_come_from_the_workers_that_have_them(labelled, checked):
    """The dataset is read once, in the first epoch."""
    with LocalCluster(n_workers=4, processes=False, memory_limit=0, **OPTIONS) as cluster, Client(cluster) as client:
        with Shuffler(client, labelled, elastic=True) as shuffler:
            for epoch in shuffler.epochs(5):
                client.gather(epoch.map(checked))
                if epoch.number == 1:
                    cluster.scale(5)
                    client.wait_for_workers(5)
                elif epoch.number == 3:
                    client.retire_workers([shuffler.addresses[0]])
        assert shuffler.n_workers == 4
        assert [record.store_bytes > 0 for record in shuffler.records] == [True, False, False, False, False]


@pytest.fixture
def lonely(new_processes):
    """Three worker processes that nobody starts again."""
    with dask.config.set({"dshuffle.replacement-timeout": "500ms"}), new_processes(3) as cluster:
        for nanny in cluster.workers.values():
            nanny.status = Status.closing_gracefully  # as after SIGTERM
        with Client(cluster) as client:
            yield client


def kill(client, address):
    [pid] = client.run(os.getpid, workers=[address]).values()
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("when", ["training", "exchange"])
@pytest.mark.parametrize("way", [{}, {"delivery": "server"}, {"cache_fraction": 0.7}], ids=str)
def test_a_session_shrinks(lonely, labelled, checked, within, way, when):
    with Shuffler(lonely, labelled, on_loss="shrink", **way) as shuffler:
        for epoch in shuffler.epochs(5):
            futures = epoch.map(checked, 0.5 if when == "training" and epoch.number == 1 else 0)
            if epoch.number == 1:
                if when == "exchange":
                    lonely.gather(futures)
                kill(lonely, shuffler.addresses[2])
            samples = within(40, lambda futures=futures: lonely.gather(futures))
            assert len(samples) == (3 if epoch.number < 2 else 2)
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
    assert [record.n_workers for record in shuffler.records if record.epoch != 1] == [3, 2, 2, 2]


def test_ranks_that_run_together_start_again_on_fewer_workers(lonely, labelled, within):
    """Two of them share a worker with one thread until the epoch ends."""

    def total(partition, group):
        time.sleep(0.3)
        mean = group.mean(partition["y"].sum())
        time.sleep(0.3)
        return float(group.mean(mean) * group.size)

    with Shuffler(lonely, labelled, on_loss="shrink") as shuffler:
        for epoch in shuffler.epochs(3):
            if epoch.number == 1:
                threading.Timer(0.4, kill, (lonely, shuffler.addresses[1])).start()
            totals = within(40, lambda epoch=epoch: epoch.together(total))
            assert totals == pytest.approx([sum(range(1000))] * (3 if epoch.number < 2 else 2))


def test_a_lost_worker_is_replaced_if_another_one_can_come(labelled, checked, new_processes, within):
    with new_processes(3) as cluster, Client(cluster) as client, Shuffler(client, labelled, elastic=True) as shuffler:
        for epoch in shuffler.epochs(3):
            futures = epoch.map(checked, 0.5)
            if epoch.number == 1:
                kill(client, shuffler.addresses[1])
            samples = within(40, lambda futures=futures: client.gather(futures))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
        assert shuffler.n_workers == 3


@pytest.mark.parametrize("how", ["retire", "SIGTERM"])
def test_a_worker_that_closes_hands_over_in_the_middle_of_an_epoch(labelled, checked, how, within, monkeypatch):
    """Its task runs again on a spare worker, which reads the partition from it, and not from the dataset."""
    read = []
    read_into = Dataset.read_into

    def counted(dataset, rows, slots, ids, **options):
        read.append(len(ids))
        return read_into(dataset, rows, slots, ids, **options)

    monkeypatch.setattr(Dataset, "read_into", counted)
    with (
        LocalCluster(n_workers=2, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
        Shuffler(client, labelled) as shuffler,
    ):
        cluster.scale(3)
        client.wait_for_workers(3)
        for epoch in shuffler.epochs(2):
            futures = epoch.map(checked, 1.0)
            if epoch.number == 1:
                time.sleep(0.3)
                read.clear()
                address = shuffler.addresses[1]
                if how == "retire":
                    client.retire_workers([address])
                else:
                    client.run(lambda dask_worker: dask_worker.loop.add_callback(dask_worker.close), workers=[address])
            samples = within(30, lambda futures=futures: client.gather(futures))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
        assert shuffler.look_up_members()
        assert max(read) == SAMPLED_ROWS  # of the worker that opens the dataset


@pytest.mark.parametrize("again", [False, True], ids=["then-advances", "then-maps-again"])
def test_a_worker_that_retires_sends_its_rows_once(labelled, checked, again, within, monkeypatch, caplog):
    """No other worker adopts its rank if the tasks of the epoch have ended, unless there are others."""
    asked, ask = [], FormerPartitions._ask

    async def counted(self, rank, sample_ids, stop):
        if rank == 2:
            asked.append(sample_ids)
        return await ask(self, rank, sample_ids, stop)

    monkeypatch.setattr(FormerPartitions, "_ask", counted)
    monkeypatch.setattr(participants, "FOLLOWED_WITHIN", 30.0)
    monkeypatch.setattr(participants, "CHOSEN_WITHIN", 60.0)
    with (
        LocalCluster(n_workers=3, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
        Shuffler(client, labelled, elastic=True, assignment="local") as shuffler,
    ):
        cached = set()
        for epoch in shuffler.epochs(3):
            samples = client.gather(epoch.map(checked))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
            if epoch.number == 1:
                cached = set(samples[2].tolist())
                client.retire_workers([shuffler.addresses[2]])
                if again:
                    samples = within(30, lambda epoch=epoch: client.gather(epoch.map(checked)))
                    assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
        assert shuffler.n_workers == 2
    assert ("is taken by" in caplog.text) == again
    if not again:
        assert sorted(np.concatenate(asked)) == sorted(cached)


def test_a_rank_that_nobody_needs_does_not_keep_another_one_waiting(labelled, checked, within, monkeypatch):
    """Two workers retire: the task of one has ended, and that of the other one has to run again."""
    monkeypatch.setattr(participants, "FOLLOWED_WITHIN", 120.0)
    monkeypatch.setattr(participants, "CHOSEN_WITHIN", 120.0)
    with (
        LocalCluster(n_workers=4, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
        Shuffler(client, labelled, elastic=True) as shuffler,
    ):
        for epoch in shuffler.epochs(3):
            futures = epoch.map(checked, PerRank(tuple(1.5 * (rank == 1) for rank in range(shuffler.n_workers))))
            if epoch.number == 1:
                client.gather([futures[rank] for rank in (0, 2, 3)])
                client.retire_workers(list(shuffler.addresses[1:3]))
            samples = within(40, lambda futures=futures: client.gather(futures))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
        assert shuffler.n_workers == 2


def test_a_rank_is_taken_after_all_if_the_session_that_follows_is_gone(labelled, checked, within, eventually, caplog):
    with (
        LocalCluster(n_workers=3, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
        Shuffler(client, labelled, elastic=True) as shuffler,
    ):
        epochs = shuffler.epochs(9)
        client.gather(next(epochs).map(checked))
        cluster.scale(4)
        client.wait_for_workers(4)
        while shuffler._membership._following is None:  # an exchange may have begun without the worker that joined
            epoch = next(epochs)
            client.gather(epoch.map(checked))
        assert shuffler.n_workers == 3
        client.retire_workers([shuffler.addresses[2]])
        shuffler._membership._following.close()
        eventually(lambda: "is replaced by" in caplog.text)
        samples = within(30, lambda: client.gather(epoch.map(checked)))
        assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))


@pytest.fixture
def small_memory():
    """Make a cluster whose workers have a number of bytes for partitions."""

    @contextlib.contextmanager
    def small_memory(n_workers, nbytes):
        with (
            dask.config.set({"dshuffle.memory-fraction": nbytes / 2**32}),
            LocalCluster(n_workers=n_workers, processes=False, memory_limit=2**32, **OPTIONS) as cluster,
            Client(cluster) as client,
        ):
            yield cluster, client

    return small_memory


def partition_nbytes(dataset, n_workers):
    shuffle = ShuffleSpec(dataset.n_samples, n_workers, Choices("local"))
    return member_nbytes(shuffle, dataset.layout)


def test_workers_that_join_stay_out_if_there_is_no_memory_for_two_partitions(labelled, checked, small_memory, caplog):
    one, other = partition_nbytes(labelled, 2), partition_nbytes(labelled, 3)
    with (
        small_memory(2, one + other - 1) as (cluster, client),
        Shuffler(client, labelled, elastic=True, assignment="local") as shuffler,
    ):
        for epoch in shuffler.epochs(4):
            samples = client.gather(epoch.map(checked))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
            if epoch.number == 0:
                cluster.scale(3)
                client.wait_for_workers(3)
        assert shuffler.n_workers == 2
    assert caplog.text.count("keeps its workers: ") == 1


def test_a_session_that_shrinks_reads_the_dataset_if_there_is_no_memory_for_two_partitions(
    labelled, checked, small_memory
):
    before, after = partition_nbytes(labelled, 3), partition_nbytes(labelled, 2)
    with (
        small_memory(3, 2 * before + after - 1) as (_, client),  # enough to adopt a rank
        Shuffler(client, labelled, on_loss="shrink", assignment="local") as shuffler,
    ):
        for epoch in shuffler.epochs(4):
            samples = client.gather(epoch.map(checked))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
            if epoch.number == 1:
                client.retire_workers([shuffler.addresses[2]])
        assert shuffler.n_workers == 2
    [record] = [record for record in shuffler.records if record.epoch == record.first_epoch > 0]
    assert record.store_bytes > 0


def test_later_epochs_do_not_ask_for_former_partitions(labelled, checked, monkeypatch):
    """With "storage", every epoch reads the dataset like the first one."""
    asked = []
    read_into = FormerPartitions.read_into

    def counted(*args):
        asked.append(args)
        return read_into(*args)

    monkeypatch.setattr(FormerPartitions, "read_into", counted)
    with (
        LocalCluster(n_workers=2, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
        Shuffler(client, labelled, elastic=True, delivery="storage") as shuffler,
    ):
        for epoch in shuffler.epochs(6):
            client.gather(epoch.map(checked))
            if epoch.number == 0:
                cluster.scale(3)
                client.wait_for_workers(3)
        assert shuffler.n_workers == 3
    assert len(asked) == 3, "more than the first partition of each worker"


def test_too_few_workers(labelled):
    with (
        dask.config.set({"dshuffle.timeout": "1s"}),
        LocalCluster(n_workers=1, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
        pytest.raises(ClusterError, match=r"only 1 of min_workers=2 workers .* 1 s\. .*\(dshuffle.timeout\)"),
    ):
        Shuffler(client, labelled, min_workers=2)


def test_values_that_are_not_allowed(labelled):
    with (
        LocalCluster(n_workers=1, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
    ):
        with pytest.raises(InvalidParameter, match="elastic is not allowed: the sharding 'given' was given"):
            Shuffler(client, labelled, elastic=True, sharding=np.zeros(1000, int))
        with pytest.raises(InvalidParameter, match="on_loss='shrink' is not allowed: the sharding 'given' was given"):
            Shuffler(client, labelled, on_loss="shrink", sharding=np.zeros(1000, int))
        with pytest.raises(InvalidParameter, match=r"on_loss='raise' .* must be 'shrink', or left out, in an elastic"):
            Shuffler(client, labelled, elastic=True, on_loss="raise")
        with pytest.raises(InvalidParameter, match="elastic='yes' is not allowed; it must be True or False"):
            Shuffler(client, labelled, elastic="yes")
        with pytest.raises(InvalidParameter, match="min_workers=0"):
            Shuffler(client, labelled, min_workers=0)
        with pytest.raises(
            InvalidParameter, match="on_loss='never' is not allowed; it must be one of 'replace', 'shrin"
        ):
            Shuffler(client, labelled, on_loss="never")


@pytest.mark.parametrize("assignment", ["global", "local", "partial:0.3"])
def test_an_elastic_session_is_resumed(labelled, checked, assignment):
    with LocalCluster(n_workers=2, processes=False, memory_limit=0, **OPTIONS) as cluster, Client(cluster) as client:
        with Shuffler(client, labelled, elastic=True, assignment=assignment) as shuffler:
            for epoch in shuffler.epochs(3):
                futures = epoch.map(checked)
                client.gather(futures)
                if epoch.number == 0:
                    cluster.scale(3)
                    client.wait_for_workers(3)
            assert shuffler.n_workers == 3
            [epoch] = shuffler.epochs(1)
            done = client.gather(epoch.map(lambda partition: (partition.mark_trained(7), partition.sample_ids[:7])[1]))
            state = shuffler.state_dict()
        assert state["trained"] == [[7, 7, 7]]
        assert len(state["changes"]) == (assignment != "global")
        cluster.scale(2)
        with Shuffler.resume(client, labelled, state, elastic=True) as shuffler:
            [epoch] = shuffler.epochs(1)
            left = client.gather(epoch.map(checked))
            assert np.array_equal(np.sort(np.concatenate([*done, *left])), np.arange(1000))
            [epoch] = shuffler.epochs(1)
            assert np.array_equal(np.sort(np.concatenate(client.gather(epoch.map(checked)))), np.arange(1000))


@pytest.mark.parametrize("assignment", ["global", "partial:0.3"])
@pytest.mark.parametrize("when", ["before the first epoch", "in the first epoch"])
def test_workers_join_a_session_that_was_resumed_in_the_middle_of_an_epoch(labelled, checked, when, assignment):
    with LocalCluster(n_workers=2, processes=False, memory_limit=0, **OPTIONS) as cluster, Client(cluster) as client:

        def grow(n_workers):
            cluster.scale(n_workers)
            client.wait_for_workers(n_workers)

        with Shuffler(client, labelled, assignment=assignment) as shuffler:
            [epoch] = shuffler.epochs(1)
            done = client.gather(
                epoch.map(lambda partition: (partition.mark_trained(90), partition.sample_ids[:90])[1])
            )
            state = shuffler.state_dict()
        with Shuffler.resume(client, labelled, state, elastic=True) as shuffler:
            if when == "before the first epoch":
                grow(3)
            for epoch in shuffler.epochs(3):
                samples = client.gather(epoch.map(checked))
                if epoch.number == 0:
                    samples += done
                    grow(4)
                assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
            assert shuffler.n_workers == 4


def test_a_session_that_has_ended_is_not_followed_by_another_one(lonely, labelled, checked, within):
    """Samples of the lost worker may not have been trained on."""

    def train(shuffler):
        for epoch in shuffler.epochs(3):
            epoch.map(checked, 0.5)
            if epoch.number == 1:
                kill(lonely, shuffler.addresses[2])

    with (
        Shuffler(lonely, labelled, on_loss="replace") as shuffler,
        pytest.raises(WorkerLost, match="Make a new Shuffler"),
    ):
        within(40, lambda: train(shuffler))


def test_an_adaptive_cluster_keeps_the_fewest_workers(labelled, checked, eventually):
    def removable(dask_scheduler):
        plugin = dask_scheduler.plugins["dshuffle"]
        return len(plugin.valid_workers_downscaling(dask_scheduler, list(dask_scheduler.workers.values())))

    with LocalCluster(n_workers=4, processes=False, memory_limit=0, **OPTIONS) as cluster, Client(cluster) as client:
        assert starts_no_more(client) is None
        for options, count in [({"elastic": True, "min_workers": 3}, 1), ({"on_loss": "shrink"}, 0)]:
            with Shuffler(client, labelled, **options) as shuffler:
                epoch = next(shuffler.epochs(2))
                client.gather(epoch.map(checked))
                eventually(lambda count=count: client.run_on_scheduler(removable) == count)  # not during the exchange


@pytest.mark.parametrize(("least", "words"), [(1, "1 worker,"), (2, "2 workers,")])
def test_an_adaptive_cluster_that_stays_at_its_minimum(labelled, caplog, least, words):
    options = {"n_workers": least, "processes": False, "memory_limit": 0, **OPTIONS}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        assert starts_no_more(client) is None
        cluster.adapt(minimum=least, maximum=least)
        assert starts_no_more(client) is None
        cluster.adapt(minimum=least, maximum=5)
        with Shuffler(client, labelled, elastic=True):
            assert f"trains on {words} and the adaptive cluster starts no more for it" in caplog.text


def test_an_adaptive_cluster(labelled, checked):
    """Other tasks make the cluster grow, and it shrinks when workers are idle."""
    with (
        LocalCluster(n_workers=2, processes=True, memory_limit="4 GiB", **OPTIONS) as cluster,
        Client(cluster) as client,
    ):
        cluster.adapt(minimum=2, maximum=6, interval="50ms", wait_count=2, target_duration="100ms")
        counts = []
        with Shuffler(client, labelled, elastic=True) as shuffler:
            for epoch in shuffler.epochs(100):
                futures = epoch.map(checked, 0.02)
                if epoch.number % 40 == 10:
                    others = client.map(lambda number: time.sleep(0.05), range(60), pure=False)
                samples = client.gather(futures)
                assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
                counts.append(shuffler.n_workers)
                if epoch.number % 40 == 30:
                    client.gather(others)
                    time.sleep(0.5)  # as if a model was validated: the workers are idle
        assert max(counts) > 2
        assert min(counts[counts.index(max(counts)) :]) < max(counts), "it never shrinks"
