"""Limits of open files: workers raise theirs."""

from __future__ import annotations

import resource

import pytest
from distributed import Client

from dshuffle import Shuffler


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
