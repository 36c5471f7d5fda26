"""What a task gets, and what becomes of what it returns or raises."""

from __future__ import annotations

import itertools
import multiprocessing
import time
import traceback
from unittest import mock

import numpy as np
import pytest
from distributed import SchedulerPlugin

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import ClusterError, InvalidParameter, StaleEpoch
from dshuffle.runtime import PerRank, gathered
from dshuffle.training.fit import timed


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


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "many", None])
def test_batch_sizes_that_are_none(shared, batch_size):
    def at_once(partition):
        partition.batches(batch_size)  # not only when the first batch is asked for

    with pytest.raises(InvalidParameter, match=r"batch_size=.*is not allowed; it must be an integer >= 1"):
        run_once(shared, at_once)


def test_dropping_all_batches_is_refused(shuffler):
    with pytest.raises(InvalidParameter, match=r"batch_size=201 is not allowed; it must be in \[1, 200\]"):
        run_once(shuffler, lambda partition: partition.batches(201, drop_last=True))


def test_shares_are_those_of_all_workers(threads, tmp_path):
    dataset = create_dataset(str(tmp_path / "uneven.zarr"), {"x": np.arange(43)}, chunk_rows=4)
    with Shuffler(threads, dataset, assignment="chunks") as shuffler:
        for epoch in shuffler.epochs(2):
            told = threads.gather(epoch.map(lambda partition: (len(partition), partition.shares)))
            lengths = [length for length, _ in told]
            assert {shares for _, shares in told} == {(min(lengths), max(lengths))}
            assert min(lengths) < max(lengths)


def test_processes_of_a_loader_are_refused_in_words(shuffler):
    def start(partition):
        with mock.patch.dict(multiprocessing.current_process()._config, daemon=True):  # as that of a Dask worker
            multiprocessing.Process(target=print).start()

    def other(partition):
        raise AssertionError("something else")

    with pytest.raises(InvalidParameter, match=r"start is not allowed: a Dask worker cannot start.*Use num_workers=0"):
        run_once(shuffler, start)
    with pytest.raises(AssertionError, match="something else"):
        run_once(shuffler, other)


def test_several_calls_in_an_epoch(shuffler, threads):
    for epoch in shuffler.epochs(2):
        first, second = epoch.map(lambda partition: partition.sample_ids.copy()), epoch.map(len)
        third = epoch.map(lambda partition, ids: np.array_equal(partition.sample_ids, ids[partition.rank]), first)
        assert threads.gather(second) == [200] * 5
        assert threads.gather(third) == [True] * 5


def test_futures_need_not_be_gathered_before_moving_on(shuffler, threads):
    def slow(partition):
        time.sleep(0.1)
        return partition.epoch, partition.sample_ids.copy()

    kept = [epoch.map(slow) for epoch in shuffler.epochs(3)]
    for number, futures in enumerate(kept):
        results = threads.gather(futures)
        assert [epoch for epoch, _ in results] == [number] * 5
        assert np.array_equal(np.sort(np.concatenate([ids for _, ids in results])), np.arange(1000))


def test_tasks_have_the_name_of_the_function_in_the_dashboard(threads, small):
    def mine(partition):
        return len(partition)

    def together(partition, group):
        return group.size

    with Shuffler(threads, small) as shuffler:
        for epoch in shuffler.epochs(1):
            threads.gather(epoch.map(mine))
            threads.gather(epoch.map(timed, mine))
            threads.gather(epoch.map(lambda partition: None))
            epoch.together(together)
    names = threads.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.task_prefixes))
    assert {"mine", "lambda", "together"} <= names
    assert not {"timed", "run_together", "dshuffle"} & names
