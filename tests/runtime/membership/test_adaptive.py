"""Adaptive clusters start and remove workers while sessions are open."""

from __future__ import annotations

import time

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler
from dshuffle.errors import WorkerLost

from ..conftest import OPTIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


def test_an_adaptive_cluster_keeps_the_fewest_workers(labelled, checked, eventually):
    def removable(dask_scheduler):
        plugin = dask_scheduler.plugins["dshuffle"]
        return len(plugin.valid_workers_downscaling(dask_scheduler, list(dask_scheduler.workers.values())))

    with LocalCluster(n_workers=4, processes=False, memory_limit=0, **OPTIONS) as cluster, Client(cluster) as client:
        for options, count in [({"elastic": True, "min_workers": 3}, 1), ({}, 0)]:
            with Shuffler(client, labelled, **options) as shuffler:
                epoch = next(shuffler.epochs(2))
                client.gather(epoch.map(checked))
                eventually(lambda count=count: client.run_on_scheduler(removable) == count)  # not during the exchange


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
                try:
                    samples = client.gather(futures)
                except WorkerLost:  # a worker was retired at the moment when its task began
                    continue
                assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
                counts.append(shuffler.n_workers)
                if epoch.number % 40 == 30:
                    client.gather(others)
                    time.sleep(0.5)  # as if a model was validated: the workers are idle
        assert max(counts) > 2
        assert min(counts[counts.index(max(counts)) :]) < max(counts), "it never shrinks"
