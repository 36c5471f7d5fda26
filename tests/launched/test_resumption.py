"""Jobs that continue others: between epochs and in the middle, with other numbers of ranks, with few samples left."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter

import pytest

from dshuffle.errors import CheckpointError, ClusterError, InvalidParameter, PeerFailed
from dshuffle.planning.batching import Batching

from .conftest import ONCE, SAMPLES, Model, all_epochs, counts, ids_of, stops_after, values


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_job_resumes_between_epochs(in_threads, tmp_path, n_ranks):
    checkpoint = tmp_path / "run.json"

    def loop(total):
        def run(loader):
            model = Model()
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
@pytest.mark.parametrize(("mode", "stop"), [("uneven", 3), ("pad", 3), ("uneven", -1)])
@pytest.mark.slow
def test_a_job_resumes_in_the_middle_of_an_epoch(in_threads, tmp_path, n_ranks, mode, stop):
    checkpoint = tmp_path / "run.json"
    first = values(in_threads(2, stops_after(stop, in_epoch=1), checkpoint=checkpoint))
    again = values(in_threads(n_ranks, all_epochs(3), checkpoint=checkpoint, mode=mode))
    assert [sorted(rank) for rank in again] == [[1, 2]] * n_ranks
    together = counts(first, 1) + counts(again, 1)
    assert set(together) == set(range(SAMPLES))
    assert not set(counts(first, 1)) & set(counts(again, 1)), "nothing is trained on again"
    if mode == "uneven":
        assert together == counts(again, 2) == ONCE


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
    everywhere = threading.Barrier(2)

    def stops(loader):
        batches = iter(next(loader.epochs(1)))
        for _ in range(3 - loader.rank):
            next(batches)
        everywhere.wait(60)
        if loader.rank == 0:
            loader.save()
        while True:
            time.sleep(0.05)
            loader._rank.check()

    for error in in_threads(2, stops, checkpoint=tmp_path / "run.json"):
        assert "rank 1 was not given 3 batches of epoch 0, and rank 0 was" in str(error)


def test_batches_that_a_thread_takes_ahead(in_threads, tmp_path):
    """Each rank has asked for 6 batches and has trained on 4, in the position and when the loop ends."""

    def loop(loader):
        [epoch] = itertools.islice(loader.epochs(1), 1)
        epoch.mark_trained(0)
        n_batches = 4 if len(epoch) == 7 else len(epoch)
        taken = [ids_of([batch]) for batch in itertools.islice(epoch, n_batches + 2)]
        epoch.mark_trained(n_batches)
        return list(itertools.chain(*taken[:n_batches]))

    first, second = (values(in_threads(2, loop, checkpoint=tmp_path / "run.json")) for _ in range(2))
    assert [len(ids) for ids in second] != [len(ids) for ids in first]
    assert Counter(itertools.chain(*first, *second)) == ONCE


@pytest.fixture
def state(in_threads):
    """A state after the first epoch, with a model."""

    def loop(loader):
        loader.attach(model=Model(loader.rank))
        seen = all_epochs(1)(loader)
        return seen, loader.state_dict() if loader.rank == 0 else None

    first = values(in_threads(2, loop, seed=1))
    assert counts([seen for seen, _ in first], 0) == ONCE
    assert (first[0][1]["epoch"], first[0][1]["trained"]) == (1, [])
    return first[0][1]


def test_only_rank_0_needs_the_state(in_threads, state):
    def loop(loader):
        model = Model(10 + loader.rank)
        if loader.rank == 0:
            loader.load_state_dict(state)
        loader.attach(model=model)
        return model.seen, all_epochs(2)(loader)

    again = values(in_threads(3, loop))
    assert [(model, sorted(seen)) for model, seen in again] == [(0, [1])] * 3
    assert counts([seen for _, seen in again], 1) == ONCE


def test_states_that_are_refused(in_threads, state):
    def late(loader):
        loader.attach(model=Model(10))
        loader.load_state_dict(state)

    [error] = in_threads(1, late)
    assert isinstance(error, ClusterError)
    assert "load its state before" in str(error)
    [error] = in_threads(1, lambda loader: loader.load_state_dict(None))
    assert isinstance(error, InvalidParameter)
    assert "state=None is not allowed" in str(error)

    def loop(loader):
        loader.load_state_dict(state)
        return sorted(all_epochs(2)(loader))

    [error] = in_threads(1, loop, seed=99, assignment="local")
    assert isinstance(error, InvalidParameter)
    assert "assignment='local' is not allowed; it must be left out, or" in str(error)
    assert in_threads(1, loop, seed=1) == [[1]]


def test_states_in_an_epoch_and_after_it(in_threads):
    """Rank 0's are those of the job."""

    def loop(loader):
        states = []
        for epoch in loader.epochs(2):
            states.append(loader.state_dict())
            ids_of(epoch)
        return [*states, loader.state_dict()]

    rank_0, rank_1 = values(in_threads(2, loop))
    assert [(state["epoch"], state["trained"]) for state in rank_0] == [(0, []), (1, []), (2, [])]
    assert rank_1[1] == {"rank": 1}
    [error] = in_threads(1, lambda loader: loader.load_state_dict(rank_1[1]))
    assert "must be what state_dict() returned on rank 0" in str(error)


