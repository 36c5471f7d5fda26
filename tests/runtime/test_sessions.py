"""Several sessions on one cluster, workers that come and go between sessions, and what the scheduler has to do."""

from __future__ import annotations

import time
from itertools import zip_longest

import numpy as np
import pytest
from distributed import Client, Worker

from dshuffle import Shuffler, create_dataset

pytestmark = pytest.mark.slow  # real clusters


def test_two_at_once(threads, tmp_path, small, check_ids, sessions_left):
    other = create_dataset(str(tmp_path / "other.zarr"), {"y": np.arange(777)})
    with (
        Shuffler(threads, small, delivery="peer") as first,
        Shuffler(threads, other, delivery="server", assignment="partial:0.5") as second,
    ):
        assert sessions_left(threads) == (2, 10)
        for ours, theirs in zip_longest(first.epochs(4), second.epochs(6)):
            epochs = {1000: ours, 777: theirs}
            submitted = {size: epoch.map(check_ids) for size, epoch in epochs.items() if epoch is not None}
            for n_samples, futures in submitted.items():
                assert np.array_equal(np.sort(np.concatenate(threads.gather(futures))), np.arange(n_samples))
        assert (len(first.records), len(second.records)) == (4, 6)
        first.close()
        assert sessions_left(threads) == (1, 5)
        for epoch in second.epochs(1):
            assert sum(threads.gather(epoch.map(len))) == 777
    assert sessions_left(threads) == (0, 0)


def test_another_client_may_be_the_current_one(threads, cluster_of, small):
    """Dask's own wait() would take the client that was made last, and wait on the wrong event loop."""

    def one_raises(partition):
        time.sleep(0.2 * partition.rank)
        if partition.rank == 0:
            raise ZeroDivisionError

    with Shuffler(threads, small) as shuffler, cluster_of({}) as cluster, Client(cluster):
        for epoch in shuffler.epochs(2):
            futures = epoch.map(one_raises)
            with pytest.raises(ZeroDivisionError):
                threads.gather(futures)  # at once, while the others still train
            epoch.accept(futures)
    assert all(record.training_seconds >= 0.8 for record in shuffler.records)


def test_workers_that_join(cluster_of, small, check_orders, sessions_left):
    with cluster_of({"0": {}, "1": {}}) as cluster, Client(cluster) as client:
        with Shuffler(client, small) as shuffler:
            check_orders(shuffler, 1)
            cluster.worker_spec["2"] = {"cls": Worker, "options": {"nthreads": 1, "dashboard": False}}
            cluster.sync(cluster._correct_state)
            client.wait_for_workers(3)
            assert [len(part) for part in check_orders(shuffler, 2)[0]] == [500, 500]
            with Shuffler(client, small) as newer:
                assert newer.n_workers == 3
                check_orders(newer, 2)
            check_orders(shuffler, 1)
        assert sessions_left(client) == (0, 0)


def test_the_scheduler_does_the_same_whatever_the_number_of_samples(client_of, tmp_path):
    """Messages, and their bytes, that our handlers get and send in an epoch."""
    import pickle

    counts = {}

    def count(dask_scheduler):
        """Wrap all that the plugin receives and sends; both are counted as pickled."""

        def counted(name, handler):
            async def wrapped(**message):
                message.pop("comm", None)
                tally[name] += 1
                tally["bytes"] += len(pickle.dumps(message))
                reply = await handler(**message)
                tally["bytes"] += len(pickle.dumps(reply))
                return reply

            return wrapped

        from collections import Counter

        tally = Counter()
        plugin = dask_scheduler.plugins["dshuffle"]
        dask_scheduler.handlers |= {
            name: counted(name, handler)
            for name, handler in dask_scheduler.handlers.items()
            if name.startswith("dshuffle_")
        }
        for coordinator in plugin.coordinators.values():
            request = coordinator.request

            async def told(order, who, message, request=request):
                tally[order + " sent"] += 1
                tally["bytes"] += len(pickle.dumps(message))
                reply = await request(order, who, message)
                tally["bytes"] += len(pickle.dumps(reply))
                return reply

            coordinator.request = told
        dask_scheduler.tally = tally

    for n_samples in (1_000, 100_000):
        dataset = create_dataset(str(tmp_path / f"{n_samples}.zarr"), {"y": np.arange(n_samples)})
        with client_of(3) as client, Shuffler(client, dataset) as shuffler:
            assert len(list(shuffler.epochs(1))) == 1
            client.run_on_scheduler(count)
            assert len(list(shuffler.epochs(5))) == 5
            counts[n_samples] = client.run_on_scheduler(lambda dask_scheduler: dict(dask_scheduler.tally))
    few, many = counts[1_000], counts[100_000]
    few_bytes, many_bytes = few.pop("bytes"), many.pop("bytes")
    assert few == many
    assert few["dshuffle_report"] == 15
    assert few["begin sent"] == few["commit sent"] == 15
    assert abs(many_bytes - few_bytes) < 0.02 * few_bytes + 200
    assert many_bytes < 5 * 3 * 2_000
