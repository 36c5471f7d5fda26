"""What a task gets, and what becomes of what it returns or raises."""

from __future__ import annotations

import itertools
import time
import traceback

import numpy as np
import pytest
from distributed import SchedulerPlugin

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import ClusterError, InvalidParameter, StaleEpoch
from dshuffle.runtime import PerRank, gathered


@pytest.fixture
def shuffler(threads, small):
    with Shuffler(threads, small) as shuffler:
        yield shuffler


@pytest.fixture(scope="module")
def shared(threads, tmp_path_factory):
    """A session for tests that only look at partitions, of 200 samples each."""
    arrays = {"x": np.random.default_rng(0).random((1000, 7)), "y": np.arange(1000)}
    with Shuffler(threads, create_dataset(tmp_path_factory.mktemp("shared") / "d.zarr", arrays)) as shuffler:
        yield shuffler


def run_once(shuffler, fn, *args, **kwargs):
    """One epoch of one call, which may fail; the results by rank."""
    for epoch in shuffler.epochs(1):
        futures = epoch.map(fn, *args, **kwargs)
        epoch.accept(futures)
        return shuffler.client.gather(futures)


@pytest.mark.slow
def test_all_tasks_of_a_call_are_one_submission_and_each_runs_at_its_worker(processes, small):
    """The scheduler takes as long for a submission of one task as for one of all."""

    class Submissions(SchedulerPlugin):
        name = "submissions"

        def __init__(self):
            self.tasks = []

        def update_graph(self, scheduler, *, tasks, **_):
            self.tasks.append(len(tasks))

    processes.register_plugin(Submissions())
    try:
        with Shuffler(processes, small) as shuffler:
            for epoch in shuffler.epochs(1):
                futures = epoch.map(lambda partition, twice: (partition.rank, twice), 2)
                assert gathered(futures) == [(rank, 2) for rank in range(3)]
                where = processes.who_has(futures)
                assert [list(where[future.key]) for future in futures] == [[address] for address in shuffler.addresses]
                handed_on = epoch.map(lambda partition, rank: rank + 1, PerRank([one for one in epoch.map(rank_of)]))
                assert gathered(handed_on) == [1, 2, 3]
                assert gathered(epoch.map(lambda partition, own: own, PerRank(["a", "b", "c"]))) == ["a", "b", "c"]
        asked = processes.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["submissions"].tasks)
        assert (asked[:2], asked[3:]) == ([3, 3], [1, 1, 1])  # between them those that follow others, which count too
    finally:
        processes.unregister_scheduler_plugin("submissions")


def rank_of(partition):
    return partition.rank


def test_what_one_rank_does_to_its_arguments_no_other_sees(shuffler):
    """Also where workers are threads, and no network copies objects (arrays are shared there, by Dask itself)."""

    def change(partition, given, own):
        time.sleep(0.05)
        given.append(partition.rank)
        own["rank"] = own.get("rank", 0) + partition.rank
        return list(given), own

    assert run_once(shuffler, change, [], own={}) == [([rank], {"rank": rank}) for rank in range(5)]


def test_what_a_partition_offers(shuffler, small):
    x = small.read_rows(np.arange(1000))["x"]

    def look(partition):
        assert "rank=" in repr(partition)
        with pytest.raises(ValueError, match="read-only"):
            partition.sample_ids[0] = 1
        with pytest.raises(KeyError, match=r"no array 'z' in this dataset; it has \['x', 'y'\]"):
            partition["z"]
        copied = partition["y"]
        copied[:] = -1
        assert (partition["y"] >= 0).all()
        return len(partition), partition.rank, partition.epoch, partition.names, partition.sample_ids, partition["x"]

    for number in range(2):
        for rank, (length, its_rank, epoch, names, sample_ids, rows) in enumerate(run_once(shuffler, look)):
            assert (length, its_rank, epoch, set(names)) == (200, rank, number, {"x", "y"})
            assert sample_ids.dtype == np.int64
            assert rows.dtype == np.float64
            assert np.array_equal(rows, x[sample_ids])


