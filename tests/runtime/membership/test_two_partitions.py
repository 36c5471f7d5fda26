"""A session that follows another one needs memory for two partitions, and reads the first from the second."""

from __future__ import annotations

import contextlib

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler
from dshuffle.errors import WorkerLost
from dshuffle.planning import Choices, ShuffleSpec
from dshuffle.runtime.process import member_nbytes

from ..conftest import OPTIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


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


@pytest.mark.parametrize("elastic", [True, False])
def test_a_session_that_was_lost_is_followed_by_one_that_reads_the_dataset_if_there_is_no_memory_for_two_partitions(
    labelled, checked, small_memory, within, elastic
):
    before, after = partition_nbytes(labelled, 3), partition_nbytes(labelled, 2)

    def all_trained(epoch):
        samples = within(30, lambda: client.gather(epoch.map(checked)))
        return np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))

    with small_memory(3, before + after - 1) as (_, client):
        shuffler = Shuffler(client, labelled, elastic=elastic, assignment="local")
        epochs = shuffler.epochs(2)
        epoch = next(epochs)
        assert all_trained(epoch)
        client.retire_workers([shuffler.addresses[2]])
        with pytest.raises(WorkerLost):
            all_trained(epoch)
        if not elastic:
            shuffler.close()
            shuffler = Shuffler(client, labelled, assignment="local")
            epochs = shuffler.epochs(2)
        assert all_trained(next(epochs))
        assert all_trained(next(epochs))
        assert list(epochs) == []
        assert shuffler.n_workers == 2
        shuffler.close()
    assert [record.store_bytes > 0 for record in shuffler.records if record.n_workers == 2] == [True, False]