@pytest.mark.slow
def test_objects_and_choices_that_do_not_fit_the_checkpoint(in_threads, tmp_path):
    def loop(**objects):
        def run(loader):
            loader.attach(**objects)
            return all_epochs(1)(loader)

        return run

    [error] = in_threads(1, loop(model=3))
    assert "model=3 is not allowed; it must be an object with state_dict and load_state_dict" in str(error)
    values(in_threads(1, loop(model=Model()), checkpoint=tmp_path / "run.json"))
    [error] = in_threads(1, loop(net=Model()), checkpoint=tmp_path / "run.json")
    assert isinstance(error, CheckpointError)
    assert "has no object 'net'; it has ['model']" in str(error)
    [error] = in_threads(1, all_epochs(2), checkpoint=tmp_path / "run.json", assignment="local")
    assert isinstance(error, InvalidParameter)
    assert "assignment" in str(error)


# When few samples of an epoch are left


def batches(sizes, batch_size, mode):
    """The positions of the batches of each rank."""
    batchings = [Batching(size, min(sizes), max(sizes), batch_size, mode, rest=True) for size in sizes]
    return [[own.positions(number).tolist() for number in range(len(own))] for own in batchings]


RESTS = [(largest, smallest) for largest in range(1, 30) for smallest in range(1, largest + 1)]


@pytest.mark.parametrize("mode", ["uneven", "pad"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_all_that_is_left_is_trained_on(batch_size, mode):
    for sizes in RESTS:
        ranks = batches(sizes, batch_size, mode)
        assert len(ranks[0]) == len(ranks[1]) > 0
        for size, own in zip(sizes, ranks, strict=True):
            found = Counter(itertools.chain.from_iterable(own))
            assert set(found) == set(range(size))
            if mode == "uneven":
                assert set(found.values()) == {1}
                assert all(own), "no batch is empty"
            else:
                assert {len(batch) for batch in own} == {batch_size}
        if mode == "uneven" and -(-sizes[0] // batch_size) <= sizes[1]:
            assert max(len(batch) for batch in itertools.chain(*ranks)) <= batch_size


@pytest.mark.parametrize("mode", ["uneven", "pad"])
def test_a_rank_without_samples_is_an_error_on_all_ranks(mode):
    assert batches((0, 0), 8, "uneven") == batches((3, 0), 8, "drop") == [[], []]
    for size in (0, 3):
        with pytest.raises(InvalidParameter) as error:
            Batching(size, 0, 3, 8, mode, rest=True)
        words = "world_size is not allowed: few samples of the epoch are left: 3 for one rank, and none for another"
        assert words in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "n_ranks"), [("pad", 2), ("uneven", 20)])
def test_one_rank_finishes_what_several_cannot(in_threads, tmp_path, mode, n_ranks):
    options = {"checkpoint": tmp_path / "run.json", "batch_size": 17, "mode": mode}
    first = values(in_threads(2, stops_after(-1), **options))
    errors = in_threads(n_ranks, all_epochs(1), **options)
    assert {type(error) for error in errors} <= {InvalidParameter, PeerFailed}
    assert all("Finish it with fewer ranks" in str(error) for error in errors)
    [rest] = values(in_threads(1, all_epochs(1), **options))
    assert counts(first, 0) + Counter(set(rest[0])) == ONCE
    if mode == "uneven":
        assert len(rest[0]) == len(set(rest[0]))
