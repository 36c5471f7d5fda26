"""Several workers on a machine: which workers send rows to which."""

from __future__ import annotations

import pytest
from distributed import Client

from dshuffle import Shuffler


@pytest.mark.parametrize(
    ("addresses", "hosts"),
    [
        pytest.param("1122", (0, 0, 1, 1), marks=pytest.mark.slow),
        ("1212", (0, 0, 1, 1)),
        pytest.param("1234", (), marks=pytest.mark.slow),
        pytest.param("1111", (), marks=pytest.mark.slow),
    ],
)
def test_peers_on_the_same_machine_send_what_they_hold(cluster_of, small, check_orders, addresses, hosts):
    workers = {str(name): {"host": f"127.0.0.{address}"} for name, address in enumerate(addresses)}

    def hosts_of(dask_scheduler, session_id):
        return dask_scheduler.plugins["dshuffle"].coordinator(session_id).spec.shuffle.hosts

    with cluster_of(workers) as cluster, Client(cluster) as client:
        client.wait_for_workers(4)
        with Shuffler(client, small, cache_fraction=0.6) as shuffler:
            check_orders(shuffler, 3)
            assert client.run_on_scheduler(hosts_of, session_id=shuffler._calls.session_id) == hosts
