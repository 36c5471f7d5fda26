"""`delivery="auto"`: another delivery for every epoch, if need be, and the same samples as ever."""

from __future__ import annotations

import numpy as np
import pytest

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import InvalidParameter
from dshuffle.planning.cost import ClusterRates

pytestmark = pytest.mark.slow  # real clusters

LIKES = {
    "peer": ClusterRates(5, link_up=1e10, link_down=1e10, storage=1e5, storage_over_links=False),
    "storage": ClusterRates(5, link_up=1e4, link_down=1e4, storage=1e11, storage_over_links=False, read_rate=1e11),
}


def contents(partition):
    return partition.sample_ids.copy(), partition["x"].copy()


def trained_on(client, shuffler, n_epochs):
    return [client.gather(epoch.map(contents)) for epoch in shuffler.epochs(n_epochs)]


@pytest.fixture
def dataset(tmp_path):
    return create_dataset(str(tmp_path / "d.zarr"), {"x": np.arange(2000.0)}, chunk_rows=50)


@pytest.mark.parametrize("likely", sorted(LIKES))
def test_it_starts_with_what_the_cluster_promises(threads, dataset, likely):
    with Shuffler(threads, dataset, delivery="auto", cluster=LIKES[likely], seed=3) as shuffler:
        found = trained_on(threads, shuffler, 2)
    assert shuffler.records[1].delivery == likely
    with Shuffler(threads, dataset, delivery="peer", seed=3) as shuffler:
        expected = trained_on(threads, shuffler, 2)
    assert [record.delivery for record in shuffler.records] == ["load", "peer"]
    for ours, theirs in zip(found, expected, strict=True):
        for (ids, x), (others, _) in zip(ours, theirs, strict=True):
            assert np.array_equal(ids, others)
            assert np.array_equal(x, ids.astype(float))


def test_it_changes_its_mind_and_every_sample_is_still_trained_on_once(threads, dataset, monkeypatch):
    # A promise that no exchange can keep, so each of the two is tried.
    cluster = ClusterRates(5, link_up=1e15, link_down=1e15, storage=1e14, storage_over_links=False, read_rate=1e14)
    with Shuffler(threads, dataset, delivery="auto", cluster=cluster) as shuffler:
        for parts in trained_on(threads, shuffler, 6):
            ids = np.concatenate([ids for ids, _ in parts])
            assert np.array_equal(np.sort(ids), np.arange(2000))
            assert all(np.array_equal(x, mine.astype(float)) for mine, x in parts)
    assert {"peer", "storage"} <= {record.delivery for record in shuffler.records}


def test_with_a_server_and_a_measured_cluster(cluster_of, dataset):
    from distributed import Client

    names = {"a": {}, "b": {}, "c": {}, "s": {"resources": {"dshuffle-server": 1}}}
    with cluster_of(names) as cluster, Client(cluster) as client:
        with Shuffler(client, dataset, delivery="auto", cache_fraction=0.6) as shuffler:
            for parts in trained_on(client, shuffler, 5):
                assert np.array_equal(np.sort(np.concatenate([ids for ids, _ in parts])), np.arange(2000))
        assert {record.delivery for record in shuffler.records[1:]} <= {"peer", "storage", "server", "clique"}


def test_refusals(threads, dataset):
    with pytest.raises(InvalidParameter, match=r"cluster=.* None with delivery='peer'"):
        Shuffler(threads, dataset, cluster=LIKES["peer"])
    with pytest.raises(InvalidParameter, match=r"cluster.n_workers=2 .* 5, the number of workers that train"):
        Shuffler(threads, dataset, delivery="auto", cluster=ClusterRates(2, link_up=1.0, link_down=1.0))
