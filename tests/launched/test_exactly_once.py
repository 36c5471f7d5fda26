"""Every sample is trained on by one rank once an epoch, by loops of ranks in threads; positions and resumption."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import numpy as np
import pytest
from distributed import Client, Future

import dshuffle
from dshuffle.errors import CheckpointError, ClusterError, InvalidParameter, PeerFailed
from dshuffle.launched.session import JobSession

SAMPLES = 103


def ids_of(batches):
    ids = []
    for number, x in batches:
        assert np.array_equal(x, np.repeat(number[:, None], 3, axis=1)), "rows belong to their ids"
        ids += number.tolist()
    return ids


def all_epochs(total):
    def loop(loader):
        return {epoch.number: ids_of(epoch) for epoch in loader.epochs(total)}

    return loop


def values(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def counts(results, epoch):
    return Counter(itertools.chain.from_iterable(rank.get(epoch, []) for rank in results))


ONCE = Counter(range(SAMPLES))


@pytest.mark.parametrize(
    "assignment", ["global", *(pytest.param(name, marks=pytest.mark.slow) for name in ("partial:0.3", "chunks:10"))]
)
def test_every_sample_once_an_epoch(in_threads, assignment):
    results = values(in_threads(3, all_epochs(3), assignment=assignment, batch_size=5))
    assert [sorted(rank) for rank in results] == [[0, 1, 2]] * 3
    for epoch in range(3):
        assert counts(results, epoch) == ONCE
    assert results[0][0] != results[0][1]


@pytest.mark.slow
def test_ranks_are_those_of_a_session_on_as_many_workers(in_threads, store):
    results = values(in_threads(2, all_epochs(2), seed=7))
    with (
        Client(n_workers=2, processes=False, dashboard_address=":0") as client,
        dshuffle.Shuffler(client, store, seed=7) as shuffler,
    ):
        for epoch in shuffler.epochs(2):
            orders = client.gather(epoch.map(lambda partition: partition.sample_ids.tolist()))
            assert [rank[epoch.number] for rank in results] == orders


@pytest.mark.slow
def test_drop_and_pad_fill_all_batches(in_threads):
    def sizes(loader):
        return [[len(number) for number, _ in epoch] for epoch in loader.epochs(1)], len(loader)

    assert values(in_threads(2, sizes, mode="drop")) == [([[8] * 6], 6)] * 2
    assert values(in_threads(2, sizes, mode="pad")) == [([[8] * 7], 7)] * 2


def test_the_length_is_known_before_the_first_epoch(in_threads):
    def loop(loader):
        before = len(loader) if loader.rank == 0 else None
        return before, [(epoch.number, len(list(epoch))) for epoch in loader.epochs(2)], loader.next_epoch

    results = values(in_threads(2, loop))
    assert results == [(7, [(0, 7), (1, 7)], 2), (None, [(0, 7), (1, 7)], 2)]


def test_arrays_are_in_alphabetical_order(tmp_path):
    """The order of a row's bytes is another one."""
    arrays = {"x": np.zeros((4, 2), "f4"), "y": np.arange(4), "b": np.zeros(4, bool)}
    dataset = dshuffle.create_dataset(str(tmp_path / "three.zarr"), arrays)
    assert dataset.layout.names != ("b", "x", "y")
    with dshuffle.spmd(dataset, batch_size=4, rank=0, world_size=1) as loader:
        [batch] = next(loader.epochs(1))
    assert [(array.shape, array.dtype) for array in batch] == [((4,), bool), ((4, 2), "f4"), ((4,), "i8")]


def test_arrays_are_in_the_order_asked_for(in_threads):
    def loop(loader):
        x, number = next(iter(next(loader.epochs(1))))
        return loader.names, x.shape, number.shape

    assert values(in_threads(2, loop, arrays=["x", "id"])) == [(("x", "id"), (7, 3), (7,)), (("x", "id"), (7, 3), (7,))]


def test_a_callback_that_comes_late_does_not_take_a_task_for_cancelled(in_threads, monkeypatch):
    closed, called = threading.Event(), threading.Semaphore(0)
    add_done_callback, close_client = Future.add_done_callback, JobSession._close_client

    def added_late(future, callback):
        def late(future):
            assert closed.wait(30)
            callback(future)
            called.release()

        add_done_callback(future, late)

    def close_and_wait(session):
        close_client(session)
        closed.set()
        for _ in range(2):  # the job has not ended yet
            assert called.acquire(timeout=30)

    monkeypatch.setattr(Future, "add_done_callback", added_late)
    monkeypatch.setattr(JobSession, "_close_client", close_and_wait)
    assert values(in_threads(2, lambda loader: next(iter(next(loader.epochs(1))))[0].size)) == [7, 7]


