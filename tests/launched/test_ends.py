"""Loops that end at different places: an error on every rank, and no lost sample."""

from __future__ import annotations

import itertools
import json
import re
import threading
from types import SimpleNamespace

import pytest

import dshuffle
from dshuffle.errors import ClusterError, PeerFailed
from dshuffle.launched.job import Job
from dshuffle.launched.launcher import place_of

from ..conftest import in_a_fork

SAME_EPOCHS = "All ranks must go through the same epochs"


def ids_of(batches):
    return [int(sample) for ids, _ in batches for sample in ids]


def epochs(loader, total):
    return {epoch.number: ids_of(epoch) for epoch in loader.epochs(total)}


@pytest.mark.slow
def test_a_rank_that_leaves_an_epoch_earlier_and_then_works(in_threads, tmp_path):
    """The message of its loop's end comes when rank 0 has begun the next epoch."""
    begun = threading.Event()

    def loop(loader):
        if loader.rank == 1:
            epochs(loader, 1)
            assert begun.wait(60)
        else:
            for epoch in loader.epochs(2):
                if epoch.number == 1:
                    begun.set()
                ids_of(epoch)

    results = in_threads(2, loop, checkpoint=tmp_path / "run.json")
    for error in results:
        assert isinstance(error, PeerFailed)
        assert "rank 1 of 2 has left its loop" in str(error)
        assert SAME_EPOCHS in str(error)
    assert json.loads((tmp_path / "run.json").read_bytes().partition(b"\n")[0])["state"]["epoch"] == 1


def test_a_forked_process_reads_datasets_and_has_no_part_in_the_job(in_threads, store):
    def loop(loader):
        data = dshuffle.open_dataset(store)
        epoch = next(loader.epochs(1))
        uses = (lambda: data.read_rows([5])["id"], loader.close, lambda: next(iter(epoch)), loader.state_dict)
        return [in_a_fork(use) for use in uses]

    [[read, closed, *refused]] = in_threads(1, loop)
    assert (read, closed) == ("returned [5]", "returned None")
    for words in refused:
        assert "belongs to another process" in words


@pytest.mark.parametrize("ends_loop", [False, True])
def test_an_epoch_that_rank_0_ends_and_another_rank_does_not(in_threads, tmp_path, ends_loop):
    def loop(loader):
        for epoch in loader.epochs(1):
            ids_of(itertools.islice(epoch, len(epoch) - 2 * loader.rank))
            if loader.rank or not ends_loop:
                break

    for error in in_threads(2, loop, checkpoint=tmp_path / "run.json"):
        assert isinstance(error, PeerFailed)
        assert "in the middle of epoch 0, after 5 of 7 batches" in str(error)
    assert json.loads((tmp_path / "run.json").read_bytes().partition(b"\n")[0])["state"]["epoch"] == 0


def test_an_epoch_that_another_rank_ends_and_rank_0_does_not(in_threads, tmp_path):
    def loop(loader):
        for epoch in loader.epochs(1):
            ids_of(itertools.islice(epoch, 3 if loader.rank == 0 else None))
            if loader.rank == 0:
                break

    for error in in_threads(2, loop, checkpoint=tmp_path / "run.json"):
        assert isinstance(error, PeerFailed)
        assert "in the middle of epoch 0, after 3 of 7 batches" in str(error)
        assert SAME_EPOCHS in str(error)


@pytest.mark.slow
def test_the_length_in_a_job_that_is_done_skips_nothing(in_threads, tmp_path):
    checkpoint = tmp_path / "run.json"

    def loop(total, ranks_with_length=()):
        def run(loader):
            if loader.rank in ranks_with_length:
                len(loader)
            return epochs(loader, total)

        return run

    assert [sorted(seen) for seen in in_threads(2, loop(1), checkpoint=checkpoint)] == [[0], [0]]
    assert in_threads(2, loop(1, [0, 1]), checkpoint=checkpoint) == [{}, {}]
    assert in_threads(2, loop(1, [0]), checkpoint=checkpoint) == [{}, {}]
    assert json.loads(checkpoint.read_bytes().partition(b"\n")[0])["state"]["epoch"] == 1
    results = in_threads(2, loop(2), checkpoint=checkpoint)
    assert [sorted(seen) for seen in results] == [[1], [1]]
    assert sorted(results[0][1] + results[1][1]) == list(range(103))


def test_rank_0_leaves_before_the_session_opens(in_threads):
    def loop(loader):
        if loader.rank:
            epochs(loader, 1)

    results = in_threads(2, loop)
    assert isinstance(results[1], ClusterError)
    assert "rank 1 waits for rank 0 to open the session, and rank 0 has left its loop" in str(results[1])
    assert isinstance(results[0], PeerFailed)


def test_a_rank_that_begins_later_has_all_epochs(in_threads):
    """Its task of the first epoch has begun before its loop."""

    def loop(loader):
        if loader.rank:
            mailbox = loader._mailbox
            mailbox.wait(lambda: mailbox._partition is not None, "for its first task")
        return epochs(loader, 2)

    results = in_threads(2, loop)
    for number in range(2):
        assert sorted(results[0][number] + results[1][number]) == list(range(103))


def test_a_rank_that_fails_before_the_session_opens(in_threads):
    """The session would wait for its worker."""

    def loop(loader):
        if loader.rank:
            raise ValueError("a bug")
        with pytest.raises(PeerFailed):
            loader._mailbox.wait(lambda: False, "for the failure of rank 1")
        epochs(loader, 1)

    results = in_threads(2, loop)
    assert isinstance(results[0], PeerFailed)
    assert "rank 1 of 2 has failed: ValueError: a bug" in str(results[0])


def test_the_rank_of_a_failed_task_is_that_of_its_worker():
    """Workers come in another order than their ranks."""
    workers = {"tcp://a:1": SimpleNamespace(name="1"), "tcp://b:1": SimpleNamespace(name="0")}
    scheduler = SimpleNamespace(
        handlers={}, stream_handlers={}, workers=workers, stream_comms={}, add_plugin=lambda plugin, name: None
    )
    job = Job(scheduler, place_of({}, rank=0, world_size=2), [1], {})
    for worker in workers:
        job.add_worker(scheduler, worker)
    job.task_failed("tcp://b:1", "a bug")
    assert str(job.failure) == "rank 0 of 2 has failed: a bug"


@pytest.mark.slow
def test_ranks_that_came_are_told_which_one_did_not(store, free_port, monkeypatch):
    errors, lines = {}, []
    monkeypatch.setattr("dshuffle.launched.job.LOG_AFTER", 0.1)
    monkeypatch.setattr("dshuffle.launched.job.logger.warning", lambda text, *values: lines.append(text % values))

    def rank_of(rank):
        try:
            with dshuffle.spmd(store, batch_size=8, rank=rank, world_size=3, port=free_port, timeout=12) as loader:
                epochs(loader, 1)
        except ClusterError as error:
            errors[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert "1 of 3 ranks have not come within 12 s: 2" in str(errors[0])
    assert "rank 0 of 3 has failed: ClusterError: 1 of 3 ranks have not come within 12 s: 2" in str(errors[1])
    assert re.fullmatch(r"dshuffle: rank 0 has waited \d+ s for ranks (1, )?2", lines[-1])
