"""Sessions that go on where another one was: in mid-epoch, with other workers, from a checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from contextlib import ExitStack

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dshuffle
from dshuffle import Shuffler
from dshuffle.errors import CheckpointError, ClusterError, DShuffleError, InvalidParameter
from dshuffle.planning import NEW, Choices, ShuffleSpec, WorkerHistory
from dshuffle.planning.remainder import training_orders
from dshuffle.runtime.client.session_state import SessionState
from dshuffle.sharding import Sharding

from .conftest import OPTIONS

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


@pytest.fixture(scope="module")
def clusters(cluster_of):
    """Clients of clusters with 3, 4 and 7 workers in this process."""
    with ExitStack() as stack:  # a client that is closed before a later one leaves Dask's default scheduler behind
        made = {n: stack.enter_context(cluster_of({str(name): {} for name in range(n)})) for n in (3, 4, 7)}
        yield {n: stack.enter_context(Client(cluster)) for n, cluster in made.items()}


@pytest.fixture
def labelled(tmp_path):
    x = np.random.default_rng(0).random((700, 3))
    y = np.arange(700) % 5
    return dshuffle.create_dataset(str(tmp_path / "d.zarr"), {"x": x, "y": y}, chunk_rows=20)


def some_batches(partition, count):
    """Train on some batches, or on all; the samples of those that count."""
    ids, first = [], 0
    for batch in itertools.islice(partition.batches(8, mark=True), count):
        ids += partition.sample_ids[first : first + len(batch["x"])].tolist()
        first += len(batch["x"])
    # A batch counts when the next one is asked for.
    return ids if count is None else ids[: max(0, (count - 1) * 8)]


def trained(client, epoch, counts):
    """The samples that count, of ranks that each train on some batches."""
    return client.gather(epoch.map(some_batches, dshuffle.PerRank(counts)))


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
        assert json.loads((tmp_path / "run.json").read_text())["state"]["epoch"] == 0
        trained(clusters[3], epoch, [3, 2, 1])
        assert shuffler.state_dict()["trained"] == [[16, 8, 0]]


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


@pytest.mark.parametrize("assignment", ["global", "partial:0.3"])
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


@pytest.mark.parametrize("n_samples", [-1, 1000, 1.5])
def test_marks_that_cannot_be(clusters, labelled, n_samples):
    with Shuffler(clusters[3], labelled) as shuffler:
        epoch = next(shuffler.epochs(1))
        futures = epoch.map(lambda partition: partition.mark_trained(n_samples))
        epoch.accept(futures)
        with pytest.raises(InvalidParameter, match="n_samples="):
            clusters[3].gather(futures)


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


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["path", "memory"])
def test_a_checkpoint_is_written_at_the_start_of_every_epoch(clusters, labelled, tmp_path, scheme):
    url = str(tmp_path / "run.json") if scheme == "path" else "memory://checkpoints/run.json"
    with Shuffler(clusters[3], labelled, checkpoint=url, seed=9) as shuffler:
        for epoch in shuffler.epochs(3):
            trained(clusters[3], epoch, [None] * 3)
    with pytest.raises(CheckpointError, match=r"there is a checkpoint at .*, of epoch 3"):
        Shuffler(clusters[3], labelled, checkpoint=url)
    with Shuffler.resume(clusters[4], labelled, url, seed=9) as shuffler:
        assert list(shuffler.epochs(0)) == []
        epoch = next(shuffler.epochs(1))
        assert (epoch.number, shuffler.choices.seed) == (3, 9)
        trained(clusters[4], epoch, [4] * 4)
        shuffler.save(url)
    with Shuffler.resume(clusters[3], labelled, url) as shuffler:
        assert sum(map(len, trained(clusters[3], next(shuffler.epochs(1)), [None] * 3))) == 700 - 4 * 24


@pytest.fixture
def written(clusters, labelled, tmp_path):
    path = tmp_path / "run.json"
    with Shuffler(clusters[3], labelled) as shuffler:
        trained(clusters[3], next(shuffler.epochs(1)), [3, 4, 5])
        shuffler.save(path)
    return path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-20], "damaged or truncated"),
        (lambda text: "", "damaged or truncated"),
        (lambda text: "[]", "damaged or truncated"),
        (lambda text: text.replace('"epoch": 0', '"epoch": 7'), "damaged: its checksum is wrong"),
    ],
)
def test_a_damaged_checkpoint(clusters, labelled, written, damage, message):
    text = written.read_text()
    assert damage(text) != text
    written.write_text(damage(text))
    with pytest.raises(CheckpointError, match=f"run.json is {message}"):
        Shuffler.resume(clusters[3], labelled, written)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "format 1; this release of dshuffle reads format 2"),
        ({"draw_version": 1}, "draw version 1, and this release of dshuffle draws with version"),
        ({"dataset": "another"}, "belongs to another dataset"),
        ({"n_samples": 699}, "belongs to another dataset"),
        ({"trained": [[1.5]]}, "damaged: "),
        ({"epoch": -1}, "damaged: 72 samples were trained on in epoch -1"),
        ({"epoch": "0"}, "damaged: epoch='0' is not allowed"),
        ({"trained": [[1000, 0, 0]]}, "damaged: 1000 samples"),
        ({"trained": [[-1]]}, "damaged: trained="),
        ({"trained": [3]}, "damaged: "),
        ({"choices": {}}, "damaged: "),
        ({"choices": None}, "damaged: choices=None"),
        ({"n_workers": 0}, "damaged: n_workers=0 is not allowed"),
        ({"changes": [1]}, "damaged: "),
        ({"changes": [{"epoch": 0, "carried": 0, "n_before": 2, "former": [0, 1]}]}, "damaged: n_workers=3"),
        ({"changes": [{"epoch": 5, "carried": 5, "n_before": 2, "former": [0, 1, -1]}]}, "epoch 5, which comes later"),
        ({"changes": [{"epoch": 0, "carried": 0, "n_before": 4, "former": [0, 1]}], "n_workers": 2}, "3 ranks trained"),
    ],
    ids=str,
)
def test_a_state_that_cannot_be_resumed(clusters, labelled, written, changes, message):
    state = json.loads(written.read_text())["state"]
    with pytest.raises(CheckpointError, match=message):
        Shuffler.resume(clusters[3], labelled, {**state, **changes})
    for name in changes:
        with pytest.raises(CheckpointError, match=f"damaged: {name}=None"):
            Shuffler.resume(
                clusters[3], labelled, {key: value for key, value in state.items() if key != name} | {"x": 1}
            )


def test_an_attached_value_may_be_changed_in_place(clusters, labelled, tmp_path):
    model = np.zeros(2)
    with Shuffler(clusters[3], labelled) as shuffler:
        shuffler.attach(model)
        states = []
        for number in range(3):
            model += number
            states.append(shuffler.state_dict())
    for state, expected in zip(states, [0, 1, 3], strict=True):
        with Shuffler.resume(clusters[3], labelled, state) as shuffler:
            found = shuffler.attached
            assert found.tolist() == [expected] * 2
            found += 10
            shuffler.save(tmp_path / "run.json")
        with Shuffler.resume(clusters[3], labelled, tmp_path / "run.json") as shuffler:
            assert shuffler.attached.tolist() == [expected + 10] * 2


def test_next_epoch_counts_those_of_earlier_sessions(clusters, labelled):
    with Shuffler(clusters[3], labelled) as shuffler:
        assert shuffler.next_epoch == 0
        for epoch in shuffler.epochs(2):
            trained(clusters[3], epoch, [None] * 3)
        assert shuffler.next_epoch == 2
        state = shuffler.state_dict()
    with Shuffler.resume(clusters[3], labelled, state) as shuffler:
        assert shuffler.next_epoch == 2
        trained(clusters[3], next(shuffler.epochs(5)), [1, 2, 3])
        state = shuffler.state_dict()
    with Shuffler.resume(clusters[3], labelled, state) as shuffler:
        assert shuffler.next_epoch == 2  # the rest of it


def test_where_there_is_no_checkpoint_or_none_can_be(clusters, labelled, tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        Shuffler.resume(clusters[3], labelled, tmp_path / "nothing.json")
    with pytest.raises(CheckpointError, match="must be a mapping"):
        SessionState.from_dict([("epoch", 0)], labelled)
    (tmp_path / "file").write_text("")
    with Shuffler(clusters[3], labelled) as shuffler, pytest.raises(CheckpointError, match="cannot be written"):
        shuffler.save(tmp_path / "file" / "run.json")


@pytest.mark.parametrize("place", ["", 5, "memory://run.json", "s3://bucket"])
def test_places_where_a_checkpoint_cannot_be(clusters, labelled, place):
    with pytest.raises(InvalidParameter, match=f"checkpoint={place!r} is not allowed"):
        Shuffler(clusters[3], labelled, checkpoint=place)


def test_a_state_that_the_user_has_written(clusters, labelled, written):
    framed = json.loads(written.read_text())
    written.write_text(json.dumps(framed["state"]))
    for state in (framed, framed["state"], written):
        with Shuffler.resume(clusters[3], labelled, state) as shuffler:
            assert sum(shuffler.state_dict()["trained"][0]) == 72


def test_marks_follow_the_last_attempt(clusters, labelled):
    with Shuffler(clusters[3], labelled) as shuffler:
        epoch = next(shuffler.epochs(1))
        trained(clusters[3], epoch, [9] * 3)
        trained(clusters[3], epoch, [4, 1, 2])  # the task is run again
        assert shuffler.state_dict()["trained"] == [[24, 0, 8]]


def test_a_mark_after_the_task_has_ended(clusters, labelled):
    """It would count for the next epoch."""
    with Shuffler(clusters[3], labelled) as shuffler:
        for epoch in shuffler.epochs(2):
            if epoch.number == 0:
                clusters[3].gather(epoch.map(leave_open))
            else:
                assert clusters[3].gather(epoch.map(close_late)) == ["StaleEpoch"] * 3
                assert shuffler.state_dict()["trained"] == []


OPEN = {}


def leave_open(partition):
    OPEN[partition.rank] = partition.batches(8, mark=True)
    next(OPEN[partition.rank])


def close_late(partition):
    try:
        next(OPEN[partition.rank])
    except Exception as error:
        return type(error).__name__


def test_the_stored_order_is_marked_as_a_whole(clusters, labelled):
    def in_order(partition, mark):
        stored = partition.as_stored()
        return sum(len(batch["x"]) for batch in stored.batches(8, mark=mark)), stored.mark_trained()

    with Shuffler(clusters[3], labelled) as shuffler:
        epoch = next(shuffler.epochs(1))
        with pytest.raises(InvalidParameter, match="this is not the training order"):
            clusters[3].gather(epoch.map(in_order, True))
        epoch.accept()
        clusters[3].gather(epoch.map(in_order, False))
        assert sum(shuffler.state_dict()["trained"][0]) == 700


@pytest.mark.parametrize("option", [{"seed": 1}, {"assignment": "local"}, {"first_epoch": 3}, {"cache_fraction": 0.5}])
def test_options_that_contradict_the_state(clusters, labelled, written, option):
    [(name, value)] = option.items()
    with pytest.raises(InvalidParameter, match=f"{name}={value!r} is not allowed; it must be left out, or"):
        Shuffler.resume(clusters[3], labelled, written, **option)


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
            state = json.loads(path.read_text())["state"]
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
