"""Sessions that go on where another one was: in mid-epoch, with other workers, from a checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler
from dshuffle.errors import CheckpointError, ClusterError, DShuffleError
from dshuffle.planning import NEW, Choices, ShuffleSpec, WorkerHistory
from dshuffle.planning.remainder import training_orders
from dshuffle.sharding import Sharding

from ..conftest import OPTIONS
from .stopping import trained

pytestmark = pytest.mark.timeout(120)

WAYS = [
    {"assignment": "global"},
    {"assignment": "partial:0.3"},
    {"assignment": "local"},
    {"assignment": "chunks"},
    {"assignment": "aligned", "delivery": "leftover"},
    {"assignment": "global", "cache_fraction": 0.7},
    {"assignment": "partial:0.3", "cache_fraction": 0.7, "caching": "recent", "delivery": "clique"},
    {"assignment": "global", "balance": "y"},
    {"assignment": "local", "sharding": "stratified:y"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "before", "after"),
    [*((way, 4, 3) for way in WAYS), *((way, 3, 7) for way in WAYS[:2]), *((way, 3, 3) for way in WAYS[3:5])],
    ids=str,
)
def test_what_was_left_is_trained_on_once(clusters, labelled, way, before, after):
    rng = random.Random(f"{way} {before} {after}")
    stop = rng.randrange(3)
    with Shuffler(clusters[before], labelled, seed=5, **way) as shuffler:
        for epoch in shuffler.epochs(stop + 1):
            if epoch.number < stop:
                trained(clusters[before], epoch, [None] * before)
        seen = trained(clusters[before], epoch, [rng.randrange(12) for _ in range(before)])
        state = json.loads(json.dumps(shuffler.state_dict()))
    assert state["epoch"] == stop
    if way["assignment"] not in ("local", "partial:0.3") or "sharding" in way:
        with Shuffler(clusters[after], labelled, seed=5, first_epoch=stop + 1, **way) as shuffler:
            expected = [trained(clusters[after], epoch, [None] * after) for epoch in shuffler.epochs(2)]
    else:  # rank 0 goes on with the samples of rank 0, and so on
        carried = stop if state["trained"] else stop - 1
        former = [rank if rank < before else NEW for rank in range(after)]
        spec = ShuffleSpec(700, after, Choices(seed=5, **way), first_epoch=stop)
        if carried >= 0:
            spec = spec.with_history(WorkerHistory(before).changed(former, epoch=stop, carried=carried), stop)
        expected = [[ids.tolist() for ids in training_orders(spec, stop + later)] for later in (1, 2)]
    with Shuffler.resume(clusters[after], labelled, state) as shuffler:
        first, *later = [trained(clusters[after], epoch, [None] * after) for epoch in shuffler.epochs(3)]
    assert sorted(itertools.chain(*seen, *first)) == list(range(700))
    assert later == expected


def test_an_epoch_that_is_trained_on_after_the_loop(clusters, labelled, tmp_path):
    with Shuffler(clusters[3], labelled, checkpoint=tmp_path / "run.json") as shuffler:
        [epoch] = shuffler.epochs(1)
        assert json.loads((tmp_path / "run.json").read_bytes().partition(b"\n")[0])["state"]["epoch"] == 0
        trained(clusters[3], epoch, [3, 2, 1])
        assert shuffler.state_dict()["trained"] == [[16, 8, 0]]


@pytest.mark.slow
def test_a_second_stop_in_the_same_epoch(clusters, labelled):
    seen, state = [], None
    for n in (4, 3, 7):
        make = Shuffler if state is None else Shuffler.resume
        arguments = () if state is None else (state,)
        with make(clusters[n], labelled, *arguments) as shuffler:
            seen += trained(clusters[n], next(shuffler.epochs(1)), range(2, n + 2))
            state = shuffler.state_dict()
    assert len(state["trained"]) == 3
    with Shuffler.resume(clusters[3], labelled, state, delivery="storage") as shuffler:
        seen += trained(clusters[3], next(shuffler.epochs(1)), [None] * 3)
        state = shuffler.state_dict()
    assert sorted(itertools.chain(*seen)) == list(range(700))
    with Shuffler.resume(clusters[4], labelled, state) as shuffler:  # nothing is left of the epoch
        assert next(shuffler.epochs(1)).number == 1


@pytest.mark.slow
def test_workers_that_have_not_trained_leave_samples_where_they_are(clusters, labelled):
    """A partial exchange that stops in mid-epoch with three workers, waits with four, and goes on with three."""
    with Shuffler(clusters[3], labelled, assignment="partial:0.3") as shuffler:
        epochs = shuffler.epochs(2)
        trained(clusters[3], next(epochs), [None] * 3)
        epoch = next(epochs)
        order = clusters[3].gather(epoch.map(lambda partition: partition.sample_ids.tolist()))
        trained(clusters[3], epoch, [5] * 3)
        state = shuffler.state_dict()
    with Shuffler.resume(clusters[4], labelled, state) as shuffler:
        assert len(clusters[4].gather(next(shuffler.epochs(1)).map(len))) == 4
        state = shuffler.state_dict()
    assert state["n_workers"] == 4
    with Shuffler.resume(clusters[3], labelled, state) as shuffler:
        left = trained(clusters[3], next(shuffler.epochs(1)), [None] * 3)
    assert left == [samples[32:] for samples in order]


@pytest.mark.parametrize("assignment", [pytest.param("global", marks=pytest.mark.slow), "partial:0.3"])
def test_a_user_says_how_far_ranks_came_after_workers_have_changed(clusters, labelled, assignment):
    """The number of workers changed between two epochs; the state is that of the beginning of the next one."""
    with Shuffler(clusters[4], labelled, assignment=assignment) as shuffler:
        trained(clusters[4], next(shuffler.epochs(1)), [None] * 4)
        state = shuffler.state_dict()
    with Shuffler.resume(clusters[3], labelled, state) as shuffler:
        epoch = next(shuffler.epochs(1))
        state = shuffler.state_dict()
        seen = clusters[3].gather(epoch.map(lambda partition: partition.sample_ids[:20].tolist()))
    assert (state["epoch"], state["trained"]) == (1, [])
    state["trained"] = [[20, 20, 20]]
    with Shuffler.resume(clusters[7], labelled, state) as shuffler:
        seen += trained(clusters[7], next(shuffler.epochs(1)), [None] * 7)
    assert sorted(itertools.chain(*seen)) == list(range(700))


def test_a_state_before_the_first_epoch_and_without_marks(clusters, labelled):
    with Shuffler(clusters[3], labelled, first_epoch=6, seed=3) as shuffler:
        before = shuffler.state_dict()
        epoch = next(shuffler.epochs(1))
        clusters[3].gather(epoch.map(lambda partition: [len(batch["x"]) for batch in partition.batches(7)]))
        assert shuffler.state_dict() == before
    assert (before["epoch"], before["trained"], before["choices"]["seed"]) == (6, [], 3)
    with pytest.raises(ClusterError, match="this Shuffler is closed"):
        shuffler.state_dict()
    with Shuffler.resume(clusters[4], labelled, before) as shuffler:
        epoch = next(shuffler.epochs(1))
        assert (epoch.number, shuffler.choices.seed) == (6, 3)
        clusters[4].gather(epoch.map(lambda partition: partition.mark_trained()))
        assert sum(shuffler.state_dict()["trained"][0]) == 700


@pytest.mark.slow
def test_a_sharding_that_was_an_array_is_given_again(clusters, labelled):
    ranks = np.arange(700, dtype=np.int32) % 3
    with Shuffler(clusters[3], labelled, assignment="local", sharding=ranks) as shuffler:
        seen = trained(clusters[3], next(shuffler.epochs(1)), [3, 5, 7])
        state = shuffler.state_dict()
    with pytest.raises(CheckpointError, match="sharding of the earlier session must be given again"):
        Shuffler.resume(clusters[3], labelled, state)
    with pytest.raises(CheckpointError, match="is not the one of the earlier session"):
        Shuffler.resume(clusters[3], labelled, state, sharding=ranks[::-1])
    with Shuffler.resume(clusters[3], labelled, state, sharding=ranks) as shuffler:
        seen += trained(clusters[3], next(shuffler.epochs(1)), [None] * 3)
    assert sorted(itertools.chain(*seen)) == list(range(700))


@pytest.mark.slow
def test_samples_that_all_workers_train_on(clusters, labelled):
    sharding = Sharding(np.arange(700, dtype=np.int32) % 3, 3, broadcast=np.array([5, 6]))
    with Shuffler(clusters[3], labelled, assignment="local", sharding=sharding) as shuffler:
        seen = trained(clusters[3], next(shuffler.epochs(1)), [30, 2, 9])
        state = shuffler.state_dict()
    with Shuffler.resume(clusters[3], labelled, state, sharding=sharding) as shuffler:
        seen += trained(clusters[3], next(shuffler.epochs(1)), [None] * 3)
        state = shuffler.state_dict()
    assert sorted(itertools.chain(*seen)) == sorted([*range(700), 5, 5, 6, 6])
    with Shuffler.resume(clusters[3], labelled, state, sharding=sharding) as shuffler:
        assert next(shuffler.epochs(1)).number == 1


@pytest.mark.slow
def test_what_is_changed_in_place_after_it_was_attached_is_not_in_the_state(clusters, labelled, tmp_path):
    model = np.zeros(2)
    with Shuffler(clusters[3], labelled) as shuffler:
        shuffler.attach(model)
        model += 1
        shuffler.save(tmp_path / "run.json")
    with Shuffler.resume(clusters[3], labelled, tmp_path / "run.json") as shuffler:
        found = shuffler.attached
        found += 10
        assert shuffler.attached.tolist() == [0, 0]


# -- real processes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_whole_cluster_is_killed(labelled, tmp_path):
    """What was trained on since the last checkpoint is trained on again, and nothing else."""
    path = tmp_path / "run.json"

    def slowly(partition):
        for _ in partition.batches(10, mark=True):
            time.sleep(0.5)  # far longer than saving takes, also on a busy machine

    with LocalCluster(n_workers=3, processes=True, **OPTIONS) as cluster, Client(cluster) as client:
        shuffler = Shuffler(client, labelled, on_loss="raise")
        epoch = next(shuffler.epochs(1))
        futures = epoch.map(slowly)
        for _ in range(50):
            time.sleep(0.2)
            shuffler.save(path)
            state = json.loads(path.read_bytes().partition(b"\n")[0])["state"]
            if any(map(sum, state["trained"])):
                break
        for nanny in cluster.workers.values():
            os.kill(nanny.pid, signal.SIGKILL)
        with pytest.raises(DShuffleError):
            list(shuffler.epochs(2))
        del futures
        shuffler.close()
    counted = sum(state["trained"][0])
    assert 0 < counted < 700
    with (
        LocalCluster(n_workers=2, processes=True, **OPTIONS) as cluster,
        Client(cluster) as client,
        Shuffler.resume(client, labelled, path) as shuffler,
    ):
        for epoch in shuffler.epochs(2):
            assert sum(client.gather(epoch.map(len))) == 700 - (counted if epoch.number == 0 else 0)
    assert [record.trained_before for record in shuffler.records] == [counted, 0]
