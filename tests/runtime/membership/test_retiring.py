"""Workers that retire in the middle of an epoch hand over what they hold."""

from __future__ import annotations

import time

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Dataset, PerRank, Shuffler
from dshuffle.errors import WorkerLost
from dshuffle.runtime.worker.loading import Loader

from ..conftest import OPTIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


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
        assert not read


@pytest.mark.parametrize("again", [False, True], ids=["then-advances", "then-maps-again"])
def test_a_worker_that_retires_sends_its_rows_once(labelled, checked, again, within, monkeypatch, caplog):
    """The session that follows reads them: in the next epoch, or in the same one if a task needs the partition."""
    asked, retired, ask = [], [], Loader._rows

    async def counted(self, attempt, source, here, operation, query):
        if operation == "rows" and source.address in retired:
            asked.append(query["sample_ids"])
        return await ask(self, attempt, source, here, operation, query)

    monkeypatch.setattr(Loader, "_rows", counted)
    with (
        LocalCluster(n_workers=3, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
        Shuffler(client, labelled, elastic=True, assignment="local") as shuffler,
    ):
        cached, numbers = set(), []
        for epoch in shuffler.epochs(3):
            numbers.append(epoch.number)
            samples = client.gather(epoch.map(checked))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
            if numbers == [0, 1]:
                cached = set(samples[2].tolist())
                retired.append(shuffler.addresses[2])
                client.retire_workers(retired)
                if again:
                    with pytest.raises(WorkerLost):
                        within(30, lambda epoch=epoch: client.gather(epoch.map(checked)))
        assert shuffler.n_workers == 2
    assert numbers == ([0, 1, 1, 2] if again else [0, 1, 2])
    assert sorted(np.concatenate(asked)) == sorted(cached)


def test_a_rank_that_nobody_needs_does_not_keep_another_one_waiting(labelled, checked, within):
    """Two workers retire: the task of one has ended, and that of the other one has to run again."""
    with (
        LocalCluster(n_workers=4, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
        Shuffler(client, labelled, elastic=True) as shuffler,
    ):
        numbers = []
        for epoch in shuffler.epochs(3):
            numbers.append(epoch.number)
            futures = epoch.map(checked, PerRank(tuple(1.5 * (rank == 1) for rank in range(shuffler.n_workers))))
            if numbers == [0, 1]:
                client.gather([futures[rank] for rank in (0, 2, 3)])
                client.retire_workers(list(shuffler.addresses[1:3]))
                with pytest.raises(WorkerLost):
                    within(40, lambda futures=futures: client.gather(futures))
                continue
            samples = within(40, lambda futures=futures: client.gather(futures))
            assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
        assert shuffler.n_workers == 2
        assert numbers == [0, 1, 1, 2]