@pytest.mark.parametrize(
    ("batch_size", "drop_last"),
    [*itertools.product([1, 7, 199, 200, np.int32(50)], [False, True]), (201, False)],
)
def test_batches(shared, batch_size, drop_last):
    def batches(partition):
        return partition["x"], list(partition.batches(batch_size, drop_last=drop_last))

    for x, parts in run_once(shared, batches):
        size = int(batch_size)
        kept = len(x) - len(x) % size if drop_last else len(x)
        assert [len(part["x"]) for part in parts] == [min(size, kept - at) for at in range(0, kept, size)]
        assert np.array_equal(np.concatenate([x[:0], *(part["x"] for part in parts)]), x[:kept])
        assert all(part.keys() == {"x", "y"} for part in parts)


def test_a_partition_is_of_no_use_after_its_task(shuffler):
    def keep(partition):
        from distributed import get_worker

        get_worker().kept = partition, [partition.batches(10), partition.batches(10)]

    def use(partition):
        from distributed import get_worker

        former, batches = get_worker().kept
        with pytest.raises(StaleEpoch, match="after its task had ended; copy the arrays that you need"):
            former["x"]
        with pytest.raises(StaleEpoch):
            next(batches.pop())
        return len(former), former.rank

    for epoch in shuffler.epochs(1):
        shuffler.client.gather(epoch.map(keep))
        expected = [(200, rank) for rank in range(5)]
        assert shuffler.client.gather(epoch.map(use)) == expected
    assert run_once(shuffler, use) == expected


def test_a_partition_cannot_be_returned(shuffler):
    with pytest.raises(TypeError, match="a Partition cannot be sent to another process; return arrays"):
        run_once(shuffler, lambda partition: partition)
    assert run_once(shuffler, len) == [200] * 5


def test_arguments(shuffler, threads):
    def echo(partition, *args, **kwargs):
        return args, kwargs

    weights = threads.scatter(np.arange(3.0))
    one = threads.submit(lambda: 1, pure=False)
    for args, kwargs in run_once(shuffler, echo, 5, one, [one, {"deep": (one, "text")}], key=weights, workers="w"):
        assert args == (5, 1, [1, {"deep": (1, "text")}])
        assert kwargs.keys() == {"key", "workers"}
        assert np.array_equal(kwargs["key"], np.arange(3.0))
    assert run_once(shuffler, echo) == [((), {})] * 5
    ranks = PerRank("abcde")
    assert run_once(shuffler, echo, ranks, k=ranks) == [((letter,), {"k": letter}) for letter in "abcde"]
    with pytest.raises(InvalidParameter, match=r"len\(PerRank.values\)=2.*5, one value per worker"):
        run_once(shuffler, echo, PerRank("ab"))


def test_a_task_that_raises(shuffler, threads, check_orders):
    def a_function_of_the_user(partition):
        if partition.rank == 3:
            raise ZeroDivisionError("thirteen by nought")
        return partition.rank

    for epoch in shuffler.epochs(2):
        futures = epoch.map(a_function_of_the_user)
        with pytest.raises(ZeroDivisionError, match="thirteen by nought") as raised:
            threads.gather(futures)
        assert "a_function_of_the_user" in "".join(traceback.format_exception(raised.value))
        assert threads.gather(futures, errors="skip") == [0, 1, 2, 4]
        epoch.accept(futures)
    check_orders(shuffler, 3)
    assert [record.epoch for record in shuffler.records] == [0, 1, 2, 3, 4]


def test_an_epoch_that_has_ended(shuffler, threads, small):
    epochs = shuffler.epochs(2)
    first = next(epochs)
    assert "Epoch 0" in repr(first)
    next(epochs)
    with pytest.raises(ClusterError, match="epoch 0 has ended"):
        first.map(len)
    other = Shuffler(threads, small)
    last = next(other.epochs(1))
    other.close()
    with pytest.raises(ClusterError, match="epoch 0 has ended"):
        last.map(len)
