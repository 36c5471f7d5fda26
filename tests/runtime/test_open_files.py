"""Limits of open files: workers raise theirs, idle connections are closed."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler
from dshuffle.exchange.comms import DaskNetwork
from dshuffle.runtime.worker import session


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
