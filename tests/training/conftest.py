"""Simulated sessions, and clusters of processes and threads."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.compare import SimulatedCluster
from dshuffle.planning import Choices


@pytest.fixture
def fake_shuffler() -> Callable[..., Any]:
    """Make a session on arrays that is simulated in this process."""

    def made(
        arrays: Any, n_workers: int = 4, assignment: str = "global", sharding: Any = "random", shares: Any = "even"
    ) -> Any:
        dataset = dshuffle.create_dataset("memory://simulated-session", arrays, overwrite=True)
        named = isinstance(sharding, str)
        choices = Choices(assignment, sharding=sharding if named else "random", shares=shares)
        return SimulatedCluster.of(dataset, n_workers).session(choices, None if named else sharding)

    return made


@pytest.fixture(scope="session")
def cluster_of():
    """Make a cluster, for tests that need one of their own."""
    return _cluster


@pytest.fixture(scope="package")
def processes():
    """Three worker processes of one thread each."""
    with _cluster(3, processes=True) as client:
        yield client


@pytest.fixture(scope="package")
def threads():
    """Three workers that are threads of this process."""
    with _cluster(3, processes=False) as client:
        yield client


@contextmanager
def _cluster(n_workers: int, *, processes: bool) -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            processes=processes,
            memory_limit=0,
            dashboard_address=None,
            scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def ddp(torch: Any) -> Any:
    """The module of ``fit_torch_ddp``, which imports PyTorch."""
    return importlib.import_module("dshuffle.training.torch_ddp")
