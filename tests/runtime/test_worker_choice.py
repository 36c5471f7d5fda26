"""`workers=` and `resources=` choose the members of a session: at first, for lost ranks, and when workers join."""

from __future__ import annotations

import itertools
import os
import signal

import dask
import numpy as np
import pytest
from distributed import Client, Status

from dshuffle import Shuffler, measure_cluster
from dshuffle.errors import ClusterError, InvalidParameter, WorkerLost
from dshuffle.runtime.session_spec import SessionOptions, WorkerChoice, WorkerFacts
from dshuffle.training.parameter_server import serving

from .conftest import address_of


def facts(number, **resources):
    return WorkerFacts(f"tcp://10.0.0.{number}:4000", str(number), f"tcp://10.0.0.{number}:3000", resources)


def names_of(client, addresses):
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {str(workers[address]["name"]) for address in addresses}


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, [1, 2, 3, 4]),
        ({"workers": ["2", "tcp://10.0.0.3:4000", "5"]}, [2, 3]),
        ({"workers": [1, 1]}, [1]),
        ({"resources": {"GPU": 1}}, [1, 2, 4]),
        ({"resources": {"GPU": 2}}, [2, 4]),
        ({"resources": {"GPU": 1, "MEM": 4}}, [2, 4]),
        ({"workers": ["1", "3"], "resources": {"GPU": 1}}, [1]),
        ({"workers": ["1"], "server": "3"}, [1, 3]),
        ({"resources": {"GPU": 2}, "server": "3"}, [2, 3, 4]),
    ],
)
def test_who_may_be_a_member(options, allowed):
    workers = [facts(1, GPU=1), facts(2, GPU=2, MEM=4), facts(3), facts(4, **{"dshuffle-server": 1})]
    choice = SessionOptions(**options).choice
    assert [number for number, worker in enumerate(workers, 1) if choice.allows(worker)] == allowed


@pytest.mark.parametrize("text", ["1", "tcp://10.0.0.1:4000"])
def test_a_worker_is_the_same_at_another_address(text):
    before, other = facts(1), facts(2)
    choice = WorkerChoice(frozenset({text})).resolved([before, other])
    assert choice.allows(before._replace(address="tcp://10.0.0.1:4001"))
    unnamed = WorkerFacts("tcp://10.0.0.1:4001", "tcp://10.0.0.1:4001", before.nanny, {})  # Dask's default name
    assert choice.allows(unnamed)
    assert not choice.allows(other)


