"""Loops of threads that end at different places: an error on every rank, and no lost sample."""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
import time

import pytest

import dshuffle
from dshuffle.errors import ClusterError, PeerFailed

from ..conftest import in_a_fork
from .conftest import ONCE, all_epochs, counts, ids_of, stops_after, values

SAME_EPOCHS = "go through the same epochs"


def by_rank(*loops):
    """A loop for each rank."""
    return lambda loader: loops[loader.rank](loader)


def breaks_at_the_end(loader):
    ids_of(next(loader.epochs(1)))


@pytest.mark.parametrize(
    ("loops", "first", "second"),
    [
        ((all_epochs(1), stops_after(5)), "ends its loop after 7|was given [67]", "leaves the job after 5"),
        ((breaks_at_the_end, stops_after(5)), "leaves the job after 7|was given [67]", "leaves the job after 5"),
        ((stops_after(3), all_epochs(1)), "leaves the job after 3", "after 7|was given [4567]"),
        ((all_epochs(2), all_epochs(1)), "asks for epoch 1 after 7", "ends its loop after 7"),
        ((all_epochs(1), all_epochs(3)), "ends its loop after 7", "asks for epoch 1 after 7"),
        ((lambda loader: None, all_epochs(1)), "leaves the job", "opens the session"),
    ],
)
def test_loops_that_end_apart(in_threads, tmp_path, loops, first, second):
    for error in in_threads(2, by_rank(*loops), checkpoint=tmp_path / "run.json"):
        assert isinstance(error, PeerFailed)
        assert SAME_EPOCHS in str(error)
        assert re.search(f"rank 0 ({first})", str(error)), error
        assert re.search(f"rank 1 .*({second})", str(error)), error
    if (tmp_path / "run.json").exists():
        assert json.loads((tmp_path / "run.json").read_bytes().partition(b"\n")[0])["state"]["epoch"] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_an_epoch_alone_ends_the_others(in_threads, rank):
    """They are in the middle of the epoch, and may wait for it in a collective operation."""

    def loop(loader):
        for epoch in loader.epochs(2):
            for number, _ in enumerate(epoch, 1):
                if loader.rank == rank and number == 3:
                    assert is_ahead.wait(60)
                    break
                if number == 5:
                    is_ahead.set()
                    while True:
                        time.sleep(0.05)
                        loader._rank.check()

    is_ahead = threading.Event()
    for error in in_threads(2, loop):
        assert f"rank {rank} asks for epoch 1 after 3 of 7 batches of epoch 0, and rank {1 - rank} was given 5" in str(
            error
        )


def test_all_ranks_may_leave_an_epoch_early(in_threads):
    ranks = values(in_threads(2, lambda loader: [ids_of(itertools.islice(epoch, 3)) for epoch in loader.epochs(2)]))
    assert all(21 <= len(ids) <= 24 for rank in ranks for ids in rank)


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


@pytest.mark.slow
def test_the_length_in_a_job_that_is_done_skips_nothing(in_threads, tmp_path):
    def jobs(total, n_jobs=1):
        run = lambda loader: (len(loader) if loader.rank == 0 else 7, all_epochs(total)(loader))  # noqa: E731
        return [values(in_threads(2, run, checkpoint=tmp_path / "run.json")) for _ in range(n_jobs)]

    assert [[sorted(seen) for _, seen in job] for job in jobs(1, 3)] == [[[0], [0]], [[], []], [[], []]]
    [results] = jobs(2)
    assert [(length, sorted(seen)) for length, seen in results] == [(7, [1])] * 2
    assert counts([seen for _, seen in results], 1) == ONCE


def test_a_rank_that_fails_before_the_session_opens(in_threads):
    """The session would wait for its worker."""

    def fails(loader):
        raise ValueError("a bug")

    results = in_threads(2, by_rank(all_epochs(1), fails))
    assert isinstance(results[0], PeerFailed)
    assert "rank 1 of 2 has failed: ValueError: a bug" in str(results[0])


def test_a_mark_beyond_what_was_given(in_threads):
    [error] = in_threads(1, lambda loader: next(loader.epochs(1)).mark_trained(1))
    assert "n_batches=1 is not allowed; it must be at most 0, the batches that were given" in str(error)


class FakeGroup:
    """The part of ``torch.distributed`` that says how large its process group is."""

    is_available = is_initialized = staticmethod(lambda: True)
    get_world_size = staticmethod(lambda: 3)


def test_a_process_group_of_another_size(in_threads, monkeypatch):
    """Libraries make it after the loader."""

    def loop(loader):
        monkeypatch.setitem(sys.modules, "torch.distributed", FakeGroup)
        len(loader)

    [error] = in_threads(1, loop)
    assert "world_size=1 is not allowed; it must be 3, as the process group of PyTorch has it" in str(error)


@pytest.mark.slow
def test_ranks_that_came_are_told_which_one_did_not(store, free_port, monkeypatch):
    errors, lines = {}, []
    monkeypatch.setattr("dshuffle.launched.rank.LOG_AFTER", 0.1)
    monkeypatch.setattr("dshuffle.launched.rank.logger.warning", lambda text, *values: lines.append(text % values))

    def rank_of(rank):
        try:
            with dshuffle.spmd(store, batch_size=8, rank=rank, world_size=3, port=free_port, timeout=12) as loader:
                all_epochs(1)(loader)
        except ClusterError as error:
            errors[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert "ranks [2] of 3 have not come within 12 s" in str(errors[0])
    assert "rank 0 of 3 has failed: ClusterError: ranks [2] of 3 have not come within 12 s" in str(errors[1])
    assert any(re.fullmatch(r"dshuffle: rank 0 has waited \d+ s for ranks \[(1, )?2\]", line) for line in lines)


def test_two_loaders_at_once(in_threads, store, free_port):
    def loop(loader):
        options = {"batch_size": 50, "rank": loader.rank, "world_size": 2, "timeout": 60}
        for epoch in loader.epochs(2):
            with dshuffle.spmd(store, port=free_port - 1, **options) as validation:
                seen = [ids_of(part) for part in validation.epochs(1)]
            assert len(seen[0]) in (51, 52)
            ids_of(epoch)
        dshuffle.spmd(store, port=free_port, **options)

    for error in in_threads(2, loop):
        assert (
            f"port={free_port} is not allowed; it must be another one: a loader of this process is open on it"
            in str(error)
        )
