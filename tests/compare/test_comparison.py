from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace

import dask
import numpy as np
import pytest

import dshuffle
from dshuffle.compare import Way, connect, default_ways, local_cluster, product_of_ways
from dshuffle.compare.comparison import _with_chosen, predicted
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.pipeline import Pipeline, RunningScheduler, Training
from dshuffle.pipeline.pipeline import train
from dshuffle.planning import Choices
from dshuffle.planning.cost import ClusterRates
from dshuffle.synthetic import keyed_regression


def test_the_default_ways_are_the_papers_baselines():
    *ways, server, clique = default_ways(Choices(seed=3), coded_fraction=0.5)
    assert [way.label for way in ways] == [way.label for way in default_ways()]
    assert [(str(way.choices.assignment), way.choices.delivery) for way in ways[2:]] == [
        ("partial:0.1", "peer"),
        ("chunks", "storage"),
        ("global", "storage"),
        ("global", "server"),
        ("global", "peer"),
    ]
    assert [way.choices.sharding for way in ways[:2]] == ["contiguous", "random"]
    assert [way.label for way in (server, clique)] == ["global + server, 50 % cached", "global + clique, 50 % cached"]
    assert {(way.choices.cache_fraction, way.choices.seed) for way in (server, clique)} == {(0.5, 3)}
    assert len(default_ways(Choices(cache_fraction=0.75), coded_fraction=0.5)) == len(ways) + 3


def test_a_product_holds_each_way_once():
    ways = product_of_ways(Choices(), ["global", "local", "partial:0.50", "partial:0.5"], ["peer", "server", "peer"])
    assert [way.label for way in ways] == [
        "global + peer",
        "global + server",
        "local",
        "partial:0.5 + peer",
        "partial:0.5 + server",
    ]


def test_groups_smaller_than_chunks_are_predicted_to_read_more(tmp_path):
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {"x": np.ones((8000, 10))}, chunk_rows=200)
    cluster = ClusterRates(4, link_up=1e9, link_down=1e9, storage=1e5)
    chunks, groups, whole = (
        predicted(
            cluster, dataset, Way(name, Choices(assignment=name, delivery="storage", sharding="random"))
        ).exchange_seconds
        for name in ("chunks", "chunks:50", "chunks:200")
    )
    assert whole == chunks
    assert groups > 2 * chunks


def test_a_scheduler_that_does_not_answer_is_named():
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "200ms"}),
        pytest.raises(ClusterError, match=r"no Dask scheduler answers at 'tcp://127\.0\.0\.1:1'"),
        connect("tcp://127.0.0.1:1", 2),
    ):
        pytest.fail("connected to nothing")


def test_processes_that_a_machine_cannot_bear_are_not_started():
    with pytest.raises(InvalidParameter, match=r"workers=100000 .* at most \d+ on"), local_cluster(100_000):
        pass


FORKING = """
import os, signal, sys, time
from dshuffle.compare import local_cluster

def facts():
    has_loaded = "dshuffle.store.dataset" in sys.modules
    return os.getppid(), os.environ["OMP_NUM_THREADS"], os.environ.get("SET_LATER"), has_loaded

if __name__ == "__main__":
    for value in (None, "yes"):
        if value:
            os.environ["SET_LATER"] = value
        with local_cluster(1) as client:
            print(*set(client.run(facts).values()), os.getpid(), flush=True)
            if value:
                os.killpg(0, signal.SIGINT)  # as a terminal does after Ctrl-C
                time.sleep(60)
"""


@pytest.mark.slow
def test_processes_of_local_clusters_are_forked_and_end_at_ctrl_c(tmp_path):
    """From one process that has loaded dshuffle; with the environment of now."""
    (tmp_path / "script.py").write_text(FORKING)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, start_new_session=True
    )
    first, second = done.stdout.splitlines()
    own = first.split()[-1]
    parent = first[1:].split(",")[0]
    assert first == f"({parent}, '1', None, True) {own}"
    assert second == f"({parent}, '1', 'yes', True) {own}"
    assert parent != own
    assert done.returncode == -signal.SIGINT
    assert [line for line in done.stderr.splitlines() if "Error" in line] == []
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.slow
def test_all_default_ways_on_a_real_cluster(tmp_path):
    data = {name: array.compute() for name, array in keyed_regression(2000).items()}
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", data, chunk_rows=100)
    copy = dshuffle.shuffle_dataset(dataset, tmp_path / "copy.zarr", chunk_rows=100)
    seen = []
    with local_cluster(2) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        assert sorted(bool(worker["resources"].get("dshuffle-server")) for worker in workers) == [
            False,
            False,
            True,
        ]
        pipeline = Pipeline(
            dataset,
            Training("linear_regression", epochs=3, step=0.5),
            default_ways(Choices(seed=5), copy),
            RunningScheduler(client.scheduler.address),
            report=tmp_path,
        )
        comparison = train(pipeline, lambda *progress: seen.append(progress)).comparison
    labels = [way.label for way in default_ways(copy=copy)]
    assert list(dict.fromkeys(text for done, _, text in seen if done >= 4)) == labels, "after four preparations"
    counts = [done for done, most, _ in seen if most == 4 + 24]
    assert len(counts) == len(seen)
    assert counts == sorted(counts)
    assert set(counts) == set(range(4 + 25)), "every epoch of eight strategies moves the count"
    for way in comparison.ways:
        assert [record.epoch for record in way.records] == [0, 1, 2]
        assert {record.n_workers for record in way.records} == {2}, "the server must not train"
        assert {record.needed > 0 for record in way.records[1:]} == {way.choices.assignment.moves}
    results = {way.label: way for way in comparison.ways}
    assert {record.server for record in results["global + server"].records} == {"dedicated"}
    final = {label: way.history[-1].error for label, way in results.items()}
    # The same samples reach the same workers in the same order, whoever carries them.
    assert final["global + peer"] == final["global + storage"] == final["global + server"]
    assert final["local, as stored"] > 10 * final["local, shuffled once"]
    # Chunks of sorted rows are read once each, and mix less.
    for record in results["chunks + storage"].records:
        assert record.store_bytes == record.needed * 404 + 4 * record.store_requests  # with a checksum each
        assert record.needed % 100 == 0
    assert final["chunks + storage"] > 10 * final["global + storage"]
    assert final["chunks + storage"] > 10 * final["chunks + storage, shuffled on disk"]
    for record in results["chunks + storage, shuffled on disk"].records:
        assert record.needed % 100 == 0
    assert comparison.dataset["samples"] == 2000
    assert comparison.cluster["servers"] == 1


def test_a_copy_has_the_same_samples(tmp_path):
    arrays = {"x": np.ones((9, 2)), "y": np.ones(9)}
    dataset, short = (dshuffle.create_dataset(tmp_path / f"{n}", {k: v[:n] for k, v in arrays.items()}) for n in (9, 8))
    for copy in (short, dataset):
        with pytest.raises(InvalidParameter, match=r"shuffled is not allowed: .* is not .* in another order. Write it"):
            Pipeline(dataset, Training("linear_regression", step=0.1), default_ways(copy=copy)).check()


def test_auto_is_labelled_with_what_it_took():
    names = ("load", "peer", "storage", "none", "storage")
    records = [SimpleNamespace(delivery=name, exchanged=name not in ("load", "none")) for name in names]
    auto, peer = (
        Way(name, Choices(assignment="global", delivery=name, sharding="random")) for name in ("auto", "peer")
    )
    assert _with_chosen(auto, records) == "auto (storage 2 of 3)"
    assert _with_chosen(auto, records[:1]) == "auto"
    assert _with_chosen(peer, records) == "peer"
