"""Real clusters, shared by all tests that do not break them.

Functions that workers run are nested ones or lambdas: those travel by value, and workers need not import tests.
"""

from __future__ import annotations

import contextlib
import time

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, Scheduler, SpecCluster, Worker

from dshuffle import create_dataset

# Dask's HTTP server listens even without a dashboard: on any free port, since many clusters live at once.
HTTP = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
OPTIONS = {"threads_per_worker": 1, "dashboard_address": None, "scheduler_kwargs": HTTP}


def address_of(client, name):
    """Address of the worker with a name."""
    return client.run_on_scheduler(
        lambda dask_scheduler: next(w.address for w in dask_scheduler.workers.values() if str(w.name) == str(name))
    )


@pytest.fixture(scope="package")
def processes():
    """Three worker processes."""
    with (
        LocalCluster(n_workers=3, processes=True, **OPTIONS) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="package")
def threads():
    """Five workers that are threads of this process."""
    with (
        LocalCluster(n_workers=5, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def new_processes():
    """Make a cluster of worker processes, for a test that will break it."""
    return lambda n_workers: LocalCluster(n_workers=n_workers, processes=True, **OPTIONS)


@pytest.fixture(scope="package")
def cluster_of():
    """Make a cluster of named workers, in this process and over TCP: ``{name: options}``."""

    def cluster_of(workers):
        # No limits: workers that share a process each count all of its memory, and would be paused.
        common = {"host": "127.0.0.1", "nthreads": 1, "dashboard": False, "memory_limit": 0}
        return SpecCluster(
            workers={name: {"cls": Worker, "options": {**common, **options}} for name, options in workers.items()},
            scheduler={"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, **HTTP}},
        )

    return cluster_of


@pytest.fixture(scope="package")
def client_of(cluster_of):
    """Make a cluster in this process, of named workers or of a number of them, with some settings, and a client."""

    @contextlib.contextmanager
    def client_of(workers, settings=()):
        workers = {str(name): {} for name in range(workers)} if isinstance(workers, int) else workers
        with dask.config.set(dict(settings)), cluster_of(workers) as cluster, Client(cluster) as client:
            yield client

    return client_of


@pytest.fixture
def small(tmp_path):
    """A dataset of 1,000 samples: ``x`` is a row of random numbers, ``y`` the sample's own number."""
    x = np.random.default_rng(0).random((1000, 7))
    return create_dataset(str(tmp_path / "small.zarr"), {"x": x, "y": np.arange(1000)}, chunk_rows=100)


def task_that_checks(dataset):
    """A task that returns its samples after it has compared their rows with the store's."""
    truth = dataset.read_rows(np.arange(dataset.n_samples))

    def checked(partition, seconds=0.0):
        time.sleep(seconds)
        sample_ids = partition.sample_ids.copy()
        for name, rows in truth.items():
            np.testing.assert_array_equal(partition[name], rows[sample_ids])
        return sample_ids

    return checked


@pytest.fixture
def check_ids():
    """A task function: the samples of the partition, which must be those that its rows are of."""

    def check_ids(partition):
        sample_ids = partition.sample_ids.copy()
        assert np.array_equal(partition["y"], sample_ids)
        return sample_ids

    return check_ids


@pytest.fixture
def check_orders(check_ids):
    """Run some epochs; the samples of every rank, epoch by epoch, each trained on exactly once."""

    def check_orders(shuffler, count):
        seen = []
        for epoch in shuffler.epochs(count):
            seen.append(shuffler.client.gather(epoch.map(check_ids)))
            assert np.array_equal(np.sort(np.concatenate(seen[-1])), np.arange(shuffler.dataset.n_samples))
        return seen

    return check_orders


@pytest.fixture
def sessions_left():
    """How many sessions a cluster knows of: on the scheduler, on all workers."""

    def on_worker(dask_worker):
        plugin = dask_worker.plugins.get("dshuffle")
        return 0 if plugin is None or plugin.sessions is None else len(plugin.sessions)  # None if it was not set up

    def on_scheduler(dask_scheduler):
        plugin = dask_scheduler.plugins.get("dshuffle")
        return len(plugin.coordinators) if plugin is not None else 0

    return lambda client: (client.run_on_scheduler(on_scheduler), sum(client.run(on_worker).values()))


@pytest.fixture
def within():
    """Run a function that must end soon; the seconds it took."""

    def within(seconds, fn):
        started = time.monotonic()
        try:
            return fn()
        finally:
            assert time.monotonic() - started < seconds

    return within