class Counting:
    """A model that counts the samples of its rank."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_job_resumes_between_epochs(in_threads, tmp_path, n_ranks):
    checkpoint = tmp_path / "run.json"

    def loop(total):
        def run(loader):
            model = Counting()
            loader.attach(model=model)
            began = model.seen
            seen = {}
            for epoch in loader.epochs(total):
                seen[epoch.number] = ids_of(epoch)
                model.seen += len(seen[epoch.number])
            return seen, began, model.seen

        return run

    first = values(in_threads(2, loop(2), checkpoint=checkpoint))
    assert [began for _, began, _ in first] == [0, 0]
    again = values(in_threads(n_ranks, loop(4), checkpoint=checkpoint))
    assert [sorted(seen) for seen, _, _ in again] == [[2, 3]] * n_ranks
    assert [began for _, began, _ in again] == [first[0][2]] * n_ranks, "all ranks have the state of rank 0"
    for epoch in range(4):
        assert counts([seen for seen, _, _ in first + again], epoch) == ONCE
    assert values(in_threads(2, loop(4), checkpoint=checkpoint))[0][0] == {}, "nothing is left"


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("mode", ["uneven", "pad"])
@pytest.mark.slow
def test_a_job_resumes_in_the_middle_of_an_epoch(in_threads, tmp_path, n_ranks, mode):
    checkpoint = tmp_path / "run.json"

    def stops(loader):
        seen = {}
        for epoch in loader.epochs(3):
            seen[epoch.number] = ids_of(itertools.islice(epoch, 3) if epoch.number == 1 else epoch)
            if epoch.number == 1:
                break
        return seen

    first = values(in_threads(2, stops, checkpoint=checkpoint))
    again = values(in_threads(n_ranks, all_epochs(3), checkpoint=checkpoint, mode=mode))
    assert [sorted(rank) for rank in again] == [[1, 2]] * n_ranks
    together = counts(first, 1) + counts(again, 1)
    assert set(together) == set(range(SAMPLES))
    assert not set(counts(first, 1)) & set(counts(again, 1)), "nothing is trained on again"
    if mode == "uneven":
        assert together == ONCE
        assert counts(again, 2) == ONCE


@pytest.mark.slow
def test_few_samples_that_are_left_make_smaller_batches(in_threads, tmp_path):
    checkpoint = tmp_path / "run.json"

    def stops(loader):
        epoch = next(loader.epochs(1))
        return {0: ids_of(itertools.islice(epoch, len(epoch) - 1))}

    first = values(in_threads(2, stops, checkpoint=checkpoint))
    again = values(in_threads(3, all_epochs(1), checkpoint=checkpoint))
    assert counts(first + again, 0) == ONCE
    assert 0 < counts(again, 0).total() < 3 * 8


def test_a_saved_position_is_that_of_rank_0(in_threads, tmp_path):
    """Rank 1 is a batch ahead when rank 0 saves. It trains on this batch again: the saved model has not seen it."""
    checkpoint = tmp_path / "run.json"
    is_ahead, is_saved = threading.Event(), threading.Event()
    before = {0: [], 1: []}  # the batches of each rank that the state has

    def stops(loader):
        for number, (ids, _) in enumerate(next(loader.epochs(1))):
            if number < 3:
                before[loader.rank] += ids.tolist()
            if loader.rank == 1 and number == 3:
                is_ahead.set()
                assert is_saved.wait(60)
                break
            if loader.rank == 0 and number == 2:
                assert is_ahead.wait(60)
                loader.save()
                is_saved.set()
                raise ValueError("stop")

    results = in_threads(2, stops, checkpoint=checkpoint)
    assert isinstance(results[0], ValueError)
    assert "rank 0 of 2 has failed: ValueError: stop" in str(results[1])
    again = values(in_threads(2, all_epochs(1), checkpoint=checkpoint))
    assert counts(again, 0) + Counter(before[0] + before[1]) == ONCE


@pytest.mark.slow
def test_a_position_that_a_rank_has_not_reached_is_not_saved(in_threads, tmp_path):
    def stops(loader):
        batches = iter(next(loader.epochs(1)))
        for _ in range(3 - loader.rank):
            next(batches)
        everywhere.wait(60)
        if loader.rank == 0:
            loader.save()
        loader._mailbox.wait(lambda: False, "for the failure of rank 0")

    everywhere = threading.Barrier(2)
    results = in_threads(2, stops, checkpoint=tmp_path / "run.json")
    assert "rank 1 was not given 3 batches of epoch 0, and rank 0 was" in str(results[0])


@pytest.mark.slow
def test_a_state_goes_on_in_another_job(in_threads):
    everywhere = threading.Barrier(2)

    def stops(loader):
        epoch = next(loader.epochs(2))
        state = None
        seen = ids_of(epoch)
        everywhere.wait(60)
        if loader.rank == 0:
            state = loader.state_dict()
        return {0: seen}, state

    first = values(in_threads(2, stops))
    state = first[0][1]
    assert (state["epoch"], state["trained"]) == (1, [])

    def goes_on(loader):
        loader.load_state_dict(state)
        return all_epochs(2)(loader)

    again = values(in_threads(3, goes_on))
    assert [sorted(rank) for rank in again] == [[1]] * 3
    assert counts(again, 1) == ONCE


def test_all_ranks_have_a_state_and_a_job_goes_on_from_that_of_rank_0(in_threads):
    def loop(loader):
        states = [loader.state_dict()] if loader.rank else []
        for epoch in loader.epochs(1):
            ids_of(itertools.islice(epoch, 3))
            states += [loader.state_dict()] if loader.rank else []
            break
        return states

    of_rank_1 = values(in_threads(2, loop))[1]
    assert of_rank_1 == [{"rank": 1, "epoch": 0, "batches": 0}, {"rank": 1, "epoch": 0, "batches": 3}]
    [error] = in_threads(1, lambda loader: loader.load_state_dict(of_rank_1[0]))
    assert "must be what state_dict() returned on rank 0" in str(error)


@pytest.mark.parametrize(
    ("by_rank", "words"),
    [
        ({1: {"batch_size": 4}}, "rank 1 has batch_size=4, and rank 0 has 8"),
        ({1: {"mode": "drop"}}, "rank 1 has mode='drop', and rank 0 has 'uneven'"),
        ({1: {"seed": 1}}, "rank 1 has seed=1, and rank 0 has 0"),
        ({1: {"assignment": "local"}, 0: {"assignment": "global"}}, "rank 1 has assignment='local', and rank 0 has"),
        ({1: {"sharding": np.arange(103) % 2}, 0: {"sharding": np.arange(103) // 52}}, "rank 1 has sharding="),
    ],
)
def test_ranks_that_differ_are_refused(in_threads, by_rank, words):
    results = in_threads(2, len, by_rank=by_rank)
    assert isinstance(results[1], InvalidParameter)
    assert words in str(results[1])
    assert isinstance(results[0], PeerFailed)
    assert words in str(results[0])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_go_through_the_same_epochs(in_threads, rank):
    def loop(loader):
        return all_epochs(1 if loader.rank == rank else 3)(loader)

    for error in in_threads(2, loop):
        assert "All ranks must go through the same epochs" in str(error)
        assert f"rank {rank}" in str(error)


def test_an_object_without_a_state_is_refused(in_threads):
    [error] = in_threads(1, lambda loader: loader.attach(model=3))
    assert isinstance(error, InvalidParameter)
    assert "model=3 is not allowed; it must be an object with state_dict and load_state_dict" in str(error)


@pytest.mark.slow
def test_an_object_that_the_checkpoint_lacks_is_refused(in_threads, tmp_path):
    def loop(name):
        def run(loader):
            loader.attach(**{name: Counting()})
            return all_epochs(1)(loader)

        return run

    values(in_threads(1, loop("model"), checkpoint=tmp_path / "run.json"))
    [error] = in_threads(1, loop("net"), checkpoint=tmp_path / "run.json")
    assert isinstance(error, CheckpointError)
    assert "has no object 'net'; it has ['model']" in str(error)


@pytest.mark.slow
def test_another_way_of_shuffling_is_refused(in_threads, tmp_path):
    values(in_threads(1, all_epochs(1), checkpoint=tmp_path / "run.json"))
    [error] = in_threads(1, all_epochs(2), checkpoint=tmp_path / "run.json", assignment="local")
    assert isinstance(error, CheckpointError)
    assert "assignment" in str(error)


def test_a_batch_larger_than_a_share_is_refused(in_threads):
    for error in in_threads(2, all_epochs(1), batch_size=60):
        assert "batch_size=60 is not allowed; it must be in [1, 51]" in str(error)


@pytest.mark.slow
def test_a_rank_that_does_not_come(store, free_port):
    with pytest.raises(ClusterError, match="2 of 3 ranks have not come within 1 s: 1, 2"):
        dshuffle.spmd(store, batch_size=8, rank=0, world_size=3, port=free_port, timeout=1)
    with pytest.raises(ClusterError, match=f"rank 1 did not find rank 0 on 127.0.0.1 within 1 s .ports {free_port}."):
        dshuffle.spmd(store, batch_size=8, rank=1, world_size=3, port=free_port, timeout=1)


def test_without_a_launcher_the_process_is_the_only_rank(store, caplog, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    with dshuffle.spmd(store, batch_size=8) as loader:
        assert (loader.rank, loader.world_size) == (0, 1)
        assert counts([all_epochs(1)(loader)], 0) == ONCE
    assert "the only rank" in caplog.text
