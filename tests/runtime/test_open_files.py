"""Limits of open files: workers raise theirs, sessions say what they need, and idle connections are closed."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler
from dshuffle.exchange.comms import DaskNetwork
from dshuffle.runtime.process import too_few_files
from dshuffle.runtime.worker import session, worker_plugin


@pytest.mark.slow
def test_workers_raise_their_soft_limits(new_processes, small):
    def lower():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        return hard

    with new_processes(2) as cluster, Client(cluster) as client:
        hard = client.run(lower)
        with Shuffler(client, small):
            limits = client.run(lambda: resource.getrlimit(resource.RLIMIT_NOFILE))
        assert limits == {address: (most, most) for address, most in hard.items()}


def test_opening_says_what_is_needed(cluster_of, small, monkeypatch, caplog):
    monkeypatch.setattr(worker_plugin, "raise_limit", lambda: 67)
    with cluster_of({"0": {}, "1": {}, "2": {}}) as cluster, Client(cluster) as client:
        with Shuffler(client, small, delivery="storage"), Shuffler(client, small, assignment="local"):
            assert "open files" not in caplog.text
        with Shuffler(client, small):
            assert "3 of 3 workers may have fewer than the 68 open files that this session needs" in caplog.text


def test_whose_limits_are_too_low():
    limits = {"a": 4096, "b": 1024, "c": None, "d": 1500}
    words = too_few_files(limits, 999)
    assert words.startswith("2 of 4 workers may have fewer than the 1575 open files that this session needs, b only 1")
    assert "ulimit -Hn" in words
    assert too_few_files(limits, 100) == ""


@pytest.mark.parametrize(("most", "closed"), [(3, False), (2, True)])
def test_idle_connections_above_a_bound_are_closed(most, closed):
    collected: list[bool] = []
    pool = SimpleNamespace(available={"a": {1, 2}, "b": {3}, "c": set()}, collect=lambda: collected.append(True))
    network: Any = SimpleNamespace(_worker=SimpleNamespace(rpc=pool))
    DaskNetwork.close_idle(network, most)
    assert bool(collected) is closed


def test_epochs_go_on_after_connections_were_closed(client_of, small, monkeypatch):
    monkeypatch.setattr(session, "MOST_IDLE", 0)

    def idle(dask_worker):
        return sum(map(len, dask_worker.rpc.available.values()))

    with client_of(4) as client, Shuffler(client, small) as shuffler:
        for epoch in shuffler.epochs(3):
            parts = client.gather(epoch.map(lambda partition: partition["y"].copy()))
            np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
        assert max(client.run(idle).values()) < 3  # one to each other worker without the bound