def test_fewer_names_than_workers_to_wait_for():
    with pytest.raises(InvalidParameter, match=r"^min_workers=3 is not allowed; it must be at most 2, the number of"):
        SessionOptions(workers=["a", "b"], min_workers=3)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sessions_side_by_side_and_each_keeps_to_its_workers(new_processes, small, tmp_path):
    """A worker of the first session is killed. A worker of the second one is there, but only its own nanny helps."""

    def samples(partition, killed):
        if killed and partition.rank == 0 and not os.path.exists(killed):
            open(killed, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        from distributed import get_worker

        return str(get_worker().name), partition["y"].tolist()

    with new_processes(4) as cluster, Client(cluster) as client:
        addresses = [address_of(client, name) for name in ("0", "1")]
        with (
            Shuffler(client, small, workers=addresses, seed=1) as first,
            Shuffler(client, small, workers=["2", 3], seed=2) as second,
        ):
            for epoch, beside in zip(first.epochs(5), second.epochs(5), strict=True):
                killed = str(tmp_path / "killed") if epoch.number == 2 else ""
                futures = epoch.map(samples, killed), beside.map(samples, "")
                for names, answers in zip(({"0", "1"}, {"2", "3"}), map(client.gather, futures), strict=True):
                    assert {name for name, _ in answers} == names
                    assert sorted(itertools.chain(*(ids for _, ids in answers))) == list(range(1000))
            assert names_of(client, first.addresses) == {"0", "1"}
            assert first.addresses[0] != addresses[0]  # a nanny starts workers at other ports
            assert names_of(client, second.addresses) == {"2", "3"}


@pytest.mark.slow
def test_a_lost_rank_goes_to_no_worker_outside_the_choice(new_processes, small):
    """Although the third worker would take it."""
    with (
        dask.config.set({"dshuffle.replacement-timeout": "1s"}),
        new_processes(3) as cluster,
        Client(cluster) as client,
    ):
        for nanny in cluster.workers.values():
            nanny.status = Status.closing_gracefully  # so that it starts no worker again

        def train():
            with Shuffler(client, small, workers=["0", "1"]) as shuffler:
                process = client.run(os.getpid)[shuffler.addresses[0]]
                for epoch in shuffler.epochs(3):
                    if epoch.number == 1:
                        os.kill(process, signal.SIGKILL)
                    client.gather(epoch.map(len))

        with pytest.raises(WorkerLost, match="No other worker could take the rank"):
            train()


@pytest.mark.slow
def test_resources_choose_the_members(cluster_of, small):
    gpu = {"resources": {"GPU": 1}}
    with (
        cluster_of({"a": gpu, "b": {}, "c": gpu, "d": {"resources": {"CPU": 4}}}) as cluster,
        Client(cluster) as client,
    ):
        with (
            Shuffler(client, small, resources={"GPU": 1}) as first,
            Shuffler(client, small, workers=["b", "d"], elastic=True) as second,
        ):
            assert (names_of(client, first.addresses), names_of(client, second.addresses)) == ({"a", "c"}, {"b", "d"})
            for epochs in zip(first.epochs(2), second.epochs(2), strict=True):
                for epoch in epochs:
                    parts = client.gather(epoch.map(lambda partition: partition["y"].copy()))
                    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
            with serving(first, np.zeros(4), 1.0, np.inf) as server:
                place = [server._address]
                assert names_of(client, place) <= {"a", "c"}
        with pytest.raises(ClusterError, match=r'none of the 4 workers has the resources GPU=2: a \(tcp:.* "GPU=2"'):
            Shuffler(client, small, resources={"GPU": 2})
        with pytest.raises(ClusterError, match=r"none of the 1 workers has the resources GPU=1"):
            Shuffler(client, small, resources={"GPU": 1}, workers=["b"])
        with (
            dask.config.set({"dshuffle.timeout": "1s"}),
            pytest.raises(ClusterError, match=r"only 2 of min_workers=3 workers that workers= and resources= allow"),
        ):
            Shuffler(client, small, resources={"GPU": 1}, min_workers=3)


@pytest.mark.slow
def test_a_session_measures_its_own_workers(cluster_of, small):
    gpu = {"resources": {"GPU": 1}}
    with cluster_of({"a": gpu, "b": {}, "c": gpu}) as cluster, Client(cluster) as client:
        assert measure_cluster(client, None, seconds=0.5).cluster.n_workers == 3
        with Shuffler(client, small, delivery="auto", resources={"GPU": 1}) as shuffler:
            assert shuffler.n_workers == 2


def test_names_that_no_worker_has(threads, small):
    words = r"^workers=\['0', 'x'\] is not allowed; it must be .*: 0 \(.*4 \(.*\)\. These are not there: 'x'\.$"
    with pytest.raises(InvalidParameter, match=words):
        Shuffler(threads, small, workers=["0", "x"])
    with pytest.raises(InvalidParameter, match="These are not there: 'x', 'y'"):
        Shuffler(threads, small, workers=["x", "y"], elastic=True)
    words = r"only 1 of min_workers=2 workers that workers= and resources= allow are there after 0\.2 s"
    with dask.config.set({"dshuffle.timeout": "200ms"}), pytest.raises(ClusterError, match=words):
        Shuffler(threads, small, workers=["0", "x"], min_workers=2)  # it might come


@pytest.mark.slow
def test_workers_of_an_elastic_session_join_only_if_they_are_chosen(cluster_of, small, caplog):
    with cluster_of({"a": {}}) as cluster, Client(cluster) as client:
        with Shuffler(client, small, workers=["a", "b"], elastic=True) as shuffler:
            assert "opens without these workers, which are not there: b" in caplog.text
            members = []
            for epoch in shuffler.epochs(8):
                parts = client.gather(epoch.map(lambda partition: partition["y"].copy()))
                np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
                members.append(names_of(client, shuffler.addresses))
                if epoch.number in (1, 4):
                    name = {1: "c", 4: "b"}[epoch.number]

                    cluster.worker_spec[name] = cluster.worker_spec["a"]
                    cluster.sync(cluster._correct_state)
                    client.wait_for_workers(2 if name == "c" else 3)
        assert members[:5] == [{"a"}] * 5
        assert members[-1] == {"a", "b"}
