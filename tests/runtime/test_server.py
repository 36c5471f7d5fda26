"""Which worker serves: by resource, by name, by address, or rank 0 beside training."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import CacheBudgetError, ClusterError, InvalidParameter

pytestmark = pytest.mark.slow  # real clusters

RESOURCE = {"resources": {"dshuffle-server": 1}}


@pytest.fixture(scope="module")
def with_server(cluster_of):
    """Three workers that train, and one that has the resource."""
    with cluster_of({"0": {}, "1": {}, "2": {}, "extra": RESOURCE}) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def trained_by():
    """A task function: the name of the worker that it runs on."""

    def trained_by(partition):
        from distributed import get_worker

        return str(get_worker().name)

    return trained_by


def address_of(client, name):
    return client.run_on_scheduler(
        lambda dask_scheduler: next(w.address for w in dask_scheduler.workers.values() if str(w.name) == name)
    )


def test_a_worker_with_the_resource_serves_and_does_not_train(with_server, small, check_orders, trained_by):
    with Shuffler(with_server, small, delivery="server") as shuffler:
        assert shuffler.n_workers == 3
        check_orders(shuffler, 3)
        for epoch in shuffler.epochs(1):
            assert with_server.gather(epoch.map(trained_by)) == ["0", "1", "2"]
    load, *others = shuffler.records
    assert load.server_sent_bytes == 0
    for record in others:
        assert record.server == "dedicated"
        assert record.server_sent_bytes == record.wire_bytes == record.needed * (64 + 4)
        assert record.wire_sent_bytes == (0, 0, 0)


@pytest.mark.parametrize("by", ["name", "address"])
def test_a_worker_that_is_named_serves(with_server, small, check_orders, trained_by, by):
    server = "1" if by == "name" else address_of(with_server, "1")
    with Shuffler(with_server, small, delivery="server", server=server) as shuffler:
        check_orders(shuffler, 3)
        for epoch in shuffler.epochs(1):
            assert with_server.gather(epoch.map(trained_by)) == ["0", "2"]
    assert shuffler.records[-1].server == "dedicated"


def test_a_server_that_is_nobody(with_server, small, sessions_left):
    with pytest.raises(InvalidParameter, match=r"server='7' is not allowed.*extra \(tcp://"):
        Shuffler(with_server, small, delivery="server", server="7")
    assert sessions_left(with_server) == (0, 0)


def test_nobody_is_left_to_train(cluster_of, small):
    with (
        cluster_of({"a": RESOURCE}) as cluster,
        Client(cluster) as client,
        pytest.raises(ClusterError, match=r"none of the 1 workers can train.*dshuffle-server"),
    ):
        Shuffler(client, small, delivery="server")


def test_the_server_holds_what_its_budget_allows(with_server, tmp_path, check_orders, sessions_left):
    # Twelve blocks of 8 MiB, of which ten fit beside 10 MiB of plans: the server reads ahead and drops what it cannot
    # keep.
    x = np.arange(96_000)[:, None].repeat(125, axis=1)
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": x, "y": np.arange(96_000)})

    def right(partition):
        return bool((partition["x"] == partition.sample_ids[:, None]).all())

    with (
        dask.config.set({"dshuffle.window-bytes": "8 MiB"}),
        Shuffler(with_server, dataset, delivery="server", memory_limit="101 MiB") as shuffler,
    ):
        check_orders(shuffler, 2)
        for epoch in shuffler.epochs(4):
            assert with_server.gather(epoch.map(right)) == [True] * 3
    # Beside the rows that stay in memory, everything was read once, however many workers asked. On a busy machine a
    # worker may begin when the others are nearly done; then blocks are read again for it, but not in every epoch.
    delivered = [record.store_delivered_bytes for record in shuffler.records[2:]]
    assert 0 < min(delivered) <= 0.6 * dataset.n_samples * 1008, delivered


def test_a_budget_that_is_too_small_for_the_server(with_server, tmp_path, sessions_left):
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((6_000, 1000), np.uint8)})
    with pytest.raises(CacheBudgetError, match=r"the server needs 1 blocks of .*memory_limit leaves 4340000"):
        Shuffler(with_server, dataset, delivery="server", memory_limit=5_000_000)
    assert sessions_left(with_server) == (0, 0)
